// Products of four simdgroups together, as NVIDIA's GPUs of compute capability 9.0 have them.
#pragma once
#include "../include/products.h"

#ifdef __METALMM_CUDA__
template <int SPLIT>
struct Cluster<SPLIT, true> {
  enum { IS_MANY = metal::HAS_CLUSTERS };
  static METAL_FUNC void meet() { metal::meet_cluster(); }
  // Of a simdgroup's rows of sums, PITCH apart, the WIDTH columns that are its own. All loads are under way at once.
  template <int ROWS, int WIDTH, int PITCH>
  static METAL_FUNC void add_up(threadgroup float* rows, uint rank, uint lane) {
    static_assert(WIDTH % 4 == 0 && ROWS * WIDTH % 128 == 0, "four columns a lane");
    constexpr uint COUNT = ROWS * WIDTH / 128, ACROSS = WIDTH / 4;
    float4 sum[COUNT];
    threadgroup float4* own[COUNT];
#pragma clang loop unroll(full)
    for (uint i = 0; i < COUNT; i++) {
      uint four = 32 * i + lane;
      own[i] = reinterpret_cast<threadgroup float4*>(rows + four / ACROSS * PITCH + rank * WIDTH + four % ACROSS * 4);
      float4 of[SPLIT];
#pragma clang loop unroll(full)
      for (uint j = 0; j < SPLIT; j++) of[j] = metal::in_cluster(own[i], j);
      sum[i] = of[0];
#pragma clang loop unroll(full)
      for (uint j = 1; j < SPLIT; j++) sum[i] += of[j];
    }
#pragma clang loop unroll(full)
    for (uint i = 0; i < COUNT; i++) *own[i] = sum[i];
  }
};

// Whether 64 of k have one factor and may be added at once: products.h says why.
METAL_FUNC bool adds_64(WeightsAt w) { return w.shift > 5 && w.k >= 2 * SURE; }

template <class T>
METAL_FUNC uint ones() {
  return as_type<uint>(metal::vec<T, 2>(T(1.0f)));
}

// Of a lane's two rows in each sixteen, that of the first eight or of the last.
template <int PITCH, int TN>
METAL_FUNC void put_rows(thread metal::float4 (&of)[TN], bool last, threadgroup float* rows, uint lane) {
#pragma clang loop unroll(full)
  for (uint j = 0; j < TN; j++)
    *reinterpret_cast<threadgroup metal::float2*>(rows + lane / 4 * PITCH + 8 * j + lane % 4 * 2) = last ? of[j].zw : of[j].xy;
}

// Tensor cores add products of some steps in `few`. `take` adds `few` to `of`, in float.
template <uint COUNT>
struct SumsOfSteps {
  metal::float4 of[COUNT / 4];
  float few[COUNT];
  uint steps;  // in few

  METAL_FUNC void clear() thread {
    steps = 0;
#pragma clang loop unroll(full)
    for (uint j = 0; j < COUNT / 4; j++) of[j] = metal::float4(0.0f);
#pragma clang loop unroll(full)
    for (uint i = 0; i < COUNT; i++) few[i] = 0.0f;
  }
  // most: of steps in `few`; 0 is as 1.
  METAL_FUNC void end_step(uint most) thread {
    if (++steps >= metal::min(most, 8u)) take();
  }
  METAL_FUNC void take() thread {
    metal::wait_for_groups<0>();
    metal::take_sums(few);
    steps = metal::kept(0);  // else the compiler makes a loop of its own of what follows, and products wait for each other
#pragma clang loop unroll(full)
    for (uint i = 0; i < COUNT; i++) of[i / 4][i % 4] += few[i], few[i] = 0.0f;
  }
};

// Sums of 64 rows by 8 * TN. Products of a step, 64 of k, go on while the next step's tiles come. Tensor cores add half of K, eight steps
// at most. A product may lose one bit below the last of the largest (products.h). That is K / 2 of the bound's K + 1 parts.
template <class T, int TN>
struct Products<T, 2, TN, TOGETHER> {
  SumsOfSteps<4 * TN> sums;

  METAL_FUNC void clear() thread { sums.clear(); }
  template <class Step>
  METAL_FUNC void begin(const threadgroup T* a, threadgroup T* b, uint3 from, uint, WeightsAt) thread {
    a += from.x / 64 * 64 * Step::K;  // the group's first row: its four simdgroups say the same
    metal::multiply_group(sums.few, a, b);
  }
  template <class Step>
  METAL_FUNC void add(const threadgroup T*, const threadgroup T*, uint3, Place, uint, WeightsAt w) thread {
    metal::wait_for_groups<1>();
    sums.end_step(w.k / SURE);
  }
  template <class Step>
  METAL_FUNC void settle(uint3, uint, WeightsAt) thread {
    sums.take();
  }
  template <int PITCH>
  METAL_FUNC void put(uint i, threadgroup float* rows, uint lane) thread {
    put_rows<PITCH>(sums.of, i % 2, rows, lane);
  }
};

// The factor of a part of k for the lane's column of eight; eight further on is that of its next column.
template <class Step, class T>
METAL_FUNC const threadgroup Factor* factor_of_lane(const threadgroup T* b, uint part, uint column, uint lane) {
  return Step::B::factors(b) + (part * Step::COLUMNS + column + lane / 4);
}
// 32 of k of a lane's two columns, as wgmma has its left operand: by eight of k, both columns of each.
METAL_FUNC void put_left(thread metal::uint4 (&left)[2], metal::uint4 first, metal::uint4 second) {
  left[0] = metal::uint4(first.x, second.x, first.y, second.y);
  left[1] = metal::uint4(first.z, second.z, first.w, second.w);
}
// Stores a lane's sums of eight rows of A: of two rows, by two of B's columns, eight apart.
template <int PITCH>
METAL_FUNC void put_columns(metal::float4 of, threadgroup float* rows, uint lane) {
#pragma clang loop unroll(full)
  for (uint e = 0; e < 4; e++) rows[(lane % 4 * 2 + e % 2) * PITCH + lane / 4 + e / 2 * 8] = of[e];
}

// Sums of 16 columns of B by 8 * TM rows of A. Four simdgroups multiply 64 columns, as integers in registers, by A's rows. A part is the 16
// or 32 of k that have one factor a column. Tensor cores add up a part. Then its sums are multiplied by the factors and added to `of`,
// while the next part is multiplied; or, with ONE_SUM, before.
//
// Weights with a bias, in bfloat (in half: halves.h), have one sum on its way: of 64 of k where groups have as many (products.h says the
// bound; a cluster's three sums are 9 parts of it more), else of a part. What the bias adds, of the sums of A's rows, comes a step later.
// Who makes these sums: RowSums.
template <class T, int TM, int TN>
struct Products<T, TM, TN, TURNED> {
  static_assert(TN == 2, "16 columns are a simdgroup's part of a product");
  enum : uint { EACH = 4 * TM };  // of eight rows two of each of two columns
  float of[EACH], few[2][EACH];

  METAL_FUNC void clear() thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++) of[i] = few[0][i] = few[1][i] = 0.0f;
    before = nullptr;
  }
  template <class Step>
  METAL_FUNC void begin(const threadgroup T* a, threadgroup T* b, uint3 from, uint lane, WeightsAt w) thread {
    static_assert(Step::K == 64, "two blocks of 32 of k");
    constexpr uint FACTORS = Columns<Step>::FACTORS;
    Columns<Step> blocks[2] = {{b, 0, from, lane}, {b, 1, from, lane}};  // both are read before products take threadgroup memory's time
#pragma clang loop unroll(full)
    for (uint part = 0; part < 2 * FACTORS; part++) {
      uint block = part / FACTORS, sum = Step::ONE_SUM ? 0 : part % 2;
      bool first = part % FACTORS == 0;
      if (Step::SCALING == WITH_REST && FACTORS == 1 && part > 0 && adds_64(w)) {  // the first 32 of k are on their way
        unpack(block, blocks[block], b, from, lane, w.low_byte);
        begin_part<Step, true>(part, sum, a, from);
        continue;
      }
      if (Step::ONE_SUM && part > 0) {
        metal::wait_for_groups<0>();
        add_up(0);
      }
      if (first) unpack(block, blocks[block], b, from, lane, w.low_byte);
      if (!Step::ONE_SUM && part > 1) {
        metal::wait_for_groups<1>();
        add_up(sum);
      }
      by[sum] = blocks[block].by[part % FACTORS];
      begin_part<Step, false>(part, sum, a, from);
    }
  }
  template <class Step>
  METAL_FUNC void add(const threadgroup T* a, threadgroup T* b, uint3 from, Place, uint lane, WeightsAt w) thread {
    if (!Step::ONE_SUM) {
      metal::wait_for_groups<1>();
      add_up(0);
    }
    if (Step::SCALING == WITH_REST && before != nullptr) add_rest<Step>(w, from, lane);
    metal::wait_for_groups<0>();
    if (Step::SCALING == WITH_REST) {
      uint row = from.x + from.y;  // each simdgroup's own sixteen
      if (!Step::B::SUMS_BY_OTHERS) Step::B::template add_rows<typename Step::A>(a, b, adds_64(w), row, lane);
      before = b;
    }
    add_up(Step::ONE_SUM ? 0 : 1);
  }
  template <class Step>
  METAL_FUNC void settle(uint3 from, uint lane, WeightsAt w) thread {
    if (Step::SCALING != WITH_REST || before == nullptr) return;
    add_rest<Step>(w, from, lane);
    before = nullptr;
  }
  template <int PITCH>
  METAL_FUNC void put(uint i, threadgroup float* rows, uint lane) thread {
    put_columns<PITCH>(metal::float4(of[4 * i], of[4 * i + 1], of[4 * i + 2], of[4 * i + 3]), rows, lane);
  }

 private:
  metal::uint4 left[2][2];      // of both blocks of 32 of k, their two times 16
  float2 by[2];                 // of the lane's two columns
  const threadgroup T* before;  // the tile whose rest is to be added

  // 16 columns by a block of 32 of k: values as they are stored, and a factor of each column for each part.
  template <class Step>
  struct Columns {
    enum : uint { FACTORS = 32 / Step::EACH };
    typename Step::B::Stood stood[2];  // eight columns apart
    float2 by[FACTORS];
    METAL_FUNC Columns(const threadgroup T* b, uint block, uint3 from, uint lane) {
      stood[0] = Step::B::stood(b, 32 * block, from.y, 0, lane), stood[1] = Step::B::stood(b, 32 * block, from.y, 8, lane);
#pragma clang loop unroll(full)
      for (uint i = 0; i < FACTORS; i++) {
        const threadgroup Factor* own = factor_of_lane<Step>(b, block * FACTORS + i, from.y, lane);
        by[i] = float2(own[0].scale, own[8].scale);
      }
    }
  };
  // Unpacks a block into `left`.
  template <class Step>
  METAL_FUNC void unpack(uint block, Columns<Step> x, const threadgroup T* b, uint3 from, uint lane, uint low) thread {
    metal::uint4 first = Step::B::eight_columns(x.stood[0], b, 32 * block, from.y, 0, lane, low);
    metal::uint4 second = Step::B::eight_columns(x.stood[1], b, 32 * block, from.y, 8, lane, low);
    put_left(left[block], first, second);
  }
  // Begins the step's `part`, into few[sum]; ADDS: to what is there.
  template <class Step, bool ADDS>
  METAL_FUNC void begin_part(uint part, uint sum, const threadgroup T* a, uint3 from) thread {
    a += from.x * Step::K + part * Step::EACH;
    if (Step::EACH == 32)
      metal::multiply_group<ADDS>(few[sum], left[part % 2], a);
    else
      metal::multiply_group<ADDS>(few[sum], left[part / 2][part % 2], a);
  }
  METAL_FUNC void add_up(uint sum) thread {
    metal::take_sums(few[sum]);
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++) of[i] = metal::fma(by[sum][i / 2 % 2], few[sum][i], of[i]);
  }
  template <class Step>
  METAL_FUNC void add_rest(WeightsAt w, uint3 from, uint lane) thread {
#pragma clang loop unroll(full)
    for (uint part = 0; part < Step::B::PARTS; part++) {
      if (part > 0 && adds_64(w)) break;
      const threadgroup Factor* own = factor_of_lane<Step>(before, part, from.y, lane);
      float2 rest = {own[0].rest, own[8].rest};
      const threadgroup float4* of_a = reinterpret_cast<const threadgroup float4*>(Step::B::sums(before, part, from.x + lane % 4 * 2));
#pragma clang loop unroll(full)
      for (uint j = 0; j < EACH / 8; j++) {
        float4 four = of_a[j];
#pragma clang loop unroll(full)
        for (uint i = 0; i < 8; i++) of[8 * j + i] = metal::fma(rest[i / 2 % 2], four[i / 4 * 2 + i % 2], of[8 * j + i]);
      }
    }
  }
};
#endif
