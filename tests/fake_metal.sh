#!/usr/bin/env bash
# Builds the package with the Metal device against the fake Metal into build/fake-metal (or $METALMM_FAKE_BUILD).
#   bash tests/fake_metal.sh PYTHON [cmake options]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(readlink -f "$(dirname "$1")")/$(basename "$1")
shift
dir=${METALMM_FAKE_BUILD:-build/fake-metal}
nanobind=$("$python" -m nanobind --cmake_dir 2>/dev/null || { "$python" -m pip install --quiet nanobind && "$python" -m nanobind --cmake_dir; })
command -v cmake >/dev/null && command -v ninja >/dev/null || { "$python" -m pip install --quiet cmake ninja; PATH=$(dirname "$python"):$PATH; }
CXX=clang++ cmake -S . -B "$dir" -G Ninja -DMETALMM_FAKE_METAL=ON -DMETALMM_STUBS=OFF -DCMAKE_PREFIX_PATH="$nanobind" \
  -DPython_EXECUTABLE="$python" "$@" >/dev/null
cmake --build "$dir" --  -v >"$dir/build.log" 2>&1 || { grep -E ": (error|warning|fatal error):|undefined" "$dir/build.log"; exit 1; }
rm -rf "$dir/metalmm" && cp -r python/metalmm "$dir/metalmm" && rm -f "$dir"/metalmm/_core*.so
cp "$dir"/_core*.so "$dir/metalmm/"
mkdir -p "$dir/metalmm/resources/csrc" && cp -r kernels "$dir/metalmm/resources/" && cp -r csrc/msl "$dir/metalmm/resources/csrc/"
