// A matmul from its arguments to a dispatch: shapes, layouts, grid and bindings.
#pragma once
#include "variant.h"

namespace metalmm {

// Throws where a size is zero or the elements of an operand cannot be counted in 32 bits.
void check_sizes(const MatmulSpec& spec);

// Operands and scalars of one call; what is null is not there.
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
