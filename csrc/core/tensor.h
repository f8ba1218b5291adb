// Arrays as views of a device's or the host's memory.
#pragma once
#include <cstdint>
#include <string>

#include "device.h"

namespace metalmm {

constexpr int kMaxDims = 8;

// A strided view of a buffer; strides in elements.
struct Tensor {
  std::shared_ptr<Buffer> buffer;
  size_t offset = 0;  // bytes
  int ndim = 0;
  int64_t shape[kMaxDims] = {}, strides[kMaxDims] = {};
  DType dtype = kFloat16;

  uintptr_t address() const { return buffer->address() + offset; }  // of the first element
  int64_t count() const {                                           // of elements
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) n *= shape[i];
    return n;
  }
  bool contiguous() const;  // C order
  void make_contiguous();   // gives it the strides of that
  std::string shape_text() const;
};

// Addresses from the first to past the last element.
struct Extent {
  uintptr_t begin, end;
};
Extent extent(const Tensor& t);

}  // namespace metalmm
