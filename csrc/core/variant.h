// A named way to compute a product, with what it supports: one entry of the manifest.
#pragma once
#include <deque>
#include <iterator>
#include <unordered_map>

#include "../../kernels/include/params.h"
#include "storage.h"
#include "tensor.h"

namespace metalmm {

// What an operation asks for, without its data. C, bias and the result are of A's type; `c`: beta * C is added.
struct MatmulSpec {
  uint32_t m = 1, n = 1, k = 1, batch = 1;
  bool transpose_a = false, transpose_b = false, bias = false, c = false;
  float alpha = 1.0f, beta = 0.0f;
  DType a_type = kFloat16;  // of B, or of what its weights are multiplied with, too
  Storage b_storage;
  // Of a fused operation: columns of the second and third B, which share A with the first; 0: there is none.
  uint32_t also_n[2] = {0, 0};
  bool swiglu = false;         // of two: silu(A B0) * (A B1)
  bool row_invariant = false;  // a row's bits depend on neither m, up to kRowsAlike, nor its place

  unsigned parts() const { return 1 + (also_n[0] != 0) + (also_n[1] != 0); }
  unsigned end() const { return swiglu ? 3 : parts() - 1; }  // of kEndNames
  uint32_t part_n(unsigned i) const { return i == 0 ? n : also_n[i - 1]; }
  std::string text() const;
  const char* layout() const;  // nn, nt, tn or tt
  unsigned layout_index() const { return (transpose_a ? 1u : 0u) | (transpose_b ? 2u : 0u); }
  unsigned specialization() const;  // of the kernel; see below
  uint64_t b_bytes() const;
  uint64_t least_bytes() const;  // that must move: each operand and the result once
};
constexpr unsigned kLayouts = 4;
extern const char* const kLayoutNames[kLayouts];
constexpr const char* kEndNames[] = {"1", "2", "3", "swiglu"};  // matrices B of one A, or two that end in swiglu
constexpr unsigned kEnds = std::size(kEndNames);

// What a kernel is compiled for, beside its parameters: the layout's two bits, above them the number of the operands' type, then that of
// B's storage and end.
constexpr unsigned kTransposeA = 1, kTransposeB = 2, kTypeShift = 2, kKindShift = 4;
static_assert(kOperandTypeCount <= 1 << (kKindShift - kTypeShift));
constexpr unsigned kOfAKind = 1 << kKindShift;  // specializations
constexpr unsigned kKinds = kStorages * kEnds;

struct Range {
  uint32_t least = 1, most = UINT32_MAX;
};

// The output tile of a threadgroup and its threads; bn 0: all columns.
struct Tiling {
  uint32_t bm = 1, bn = 1, threads = 1;
};

constexpr uint32_t kRowsAlike = 16;  // the largest m of row_invariant

// Whether a row's bits depend on m or its place: they may; not where rows of A begin on vectors; not at all. The last two take any m.
// Vectors are of eight elements: memory is not aligned so for those of four bytes.
enum class Rows { may_differ, alike_on_vectors, alike };

// One kernel of a variant: the B that it takes, and what else it supports.
struct Form {
  unsigned storages = 0, ends = 0;  // bit per Storage::index(), and per MatmulSpec::end()
  Range m, n, k, batch;
  std::vector<uint32_t> n_values;  // empty: any
  unsigned layouts = 0;            // bit per layout_index()
  bool bias = true, c = true, alpha = true;
  Rows rows = Rows::may_differ;
  bool rows_alike(const MatmulSpec& s) const { return rows == Rows::alike || (rows == Rows::alike_on_vectors && s.a_type.size == 2); }
  Range m_of(const MatmulSpec& s) const { return s.row_invariant ? Range{1, kRowsAlike} : m; }
  std::string without[kOperandTypeCount];  // why it does not take operands of that type; empty: it does

  bool takes(const MatmulSpec& s) const { return (storages >> s.b_storage.index() & 1) && (ends >> s.end() & 1); }
  bool supports(const MatmulSpec& spec) const;
  std::string lacks(const MatmulSpec& spec) const;
};

struct Variant {
  std::string id;
  uint32_t index = 0;  // in the registry, and in every device's pipeline cache
  bool enabled = true;
  Tiling tiling;
  std::vector<Form> forms;           // no two take the same B
  std::vector<std::string> devices;  // names of those that it is restricted to; empty: any
  uint32_t device_bits = ~0u;        // the same
  std::vector<std::string> needs;    // features that not every device of those names has
  std::string library;               // empty: a kernel of ours

  bool runs_on(const Device& device) const { return (device_bits & device.name_bit()) && missing(device).empty(); }
  std::string missing(const Device& device) const;  // the first of `needs` that the device lacks, or nothing
  const Form* form(const MatmulSpec& spec) const;   // that takes its B, or null
  bool supports(const MatmulSpec& spec) const;
  // Empty, or what this variant lacks for the operation, in words.
  std::string lacks(const MatmulSpec& spec) const;
};

// All variants, by id. References stay valid; an entry that is added again replaces what the first says.
class Registry {
 public:
  void add(Variant v);
  void remove(const std::string& id);
  const Variant* find(const std::string& id) const;
  // "; supported by ..." for an error: others that take the operation on that device.
  std::string alternatives(const MatmulSpec& spec, const Device& device) const;

 private:
  std::deque<Variant> variants_;
  std::unordered_map<std::string, Variant*> by_id_;
};

}  // namespace metalmm
