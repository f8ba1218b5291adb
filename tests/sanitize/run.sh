#!/usr/bin/env bash
# Builds the extension with ThreadSanitizer and with AddressSanitizer + UBSan, preloads the runtime into Python and runs
# tests/sanitize/threads.py on each device: several threads on one device, batches dropped in every state, errors, closing. Where clang
# and GNUstep are there, that is clang's build of the fake Metal, with device cpu in it, and a part of the test suite runs on it under
# AddressSanitizer + UBSan. Elsewhere it is g++'s build of device cpu.
#   bash tests/sanitize/run.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(readlink -f "$(dirname "$1")")/$(basename "$1")
source tests/fakes/stage.sh
source tests/sanitize/beside.sh
# Python itself is not clean under leak checking; the extension's own objects are checked by their counts.
export ASAN_OPTIONS="detect_leaks=0 detect_stack_use_after_return=0" UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1"
export METALMM_CACHE="$PWD/build/test-cache" METALMM_CPU_THREADS=2
seconds=${SECONDS_EACH:-30}  # of three runs side by side

threads() {  # DEVICE COMMAND...: each under the runtime of the build in hand
  echo "== $name sanitizer, device $1 ${METALMM_FAKE:-}"
  TSAN_OPTIONS="halt_on_error=1 report_signal_unsafe=0 suppressions=$PWD/tests/fakes/fake_metal/tsan_suppressions" \
    LD_PRELOAD="$runtime $(g++ -print-file-name=libstdc++.so)" METALMM_DEVICE=$1 timeout 300 "$python" "${@:2}" tests/sanitize/threads.py "$seconds"
}
has_metal=$(command -v clang++ >/dev/null && command -v gnustep-config >/dev/null && echo yes || true)
for kind in thread address,undefined; do
  name=${kind%%,*}
  if [ -n "$has_metal" ]; then
    [ $name = thread ] || seconds=${SECONDS_EACH:-5}  # the suite runs under that one, too
    export METALMM_FAKE_BUILD="$PWD/build/sanitize-fake-$name"
    bash tests/fakes/fake_metal.sh "$python" -DMETALMM_SANITIZE=$kind
    # clang's runtime for threads does not start under kernels of many address bits; GCC's serves its code as well.
    runtime=$([ $name = thread ] && g++ -print-file-name=libtsan.so || clang++ -print-file-name="libclang_rt.asan-$(uname -m).so")
    beside cpu threads cpu tests/fakes/on_fake_metal.py
    beside metal threads metal tests/fakes/on_fake_metal.py
    METALMM_FAKE=in_time=1,start_us=20,status_lag_us=50 beside in-time threads metal tests/fakes/on_fake_metal.py  # all that is optional on
    all_through
  else
    dir=build/sanitize-$name
    CXX=g++ cmake -S . -B "$dir" -G Ninja -DMETALMM_SANITIZE=$kind -DCMAKE_PREFIX_PATH="$nanobind" -DPython_EXECUTABLE="$python" >/dev/null
    cmake --build "$dir" >/dev/null
    stage "$dir"
    runtime=$(g++ -print-file-name="lib$([ $name = thread ] && echo tsan || echo asan).so")
    PYTHONPATH="$dir" threads cpu
  fi
done
[ -n "$has_metal" ] || { echo "== no clang and GNUstep: nothing checked on the fake Metal"; exit 0; }
# To files: pytest has what a process says, and that is lost where it ends at once. (Tests that mean to die write there, too.)
export ASAN_OPTIONS="$ASAN_OPTIONS:log_path=$METALMM_FAKE_BUILD/report" UBSAN_OPTIONS="$UBSAN_OPTIONS:log_path=$METALMM_FAKE_BUILD/report"
rm -f "$METALMM_FAKE_BUILD"/report.*
# Part of the suite, in a process of its own; what sends itself SIGINT, which a shell's background ignores, in the foreground. Others' code, and
# kernels, no sanitizer has seen: what only runs many of them is left out.
suite() {
  LD_PRELOAD="$runtime $(g++ -print-file-name=libstdc++.so)" METALMM_DEVICE=metal timeout 900 "$python" tests/fakes/on_fake_metal.py -m pytest -q -p no:cacheprovider \
    "${@/#/tests/}" -k "not torch and not mlx and not newer_than_what_we_build_for and not every_strategy and not auto_offers"
}
beside suite suite devices/metal/test_metal_device.py devices/metal/test_metal_work.py devices/metal/test_unkind_gpus.py \
  devices/test_order.py devices/test_api.py devices/test_bad_input.py
status=0
suite devices/cpu/test_misbehaving.py devices/cpu/test_cpu_device.py conformance/test_msl.py devices/test_arrays.py devices/metal/test_new_device.py \
  devices/metal/test_unkind_details.py || status=$?
all_through || status=$?
[ $status = 0 ] || tail -n 60 "$METALMM_FAKE_BUILD"/report.* || true
exit $status
