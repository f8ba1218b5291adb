# Sourced by tests/fakes/fake_metal.sh and tests/sanitize/run.sh, with `python` set: what a build beside the installed package takes.
nanobind=$("$python" -m nanobind --cmake_dir 2>/dev/null || { "$python" -m pip install --quiet nanobind && "$python" -m nanobind --cmake_dir; })
command -v cmake >/dev/null && command -v ninja >/dev/null || { "$python" -m pip install --quiet cmake ninja; PATH=$(dirname "$python"):$PATH; }

# stage DIR: the package around the extension that was built in DIR.
stage() {
  rm -rf "$1/metalmm" && cp -r python/metalmm "$1/metalmm" && rm -f "$1"/metalmm/_core*.so
  cp "$1"/_core*.so "$1/metalmm/"
  # Links: a kernel's text names its file, and modules that other builds compiled are taken from the cache.
  mkdir -p "$1/metalmm/resources/csrc" && ln -s "$PWD/kernels" "$1/metalmm/resources/kernels" && ln -s "$PWD/csrc/msl" "$1/metalmm/resources/csrc/msl"
}
