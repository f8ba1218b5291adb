#include "tensor.h"

namespace metalmm {

std::string DType::name() const {
  static const char* const kinds[] = {"int", "uint", "float", "void", "bfloat", "complex", "bool"};
  return kind == kBool ? "bool" : kinds[kind] + std::to_string(size * 8);
}

bool Tensor::contiguous() const {
  int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; i--) {
    if (shape[i] > 1 && strides[i] != stride) return false;
    stride *= shape[i];
  }
  return true;
}

void Tensor::make_contiguous() {
  int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; i--) strides[i] = stride, stride *= shape[i];
}

std::string Tensor::shape_text() const {
  std::string s = "(";
  for (int i = 0; i < ndim; i++) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + (ndim == 1 ? ",)" : ")");
}

Extent extent(const Tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; i++) last += (t.shape[i] - 1) * t.strides[i];
  return {t.address(), t.address() + static_cast<uintptr_t>(last + 1) * t.dtype.size};
}

}  // namespace metalmm
