# make bench: which kernel variant is right and which is fastest, shape by shape. make test: the test suite, on the CPU device, on a fake of
# NVIDIA's driver, and on Metal (off a Mac: on a fake Metal, where clang and GNUstep are installed).
# Both make what they need: a virtual environment in .venv with the package built into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find csrc kernels -type f) CMakeLists.txt pyproject.toml

.PHONY: bench test lint sanitize mutants clean

bench: $(VENV)/.built
	$(BIN)/metalmm bench --json build/bench.json $(ARGS)

test: $(VENV)/.built
	@command -v clang++ >/dev/null || echo "make test: no clang++ on the PATH; kernels are tested with g++ alone"
ifeq ($(shell uname),Darwin)  # in a process that is started again: Metal's validation ends one where it finds something
	@export OBJC_DISABLE_INITIALIZE_FORK_SAFETY=YES; \
	METALMM_DEVICE=cpu $(BIN)/python -m pytest -n 2 --dist worksteal --max-worker-restart=50 $(ARGS); cpu=$$?; \
	MTL_DEBUG_LAYER=1 METALMM_DEVICE=metal $(BIN)/python -m pytest -n 1 --max-worker-restart=200 $(ARGS); metal=$$?; \
	echo "make test: device cpu: exit $$cpu; device metal: exit $$metal"; exit $$((cpu + metal))  # the GPU, whatever the CPU suite said
else
	METALMM_DEVICE=cpu $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)
	@if command -v clang++ >/dev/null && command -v gnustep-config >/dev/null; then \
	  $(MAKE) --no-print-directory test-on-fake-metal $(if $(ARGS),,BESIDE=test-on-fake-cuda); \
	else $(if $(ARGS),,$(MAKE) --no-print-directory test-on-fake-cuda &&) { \
	  echo "make test: no clang++ with GNUstep (Debian: clang gobjc libgnustep-base-dev); device metal was NOT tested"; \
	  test -z "$(REQUIRE_METAL)"; }; fi
endif

# The whole suite on the Metal device's own code, against the fake Metal of tests/fake_metal.
.PHONY: fake-metal test-on-fake-metal
fake-metal: $(VENV)/.built
	bash tests/fake_metal.sh $(BIN)/python
# In two processes, which share the cache of compiled kernels: the fake lives in one process, so that pytest-xdist cannot divide its work.
# One also makes BESIDE, so that both take as long: FAKE_FIRST has about 100 s, test-on-fake-cuda 170, the rest 270.
FAKE_FIRST := tests/test_matmul.py tests/test_edges.py tests/test_types.py
test-on-fake-metal: export METALMM_DEVICE = metal
test-on-fake-metal: fake-metal
ifneq ($(ARGS),)
	$(BIN)/python tests/on_fake_metal.py -m pytest $(ARGS)
else
	{ beside=0; $(if $(BESIDE),$(MAKE) --no-print-directory $(BESIDE) || beside=1;) \
	  $(BIN)/python tests/on_fake_metal.py -m pytest $(FAKE_FIRST) && exit $$beside; } >build/fake-metal/first.log 2>&1 & first=$$!; \
	  $(BIN)/python tests/on_fake_metal.py -m pytest $(addprefix --ignore=,$(FAKE_FIRST)); rest=$$?; \
	  wait $$first; status=$$?; cat build/fake-metal/first.log; exit $$((rest + status))
endif

# The CUDA device's host code, against a fake of NVIDIA's driver and compiler: tests/fake_cuda. Needs a C++ compiler alone.
.PHONY: fake-cuda test-on-fake-cuda machine-code
fake-cuda: $(VENV)/.built
	bash tests/fake_cuda.sh
test-on-fake-cuda: export METALMM_DEVICE = cuda
test-on-fake-cuda: fake-cuda
	$(BIN)/python tests/on_fake_cuda.py -m pytest $(or $(ARGS),$(FAKE_CUDA_SUITE))
# What of the suite looks at host code; every kernel's results are looked at on the other devices, and on a GPU.
FAKE_CUDA_SUITE := $(addprefix tests/test_,cuda.py api.py arrays.py order.py lifetimes.py bad_input.py bench.py decide.py cli.py doctor.py msl.py)
# Every instance of every variant as machine code for NVIDIA's GPUs of compute capability 8.0 and 9.0; the suite takes a part.
machine-code: $(VENV)/.built
	METALMM_EVERY_INSTANCE=1 $(BIN)/python -m pytest -n 2 tests/test_machine_code.py

# The extension under a thread and an address sanitizer, with threads that issue at once; see tests/sanitize.sh.
sanitize: $(VENV)/.built
	bash tests/sanitize.sh $(BIN)/python

# Breaks kernels and core on purpose, one place at a time, and sees whether a test fails: tests/mutants. Half an hour and more.
mutants: $(VENV)/.built
	python=$(BIN)/python; . tests/stage.sh && $(BIN)/python tests/mutants/run.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.mm' '*.metal' ':!csrc/msl/runtime' ':!tests/fake_metal/apple')

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "metalmm needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.built: $(VENV)/.created $(SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.built
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
