#!/usr/bin/env bash
# Builds the extension with ThreadSanitizer and with AddressSanitizer + UBSan, preloads the runtime into Python and runs
# tests/sanitize_check.py: several threads on one device, batches dropped in every state, errors, closing.
#   bash tests/sanitize.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(readlink -f "$(dirname "$1")")/$(basename "$1")
nanobind=$("$python" -m nanobind --cmake_dir 2>/dev/null || { "$python" -m pip install --quiet nanobind && "$python" -m nanobind --cmake_dir; })
command -v cmake >/dev/null && command -v ninja >/dev/null || { "$python" -m pip install --quiet cmake ninja; PATH=$(dirname "$python"):$PATH; }

for kind in thread address,undefined; do
  name=${kind%%,*}
  dir=build/sanitize-$name
  CXX=g++ cmake -S . -B "$dir" -G Ninja -DMETALMM_SANITIZE=$kind -DMETALMM_STUBS=OFF -DCMAKE_PREFIX_PATH="$nanobind" -DPython_EXECUTABLE="$python" >/dev/null
  cmake --build "$dir" >/dev/null
  rm -rf "$dir/metalmm" && cp -r python/metalmm "$dir/metalmm" && rm -f "$dir"/metalmm/_core*.so
  cp "$dir"/_core*.so "$dir/metalmm/"
  mkdir -p "$dir/metalmm/resources/csrc" && cp -r kernels "$dir/metalmm/resources/" && cp -r csrc/msl "$dir/metalmm/resources/csrc/"
  runtime=$(g++ -print-file-name="lib$([ $name = thread ] && echo tsan || echo asan).so")
  echo "== $name sanitizer"
  # Python itself is not clean under leak checking; the extension's own objects are checked by their counts.
  TSAN_OPTIONS="halt_on_error=1 report_signal_unsafe=0" ASAN_OPTIONS="detect_leaks=0 detect_stack_use_after_return=0" UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1" \
    LD_PRELOAD="$runtime $(g++ -print-file-name=libstdc++.so)" METALMM_CACHE="$PWD/build/test-cache" PYTHONPATH="$dir" "$python" tests/sanitize_check.py "${SECONDS_EACH:-10}"
done
