// How B lies in memory: dense, or quantized, integers with a scale for each group along K (python/metalmm/quantized.py).
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "dtype.h"

namespace metalmm {

struct Storage {
  enum Format : uint8_t { dense, q8_0, q4_0, affine8, affine4, affine8f, affine4f };  // kernels/include/weights.h numbers them likewise
  Format format = dense;
  bool canonical = false;  // blocks of 32 along K, [k / 32, n, 32]; else rows, [n, k]
  uint32_t group = 0;      // neighbours along K that share a scale

  bool is_dense() const { return format == dense; }
  unsigned per_byte() const { return format == q4_0 || format == affine4 || format == affine4f ? 2 : 1; }
  bool has_biases() const { return format >= affine8; }
  bool is_affine() const { return has_biases() && format < affine8f; }  // scales and biases of the operands' type; any group
  DType scale_type(DType operands) const { return is_affine() ? operands : has_biases() ? kFloat32 : kFloat16; }
  bool operator==(const Storage& o) const { return format == o.format && canonical == o.canonical && group == o.group; }
  bool operator!=(const Storage& o) const { return !(*this == o); }

  uint64_t groups(uint64_t k) const { return (k - 1) / group + 1; }
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
constexpr unsigned kFormats = 7, kStorages = 2 * kFormats - 1;
extern const char* const kFormatNames[kFormats];

}  // namespace metalmm
