// A matmul from its arguments to a dispatch: shapes, layouts, grid and bindings.
#pragma once
#include <algorithm>
#include <vector>

#include "variant.h"

namespace metalmm {

// Throws where a size is zero or the elements of an operand cannot be counted in 32 bits.
void check_sizes(const MatmulSpec& spec);

// What a quantized B has beside its integers, which are then `b`; it is n rows of k weights.
struct QuantizedB {
  Storage storage;
  int64_t n = 0, k = 0;
  const Tensor *scales = nullptr, *biases = nullptr;
};

// Operands and scalars of one call; what is null is not there.
struct MatmulArgs {
  const Tensor *a, *b, *bias = nullptr, *c = nullptr;
  float alpha = 1.0f, beta = 0.0f;
  bool transpose_a = false, transpose_b = false;
  QuantizedB quantized;
};

// Checked and laid out: all that is left is a pipeline and an output.
struct MatmulPlan {
  MatmulSpec spec;
  MatmulParams params;
  int out_ndim;
  int64_t out_shape[3];
};

MatmulPlan plan_matmul(const MatmulArgs& args);
// rows_apart: its rows need not be neighbours, and the plan is told how far apart they are.
void check_out(MatmulPlan& plan, const MatmulArgs& args, const Tensor& out, bool rows_apart = false);

// One B of a fused call with all that goes with it.
struct FusedPart {
  const MatmulArgs& args;
  const MatmulPlan& plan;
  const Tensor* out;
};
// Of several matmuls of one A the one spec; throws where they do not go together.
MatmulSpec fuse(const std::vector<FusedPart>& parts, bool swiglu);
// Throws where a result overlaps another's, which may be other columns of the same array, or what another reads.
void check_outs_apart(const std::vector<FusedPart>& parts);

// Buffer indices of every matmul kernel.
enum MatmulIndex : uint32_t {
  kIndexA,
  kIndexB,
  kIndexD,
  kIndexC,
  kIndexBias,
  kIndexParams,
  kIndexScales,
  kIndexBiases,
  kIndexMaps = kMapsIndex
};

inline Size3 matmul_grid(const Tiling& v, const MatmulSpec& s) {
  auto tiles = [](uint32_t size, uint32_t tile) { return tile ? (size - 1) / tile + 1 : 1; };
  uint32_t across = tiles(s.n, v.bn);
  for (unsigned i = 1; i < s.parts() && !s.swiglu; i++) across += tiles(s.part_n(i), v.bn);
  return {across, tiles(s.m, v.bm), s.batch};
}

// Metal wants every index bound. What stands in for a bias may be read before A is there, and may not be A: the first of scales and B that
// holds an element of a bias and stands on one; else A all the same.
inline const Tensor& bias_or_other(const MatmulArgs& args) {
  if (args.bias) return *args.bias;
  for (const Tensor* t : {args.quantized.scales, args.b})
    if (t && t->buffer->size() >= t->offset + args.a->dtype.size && t->address() % args.a->dtype.size == 0) return *t;
  return *args.a;
}

inline void give_threadgroup_memory(Dispatch& d) {
  const std::vector<ThreadgroupMemory>& memory = (*d.pipeline)->threadgroup_memory;
  if (!memory.empty()) d.threadgroup_memory = memory.data(), d.threadgroup_memory_count = memory.size();
}

// Builds the dispatch and hands it to `use`; what it points to lives until `use` returns.
template <class Use>
auto with_dispatch(const Tiling& v, const std::shared_ptr<Pipeline>& pipeline, const MatmulPlan& plan, const MatmulArgs& args,
                   const Tensor& out, Use&& use) {
  const Tensor& c = args.c ? *args.c : *args.a;
  const Tensor& bias = bias_or_other(args);
  const QuantizedB& q = args.quantized;
  const Tensor& scales = q.scales ? *q.scales : *args.b;
  const Tensor& biases = q.biases ? *q.biases : scales;
  const BufferBinding buffers[] = {{kIndexA, &args.a->buffer, args.a->offset},   {kIndexB, &args.b->buffer, args.b->offset},
                                   {kIndexD, &out.buffer, out.offset},           {kIndexC, &c.buffer, c.offset},
                                   {kIndexBias, &bias.buffer, bias.offset},      {kIndexScales, &scales.buffer, scales.offset},
                                   {kIndexBiases, &biases.buffer, biases.offset}};
  bool takes_maps = pipeline->takes_maps();
  abi::TileMaps maps;
  if (takes_maps) maps = {{}, {}, 0, v.bm, v.bn, 0};  // device cuda fills in the rest
  const BytesBinding bytes[] = {{kIndexParams, &plan.params, sizeof(plan.params)}, {kIndexMaps, &maps, sizeof(maps)}};
  Dispatch d{&pipeline, buffers, q.scales ? 7u : 5u, bytes, takes_maps ? 2u : 1u, nullptr, 0, matmul_grid(v, plan.spec), {v.threads, 1, 1}};
  give_threadgroup_memory(d);
  return use(d);
}

// Of a fused call: B, result, bias, scales and biases of the first at their own indices, of the others from 8 and from 13 on.
template <class Use>
auto with_fused_dispatch(const Tiling& v, const std::shared_ptr<Pipeline>& pipeline, const MatmulSpec& spec,
                         const std::vector<FusedPart>& parts, Use&& use) {
  constexpr uint32_t kFirst[] = {kIndexB, kIndexD, kIndexBias, kIndexScales, kIndexBiases};
  BufferBinding buffers[16];
  FusedParams params;
  buffers[0] = {kIndexA, &parts[0].args.a->buffer, parts[0].args.a->offset};
  for (uint32_t i = 0; i < 3; i++) {
    const FusedPart& part = parts[std::min<size_t>(i, parts.size() - 1)];  // the last stands in for those that the kernel will not touch
    const QuantizedB& q = part.args.quantized;
    const Tensor* tensors[] = {part.args.b, part.out, &bias_or_other(part.args), q.scales ? q.scales : part.args.b,
                               q.biases ? q.biases : part.args.b};
    for (uint32_t j = 0; j < 5; j++) buffers[1 + 5 * i + j] = {i == 0 ? kFirst[j] : 3 + 5 * i + j, &tensors[j]->buffer, tensors[j]->offset};
    params.of[i] = part.plan.params;
  }
  const BytesBinding bytes = {kIndexParams, &params, sizeof(params)};
  Dispatch d{&pipeline, buffers, 16, &bytes, 1, nullptr, 0, matmul_grid(v, spec), {v.threads, 1, 1}};
  give_threadgroup_memory(d);
  return use(d);
}

}  // namespace metalmm
