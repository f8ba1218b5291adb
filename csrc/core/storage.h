// How B lies in memory: dense, or quantized, integers with a scale for each group along K (python/metalmm/quantized.py).
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "dtype.h"

namespace metalmm {

struct Storage {
  // kernels/include/packing.h numbers them likewise.
  enum Format : uint8_t { dense, q8_0, q4_0, affine8, affine4, q5_k, q4_k, q8_k, q6_k, q2_k, nvfp4, fp4, fp8 };
  Format format = dense;
  bool canonical = false;  // blocks of 32 along K, [k / 32, n, 32]; else rows, [n, k]
  uint32_t group = 0;      // neighbours along K that share a scale

  bool is_dense() const { return format == dense; }
  unsigned per_byte() const { return format == q4_0 || format == affine4 || (format >= q5_k && format != q8_k && format != fp8) ? 2 : 1; }
  bool is_affine() const { return format == affine8 || format == affine4; }  // scales and biases of the operands' type; any group
  bool is_k() const { return format >= q5_k && format <= q2_k; }             // in place of biases factors of 256
  bool has_biases() const { return is_affine() || is_k(); }
  DType value_type() const { return format == q8_0 || format == q8_k ? kInt8 : kUInt8; }
  DType scale_type(DType operands) const { return is_affine() ? operands : is_k() ? kInt8 : format >= nvfp4 ? kUInt16 : kFloat16; }
  DType bias_type(DType operands) const { return is_k() ? kFloat16 : operands; }
  // Of a group, and of 256 weights: more than one are an axis of their own. q5_k has 2, two of nothing and 4 of upper bits; q6_k 2, 2
  // and 8.
  unsigned scales_each() const {
    return format == q6_k ? 12 : format == q5_k ? 8 : format == q2_k ? 4 : format >= q5_k && format < fp4 ? 2 : 1;
  }
  unsigned biases_each() const { return is_k() && format != q8_k && format != q6_k ? 2 : 1; }
  bool operator==(const Storage& o) const { return format == o.format && canonical == o.canonical && group == o.group; }
  bool operator!=(const Storage& o) const { return !(*this == o); }

  uint64_t groups(uint64_t k) const { return (k - 1) / group + 1; }
  uint64_t bias_groups(uint64_t k) const { return is_k() ? (k - 1) / 256 + 1 : groups(k); }
  uint64_t row_bytes(uint64_t k) const { return (k - 1) / per_byte() + 1; }  // of rows
  // Loads of 16 bytes are apart by this, or a multiple: of columns in rows.
  uint64_t ld(uint64_t k) const { return canonical ? 16 : row_bytes(k); }
  uint64_t value_bytes(uint64_t n, uint64_t k) const { return n * (canonical ? ((k - 1) / 32 + 1) * (32 / per_byte()) : row_bytes(k)); }

  // dense, or format[:group][:canonical], the group where it is not the format's default: q8_0, affine4:32, q4_0:canonical.
  std::string name() const;
  // By format and layout, whatever the group: dense, q8_0, q8_0:canonical, q4_0 and so on. Of kStorages.
  unsigned index() const { return is_dense() ? 0 : 2u * format - 1 + canonical; }
  static std::string name_of(unsigned index);
  static std::optional<Storage> parse(const std::string& text);
};
constexpr unsigned kFormats = 13, kStorages = 2 * kFormats - 1;
extern const char* const kFormatNames[kFormats];

}  // namespace metalmm
