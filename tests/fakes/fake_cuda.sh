#!/usr/bin/env bash
# Builds the fake of NVIDIA's driver and of NVRTC into build/fake-cuda (or $METALMM_FAKE_CUDA_BUILD), where they are not there yet.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=${METALMM_FAKE_CUDA_BUILD:-build/fake-cuda}
mkdir -p "$dir"
cxx=${CXX:-$(command -v g++ || command -v clang++)}
flags=(-std=c++17 -O1 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden -pthread)
[ "$(uname -m)" = x86_64 ] && flags+=(-mf16c)  # clang's halves without a run-time library
build() {  # target sources
  local target=$1
  shift
  [[ -e $target && -z $(find "$@" tests/fakes/fake_cuda csrc/cuda/driver.h csrc/cuda/blas.h csrc/msl/runtime csrc/cpu tests/fakes/fake_cuda.sh -newer "$target") ]] && return
  "$cxx" "${flags[@]}" "$@" -o "$target.new" -ldl
  mv "$target.new" "$target"
}
build "$dir/libfakecuda.so" tests/fakes/fake_cuda/fake_core.cpp tests/fakes/fake_cuda/fake_cublas.cpp tests/fakes/fake_cuda/fake_cuda.cpp tests/fakes/fake_cuda/fake_kernels.cpp csrc/cpu/counts.cpp csrc/cpu/executor.cpp csrc/cpu/executor_debug.cpp csrc/cpu/shadow.cpp csrc/cpu/source_lines.cpp
build "$dir/libfakenvrtc.so" tests/fakes/fake_cuda/fake_nvrtc.cpp
