# make bench: which kernel variant is right and which is fastest, shape by shape. make test: the test suite; docs/testing.md says what is in it.
# Both make what they need: a virtual environment in .venv with the package built into it.
PYTHON ?= python3
VENV := .venv
# Compiled Python lies in build, and is there when a process begins, even where the environment says to write none.
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
SOURCES := $(shell find csrc kernels -type f) CMakeLists.txt pyproject.toml

.PHONY: bench test test-rest test-all test-gpu lint docs sanitize mutants clean

bench: $(VENV)/.built
	$(BIN)/metalmm bench --json build/bench.json $(ARGS)

# What each change needs: on device cpu, then Metal's and CUDA's host code on fakes of their drivers, side by side. make test-rest PART=2/3 takes
# the second third of what that leaves out. ARGS: for pytest, of device cpu alone, and nothing is left out.
PYTEST := $(BIN)/python -m pytest
ON_METAL := $(BIN)/python tests/fakes/on_fake_metal.py -m pytest
ON_CUDA := $(BIN)/python tests/fakes/on_fake_cuda.py -m pytest
HAVE_METAL := $(shell command -v clang++ >/dev/null && command -v gnustep-config >/dev/null && command -v gcc >/dev/null && echo yes)
JOBS ?= auto
PART ?= first
test: export METALMM_TEST_PART = $(if $(ARGS)$(METALMM_TEST_ALL),,$(PART))
test: $(VENV)/.built
	@command -v clang++ >/dev/null || echo "make test: no clang++ on the PATH; kernels are tested with g++ alone"
ifeq ($(shell uname),Darwin)  # in a process that is started again: Metal's validation ends one where it finds something
	@export OBJC_DISABLE_INITIALIZE_FORK_SAFETY=YES; \
	METALMM_DEVICE=cpu $(PYTEST) -n $(JOBS) --dist worksteal --max-worker-restart=50 $(ARGS); cpu=$$?; \
	MTL_DEBUG_LAYER=1 METALMM_DEVICE=metal $(PYTEST) -n 1 --max-worker-restart=200 $(ARGS); metal=$$?; \
	echo "make test: device cpu: exit $$cpu; device metal: exit $$metal"; exit $$((cpu + metal))  # the GPU, whatever the CPU suite said
else
	METALMM_DEVICE=cpu $(PYTEST) -n $(JOBS) --dist worksteal $(ARGS)
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-on-fakes)
endif

test-rest: PART = 1/1
test-rest: test

# Everything: each instance of each variant with each compiler, the random campaign, machine code for NVIDIA's GPUs.
test-all: export METALMM_TEST_ALL = 1
test-all:
	@$(MAKE) --no-print-directory test

# The kernels on this machine's GPU: METALMM_DEVICE=metal or cuda.
test-gpu: $(VENV)/.built
	$(PYTEST) -n $(JOBS) --dist worksteal tests/kernels $(ARGS)

.PHONY: test-on-fakes fake-metal fake-cuda test-on-fake-metal test-on-fake-cuda
fake-metal: $(VENV)/.built
	bash tests/fakes/fake_metal.sh $(BIN)/python
fake-cuda: $(VENV)/.built
	bash tests/fakes/fake_cuda.sh
test-on-fake-metal: fake-metal
	METALMM_DEVICE=metal $(ON_METAL) $(ARGS)
test-on-fake-cuda: fake-cuda
	METALMM_DEVICE=cuda $(ON_CUDA) $(ARGS)
# In processes of their own: a fake lives in one, so that pytest-xdist cannot divide its work.
PARTS := on-cuda $(if $(HAVE_METAL),on-metal)
.PHONY: $(PARTS)
on-cuda:
	@METALMM_DEVICE=cuda $(ON_CUDA)
on-metal:
	@METALMM_DEVICE=metal $(ON_METAL)
test-on-fakes: $(VENV)/.built
	@$(MAKE) --no-print-directory -j2 fake-cuda $(if $(HAVE_METAL),fake-metal)
	@$(MAKE) --no-print-directory --keep-going --output-sync=target -j2 $(PARTS)
ifeq ($(HAVE_METAL),)
	@echo "make test: no clang++ and gcc with GNUstep (Debian: clang gobjc libgnustep-base-dev); device metal was NOT tested"; test -z "$(REQUIRE_METAL)"
endif

# The extension under a thread and an address sanitizer, with threads that issue at once; see tests/sanitize/run.sh.
sanitize: $(VENV)/.built
	bash tests/sanitize/run.sh $(BIN)/python

# Breaks kernels, C++ and Python on purpose, one place at a time, and sees whether a test fails: tests/mutants. An hour.
mutants: $(VENV)/.dev
	python=$(BIN)/python; . tests/fakes/stage.sh && $(BIN)/python tests/mutants/run.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.mm' '*.metal' ':!csrc/msl/runtime' ':!tests/fakes/fake_metal/apple')

# The reference of the Python API, of its docstrings: build/docs/metalmm.html.
docs: $(VENV)/.dev
	$(BIN)/python -W error -m pdoc --docformat google --no-show-source -o build/docs metalmm

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "metalmm needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# Without isolation, so that a change compiles what it touches. The packages of .dev alone: with metalmm it would be built again.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
LISTED = $(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))$(1), sep="\n")'
$(VENV)/.built: $(VENV)/.created $(SOURCES)
	$(call LISTED,["build-system"]["requires"]) | $(PIP) -r /dev/stdin
	command -v cmake >/dev/null && command -v ninja >/dev/null || $(PIP) cmake ninja
	PATH=$(abspath $(BIN)):$$PATH $(PIP) --no-build-isolation -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.built
	$(call LISTED,["project"]["optional-dependencies"]["dev"]) | $(PIP) -r /dev/stdin
	touch $@

clean:
	rm -rf $(VENV) build dist
