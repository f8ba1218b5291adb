#!/usr/bin/env bash
# Builds the package with the Metal device against the fake Metal into build/fake-metal (or $METALMM_FAKE_BUILD).
#   bash tests/fakes/fake_metal.sh PYTHON [cmake options]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(readlink -f "$(dirname "$1")")/$(basename "$1")
shift
dir=${METALMM_FAKE_BUILD:-build/fake-metal}
source tests/fakes/stage.sh
CXX=clang++ cmake -S . -B "$dir" -G Ninja -DMETALMM_FAKE_METAL=ON -DCMAKE_CXX_FLAGS_RELEASE="-O0 -DNDEBUG" -DCMAKE_PREFIX_PATH="$nanobind" \
  -DPython_EXECUTABLE="$python" "$@" >/dev/null
cmake --build "$dir" --  -v >"$dir/build.log" 2>&1 || { grep -E ": (error|warning|fatal error):|undefined" "$dir/build.log"; exit 1; }
stage "$dir"
