// Address spaces, threadgroup memory, function constants, templates, positions.
#include <metal_stdlib>
using namespace metal;

constant bool doubled [[function_constant(0)]];
constant int shift [[function_constant(1)]];
constant float scale [[function_constant(2)]];
constant bool scaled = is_function_constant_defined(scale);
constant float table[2][3] = {{1.0f, 2.0f, 3.0f}, {4.0f, 5.0f, 6.0f}};
static constant constexpr const uint kWidth = 4;

struct Params {
  uint n;
  float offset;
  float at(uint i) const constant { return offset + float(i); }
  float at(uint i) const device { return offset + float(i); }
  float at(uint i) const thread { return offset + float(i); }
};

template <typename T>
struct Pointee {};
template <typename T>
struct Pointee<device T*> {
  using type = T;
};
template <typename T>
struct Pointee<threadgroup T*> {
  using type = T;
};

METAL_FUNC float first(const device float* p) { return p[0]; }
METAL_FUNC float first(const threadgroup float* p) { return p[0]; }
METAL_FUNC float total(threadgroup float* values, uint n) {
  float s = 0.0f;
  for (uint i = 0; i < n; i++) s += values[i];
  return s;
}

// A comment that says threadgroup float x[4]; ]] and "a string".
kernel void spaces(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant Params& p [[buffer(2)]],
                   device const float* extra [[buffer(3), function_constant(doubled)]], threadgroup float* dynamic [[threadgroup(0)]],
                   uint t [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]],
                   uint size [[threads_per_threadgroup]]) {
  threadgroup float values[64], others[2][32];
  threadgroup uint count;
  threadgroup struct Params shared;
  uint index[2] = {1, 0};
  if (t == 0) {
    count = size;
    shared.offset = p.offset;
  }
  values[t] = x[group * size + t];
  others[t / 32][t % 32] = values[t] * 2.0f;
  dynamic[t] = float(t);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* part = &others[1][0];
  Pointee<threadgroup float*>::type sum = total(values, count) + first(x) + first(part) + table[index[index[0]]][2];
  if (doubled) sum += extra[0];
  if (scaled) sum *= scale;
  float result = sum + dynamic[size - 1 - t] + p.at(kWidth) + shared.offset;
  y[group * size + t] = result + float(1 << shift);
}

template <typename T, int N, bool Reverse = false>
[[kernel, max_total_threads_per_threadgroup(N * 2)]] void copy(device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
                                                               uint i [[thread_position_in_threadgroup]]) {
  threadgroup T tile[N];
  tile[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[Reverse ? N - 1 - i : i];
}
template [[host_name("copy_half_32")]] [[kernel]] decltype(copy<half, 32>) copy<half, 32>;
template
    [[host_name("copy_"
                "reversed")]] [[kernel]] void
    copy<float, 16, true>(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_threadgroup]]);
typedef decltype(copy<int, 8>) copy_t;
template [[host_name("copy_int_8")]] kernel copy_t copy<int, 8, true>;

kernel void positions(device uint* y, ushort3 p [[thread_position_in_grid]], uint2 t [[thread_position_in_threadgroup]],
                      uint3 g [[threadgroup_position_in_grid]], uint3 tpg [[threads_per_grid]], ushort2 tptg [[threads_per_threadgroup]],
                      uint gpg [[threadgroups_per_grid]], uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                      ushort sg [[simdgroup_index_in_threadgroup]], uint width [[threads_per_simdgroup]],
                      uint sgs [[simdgroups_per_threadgroup]], uint quad [[quadgroup_index_in_threadgroup]]) {
  uint at = (p.z * tpg.y + p.y) * tpg.x + p.x;
  device uint* row = y + at * 12;
  row[0] = p.x, row[1] = p.y, row[2] = p.z;
  row[3] = t.x, row[4] = t.y;
  row[5] = g.x + 10 * g.y + 100 * g.z;
  row[6] = tptg.x * 100 + tptg.y;
  row[7] = gpg;
  row[8] = i;
  row[9] = lane + 100 * sg;
  row[10] = width + 100 * sgs;
  row[11] = quad;
}

// Names that the runtime uses for itself belong to kernels too.
constant uint width = 3;
constant float value = 0.1;  // a float: MSL has no double
struct Add {
  float arg;
};
struct Pair {
  union {
    float4 whole;
    float parts[4];
  };
};
METAL_FUNC bool operator>(Add a, Add b) { return a.arg > b.arg; }
METAL_FUNC Add operator>>(Add a, int n) { return {a.arg / float(1 << n)}; }
enum Index { kOut = 1 };
METAL_FUNC float pick(device float* a, uint i) { return a[i]; }
METAL_FUNC float pick(thread float* b, uint i) { return b[i]; }
METAL_FUNC float last(threadgroup float const* a) { return a[1]; }
METAL_FUNC float last(device const float* a) { return a[1]; }
template <typename T>
METAL_FUNC T twice(T x) {
  return x + x;
}
template <int N = 1 << 2>
METAL_FUNC int shifted() {
  return N;
}
struct Cell {
  float v;
  float get() const threadgroup { return v; }
};
kernel void spellings(device float* x [[buffer(0)]], device float* y [[buffer(kOut)]]);
kernel void spellings(device float* x [[buffer(0)]], device float* y [[buffer(kOut)]]) {
  threadgroup float a[2];
  threadgroup Cell cell;
  a[0] = x[0], a[1] = x[1];
  cell.v = 4.0f;
  Add add = {5.0f};
  float4 v = metal::float4(x[0], x[1], x[2], x[3]);
  auto zy = v.zy;
  float2 chosen = x[0] < 0 ? v.xy : v.wz;
  thread float local[2] = {7.0f, 8.0f};
  Pair pair, copy;
  pair.whole = v;
  copy = pair;
  v.xy = v.zw;
  v.zw *= 2.0f;
  uint4 u = uint4(1, 2, 3, 4);
  u.xy <<= 1u;
  u++;
  threadgroup float (*rows)[2] = reinterpret_cast<threadgroup float (*)[2]>(a);
  float results[] = {float(value * 3.0f == 0.1f * 3.0f),
                     zy.x,
                     chosen.y,
                     twice(v.xy).x,
                     (-v.xy).y,
                     v.z,
                     float(u.x),
                     add.arg,
                     pick(x, 1),
                     pick(local, 1),
                     last(a),
                     float(shifted<>()),
                     cell.get(),
                     copy.parts[2],
                     float(width),
                     rows[0][1],
                     sinpi(1.0f),
                     float(float(nextafter(1.0h, 2.0h)) == 1.0009765625f),
                     quad_prefix_inclusive_sum(1.0f),
                     quad_broadcast_first(v.xyz).z};
  for (uint i = 0; i < 20; i++) y[i] = results[i];
}
