// Element types.
#pragma once
#include <cstdint>
#include <string>

namespace metalmm {

struct DType {
  enum Kind : uint8_t { kInt, kUInt, kFloat, kOpaque, kBFloat, kComplex, kBool };  // DLPack's codes; opaque: bytes
  Kind kind = kFloat;
  uint32_t size = 2;  // bytes

  bool operator==(const DType& o) const { return kind == o.kind && size == o.size; }
  bool operator!=(const DType& o) const { return !(*this == o); }
  std::string name() const;  // NumPy's
};
constexpr DType kFloat16{DType::kFloat, 2}, kBFloat16{DType::kBFloat, 2}, kFloat32{DType::kFloat, 4};
constexpr DType kInt8{DType::kInt, 1}, kUInt8{DType::kUInt, 1}, kUInt16{DType::kUInt, 2};

// What the operands of a matmul may be, and what a kernel is compiled for. An operand type's number is its place here.
constexpr DType kOperandTypes[] = {kFloat16, kBFloat16, kFloat32};
constexpr unsigned kOperandTypeCount = 3;
inline unsigned operand_type(DType t) {  // kOperandTypeCount for any other
  unsigned i = 0;
  while (i < kOperandTypeCount && kOperandTypes[i] != t) i++;
  return i;
}

}  // namespace metalmm
