#!/usr/bin/env bash
# Type-checks csrc (or the files given) as clang for macOS would: for arm64-apple-macosx14, with libc++ and Darwin's integer types. Its C
# headers are Linux's for 64-bit Arm, with stand-ins in apple/. The files of csrc/metal are Objective-C++ without ARC, against headers of
# the SDKs of macOS 15 and 26, made from the facts of Apple's API, and stand-ins for Foundation. A name newer than macOS 14 must stand
# behind @available, and one that the SDK of macOS 15 lacks is unknown.
#   bash tests/fakes/fake_metal/check_for_macos.sh PYTHON [FILE…]
# Needs clang, its libc++, g++ for 64-bit Arm, and a Python with nanobind.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=$1
shift
files=("$@")
[ $# -gt 0 ] || files=(csrc/*/*.cpp csrc/metal/*.mm)
libcxx=$(clang++ -print-resource-dir)/../../../include/c++/v1
[ -d "$libcxx" ] || { echo "check_for_macos.sh: clang++ has no libc++ here; install libc++-dev" >&2; exit 1; }
flags=(-fsyntax-only -std=c++17 --target=arm64-apple-macosx14 -U__nonnull -D_GNU_SOURCE -nostdinc++ -nostdlibinc -Itests/fakes/fake_metal/apple
  -isystem "$libcxx" -isystem /usr/aarch64-linux-gnu/include -DMETALMM_METAL=1 -Wall -Wextra -Werror -Wno-missing-field-initializers)
for include in $("$python" -c 'import nanobind, sysconfig; print(nanobind.include_dir(), sysconfig.get_path("include"))'); do
  flags+=(-isystem "$include")
done
cxx=() metal=()
for file in "${files[@]}"; do
  case $file in *.mm) metal+=("$file") ;; *) cxx+=("$file") ;; esac
done
check() { printf '%s\0' "${@:2}" | xargs -0 -P 2 -n 1 clang++ "${flags[@]}" $1; }
[ ${#cxx[@]} = 0 ] || check "" "${cxx[@]}"
echo "${#cxx[@]} files type-check for arm64-apple-macosx14"
[ ${#metal[@]} = 0 ] && exit
for sdk in 15 26; do
  dir=build/check-for-macos/$sdk
  mkdir -p $dir
  "$python" tests/fakes/fake_metal/make_headers.py tests/fakes/fake_metal/metal_api.json $dir --sdk $sdk >/dev/null
  for header in CoreFoundation/CoreFoundation IOSurface/IOSurfaceRef dispatch/dispatch mach/mach_types; do
    mkdir -p "$dir/$(dirname $header)" && : >"$dir/$header.h"  # what Metal.h takes from them, the stand-in for Foundation has
  done
  check "-xobjective-c++ -fno-objc-arc -fblocks -I$dir -Werror=objc-method-access -Wunguarded-availability" "${metal[@]}"
  echo "${#metal[@]} files type-check for arm64-apple-macosx14 against the SDK of macOS $sdk"
done
