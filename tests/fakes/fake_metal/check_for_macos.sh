#!/usr/bin/env bash
# Type-checks csrc/metal (or the files given) as clang for macOS would: Objective-C++ for arm64-apple-macosx14, without ARC, against
# headers of the SDKs of macOS 15 and 26, made from the facts of Apple's API, and stand-ins for Foundation. A name newer than macOS 14
# must stand behind @available, and one that the SDK of macOS 15 lacks is unknown. And csrc/core and csrc/cpu, whose branches for Darwin no
# other compiler sees. Needs clang and the headers of a 64-bit Arm C++ library.
set -euo pipefail
cd "$(dirname "$0")/../../.."
arm=/usr/aarch64-linux-gnu/include
cxx=$(ls -d $arm/c++/* | tail -n 1)
files=("${@:-}")
[ $# -gt 0 ] || files=(csrc/metal/*.mm)
flags=(-fsyntax-only -std=c++17 --target=arm64-apple-macosx14 -U__nonnull -D_GNU_SOURCE -nostdinc++ -nostdlibinc -Itests/fakes/fake_metal/apple
  -isystem "$cxx" -isystem "$cxx/aarch64-linux-gnu" -isystem $arm -Wall -Wextra -Werror -Wno-missing-field-initializers)
if [ $# -eq 0 ]; then
  for file in csrc/core/*.cpp csrc/cpu/*.cpp; do clang++ "${flags[@]}" "$file"; done
  echo "csrc/core and csrc/cpu type-check for arm64-apple-macosx14"
fi
for sdk in 15 26; do
  dir=build/check-for-macos/$sdk
  mkdir -p $dir
  python3 tests/fakes/fake_metal/make_headers.py tests/fakes/fake_metal/metal_api.json $dir --sdk $sdk >/dev/null
  for header in CoreFoundation/CoreFoundation IOSurface/IOSurfaceRef dispatch/dispatch mach/mach_types; do
    mkdir -p "$dir/$(dirname $header)" && : >"$dir/$header.h"  # what Metal.h takes from them, the stand-in for Foundation has
  done
  for file in "${files[@]}"; do
    clang++ "${flags[@]}" -xobjective-c++ -fno-objc-arc -fblocks -I$dir -Werror=objc-method-access -Wunguarded-availability "$file"
  done
  echo "${#files[@]} files type-check for arm64-apple-macosx14 against the SDK of macOS $sdk"
done
