// A matmul from its arguments to a dispatch: shapes, layouts, the variant's capabilities, grid and bindings.
#pragma once
#include <optional>

#include "../../kernels/include/params.h"
#include "device.h"

namespace metalmm {

// What an operation asks for, without its data. `c`: beta * C is added; `shared_b`: one B for the whole batch.
struct MatmulSpec {
  uint32_t m = 1, n = 1, k = 1, batch = 1;
  bool transpose_a = false, transpose_b = false, bias = false, c = false;
  float alpha = 1.0f, beta = 0.0f;

  std::string text() const;
  const char* layout() const;  // nn, nt, tn or tt
  unsigned layout_index() const { return (transpose_a ? 1u : 0u) | (transpose_b ? 2u : 0u); }
};
constexpr unsigned kLayouts = 4;

// What a kernel may be compiled for; bits in the order of SPECIALIZATIONS in manifest.py. The first two are the layout's.
enum Specialization : unsigned {
  kTransposeA = 1,
  kTransposeB = 2,
  kAlignM = 4,  // a whole number of tiles
  kAlignN = 8,
  kAlignK = 16,
  kVec4 = 32  // A and B can be read as half4 wherever a row begins
};
constexpr unsigned kSpecializations = 64;

// Throws where a size is zero or the elements of an operand cannot be counted in 32 bits.
void check_sizes(const MatmulSpec& spec);

struct Range {
  uint32_t least = 1, most = UINT32_MAX;
};

// The output tile of a threadgroup and its threads; bn 0: all columns.
struct Tiling {
  uint32_t bm = 1, bn = 1, threads = 1;
};

// One entry of the manifest.
struct Variant {
  std::string id;
  uint32_t index = 0;  // in the registry, and in every device's pipeline table
  bool enabled = true;
  Tiling tiling;
  Range m, n, k, batch;
  std::vector<uint32_t> n_values;                    // empty: any
  unsigned layouts = 0;                              // bit per layout_index()
  uint32_t bk = 1;                                   // of a tile, for kAlignK
  unsigned specializes = kTransposeA | kTransposeB;  // those that its kernel is compiled for
  bool bias = true, c = true, alpha = true;
  unsigned devices = 0;  // bits of DeviceKind
  std::string builtin;   // empty: a kernel of ours

  bool supports(const MatmulSpec& spec) const;
  unsigned specialization(const MatmulSpec& spec, const MatmulParams& params) const;
  // Empty, or what this variant lacks for the operation, in words.
  std::string lacks(const MatmulSpec& spec) const;
};

struct DTypeCode {
  uint8_t code = 0, bits = 0;  // as in DLPack
  bool operator==(const DTypeCode& o) const { return code == o.code && bits == o.bits; }
};
constexpr DTypeCode kFloat16{2, 16};

constexpr int kMaxDims = 8;

// A strided view of a buffer; strides in elements.
struct Tensor {
  std::shared_ptr<Buffer> buffer;
  size_t offset = 0;  // bytes
  int ndim = 0;
  int64_t shape[kMaxDims] = {}, strides[kMaxDims] = {};
  DTypeCode dtype = kFloat16;
};

struct MatmulArgs {
  const Tensor *a, *b, *bias = nullptr, *c = nullptr;
  float alpha = 1.0f, beta = 0.0f;
  bool transpose_a = false, transpose_b = false;
};

// Checked and laid out: all that is left is a pipeline and an output.
struct MatmulPlan {
  MatmulSpec spec;
  MatmulParams params;
  int out_ndim;
  int64_t out_shape[3];
};

MatmulPlan plan_matmul(const MatmulArgs& args);
MatmulParams contiguous_params(const MatmulSpec& spec);  // of operands that lie densely at aligned addresses
void check_out(const MatmulPlan& plan, const MatmulArgs& args, const Tensor& out);

// Buffer indices of every matmul kernel.
enum MatmulIndex : uint32_t { kIndexA, kIndexB, kIndexD, kIndexC, kIndexBias, kIndexParams };

inline Size3 matmul_grid(const Tiling& v, const MatmulSpec& s) {
  auto tiles = [](uint32_t size, uint32_t tile) { return tile ? (size - 1) / tile + 1 : 1; };
  return {tiles(s.n, v.bn), tiles(s.m, v.bm), s.batch};
}

// Builds the dispatch and hands it to `use`; what it points to lives until `use` returns.
template <class Use>
auto with_dispatch(const Tiling& v, const std::shared_ptr<Pipeline>& pipeline, const MatmulPlan& plan, const MatmulArgs& args,
                   const Tensor& out, Use&& use) {
  // Metal wants every index bound; A stands in for what the kernel will not touch.
  const Tensor& c = args.c ? *args.c : *args.a;
  const Tensor& bias = args.bias ? *args.bias : *args.a;
  const BufferBinding buffers[] = {{kIndexA, &args.a->buffer, args.a->offset},
                                   {kIndexB, &args.b->buffer, args.b->offset},
                                   {kIndexD, &out.buffer, out.offset},
                                   {kIndexC, &c.buffer, c.offset},
                                   {kIndexBias, &bias.buffer, bias.offset}};
  const BytesBinding params = {kIndexParams, &plan.params, sizeof(plan.params)};
  Dispatch d{&pipeline, buffers, 5, &params, 1, nullptr, 0, matmul_grid(v, plan.spec), {v.threads, 1, 1}};
  return use(d);
}

}  // namespace metalmm
