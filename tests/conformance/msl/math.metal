// Mathematics on scalars and vectors.
#include <metal_stdlib>
using namespace metal;

kernel void functions(device const float* x, device float* y, constant uint& n, uint i [[thread_position_in_grid]]) {
  float v = x[i];
  y[0 * n + i] = exp(v);
  y[1 * n + i] = log(abs(v) + 1);
  y[2 * n + i] = fast::sin(v);
  y[3 * n + i] = precise::sqrt(fabs(v));
  y[4 * n + i] = rsqrt(fabs(v) + 1.0f);
  y[5 * n + i] = tanh(v);
  y[6 * n + i] = floor(v) + ceil(v) * 2 + trunc(v) * 4 + rint(v) * 8;
  y[7 * n + i] = fract(v);
  y[8 * n + i] = clamp(v, -1.0f, 1.0f) + saturate(v) + sign(v);
  y[9 * n + i] = mix(v, 2.0f, 0.25f) + step(0.5f, v) + smoothstep(-1.0f, 1.0f, v);
  y[10 * n + i] = fma(v, v, -v);
  y[11 * n + i] = pow(fabs(v), 1.5f) + exp2(v) + log2(fabs(v) + 1.0f);
  y[12 * n + i] = min(v, 0.5f) + max3(v, 0.0f, -1.0f) + median3(v, 0.0f, 1.0f);
  int e;
  float m = frexp(v, e);
  y[13 * n + i] = ldexp(m, e);
  y[14 * n + i] = copysign(2.0f, v) + fmod(v, 0.7f);
  float c, s = sincos(v, c);
  y[15 * n + i] = s * s + c * c;
  y[16 * n + i] = isnan(v) + 2 * isinf(v) + 4 * isfinite(v) + 8 * signbit(v);
}

kernel void turns(device const float* x, device float* y, constant uint& n, uint i [[thread_position_in_grid]]) {
  y[i] = sinpi(x[i]);
  y[n + i] = cospi(x[i]);
}

kernel void geometry(device const float4* x, device float4* y) {
  float3 a = x[0].xyz, b = x[1].xyz;
  y[0] = float4(cross(a, b), dot(a, b));
  y[1] = float4(normalize(a), length(b));
  y[2] = float4(reflect(a, normalize(b)), distance(a, b));
  y[3] = float4(faceforward(a, b, a), distance_squared(a, b));
}

kernel void integers(device const uint* x, device uint* y, constant uint& n, uint i [[thread_position_in_grid]]) {
  uint v = x[i];
  int s = as_type<int>(v);
  y[0 * n + i] = popcount(v);
  y[1 * n + i] = clz(v);
  y[2 * n + i] = ctz(v);
  y[3 * n + i] = rotate(v, 7u);
  y[4 * n + i] = reverse_bits(v);
  y[5 * n + i] = extract_bits(v, 3, 9);
  y[6 * n + i] = insert_bits(v, 0x5u, 4, 3);
  y[7 * n + i] = mulhi(v, 0x9e3779b9u);
  y[8 * n + i] = addsat(v, 0x80000000u);
  y[9 * n + i] = as_type<uint>(subsat(s, 0x7fffffff));
  y[10 * n + i] = absdiff(v, 1000u);
  y[11 * n + i] = hadd(v, 3u);
  y[12 * n + i] = uint(clz(ushort(v))) + uint(popcount(uchar(v)));
  y[13 * n + i] = as_type<uint>(abs(s));
}

kernel void products(device const int* x, device int* y, device const uint* u, device uint* v, device const float* f, device float* g,
                     constant uint& n, uint i [[thread_position_in_grid]]) {
  int a = x[i], b = x[n + i], c = x[2 * n + i];
  y[0 * n + i] = madsat(a, b, c);
  y[1 * n + i] = madhi(a, b, c >> 1);
  y[2 * n + i] = mad24(a >> 8, b >> 8, c);
  y[3 * n + i] = mul24(a >> 8, b >> 8);
  uint d = u[i], e = u[n + i], h = u[2 * n + i];
  v[0 * n + i] = madsat(d, e, h);
  v[1 * n + i] = mul24(d >> 8, e >> 8);
  g[0 * n + i] = divide(f[i], f[n + i]);
  g[1 * n + i] = powr(fabs(f[i]), f[n + i]);
}

kernel void refracted(device const float4* x, device const float* eta, device float4* y, uint i [[thread_position_in_grid]]) {
  y[i] = float4(refract(normalize(x[0].xyz), normalize(x[1].xyz), eta[i]), 0);
}
