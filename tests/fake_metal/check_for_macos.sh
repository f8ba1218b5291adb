#!/usr/bin/env bash
# Type-checks csrc/metal as clang for macOS would: Objective-C++ for arm64-apple-macosx14, without ARC, against headers made
# from the facts of Apple's API and stand-ins for Foundation. Needs clang and the headers of a 64-bit Arm C++ library.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=build/check-for-macos
arm=/usr/aarch64-linux-gnu/include
cxx=$(ls -d $arm/c++/* | tail -n 1)
mkdir -p $dir
python3 tests/fake_metal/make_headers.py tests/fake_metal/metal_api.json $dir >/dev/null
for header in CoreFoundation/CoreFoundation IOSurface/IOSurfaceRef dispatch/dispatch mach/mach_types; do
  mkdir -p "$dir/$(dirname $header)" && : >"$dir/$header.h"  # what Metal.h takes from them, the stand-in for Foundation has
done
for file in csrc/metal/*.mm; do
  clang++ -fsyntax-only -xobjective-c++ -std=c++17 --target=arm64-apple-macosx14 -fno-objc-arc -fblocks -U__nonnull -D_GNU_SOURCE \
    -nostdinc++ -nostdlibinc -isystem "$cxx" -isystem "$cxx/aarch64-linux-gnu" -isystem $arm -Itests/fake_metal/apple -I$dir \
    -Wall -Wextra -Werror -Werror=objc-method-access "$file"
done
echo "csrc/metal: $(ls csrc/metal/*.mm | wc -l) files type-check for arm64-apple-macosx14"
