// Vectors: construction, swizzles, arithmetic, packed forms.
#include <metal_stdlib>
using namespace metal;

kernel void swizzles(device const float4* x, device float4* y) {
  float4 v = x[0];
  y[0] = v.wzyx;
  y[1] = v.rgba.xxyy;
  y[2] = float4(v.xy, v.zw * 2.0f);
  float4 w = v;
  w.xz = v.yw;
  w.w += 1.0f;
  y[3] = w;
  w = v;
  w.xy = w.yx;
  w.zw *= float2(3.0f, 4.0f);
  y[4] = w;
  float3 t = v.xyz;
  t.yz = t.zy;
  y[5] = float4(t, t.r);
  y[6] = float4(float3(1.0f).xy, as_type<float2>(as_type<uint2>(v.zw)));
  y[7] = float4(v[3], v[2], dot(v.xy, v.zw), length_squared(v.xyz));
}

kernel void arithmetic(device const int4* x, device int4* y, device const float2* f, device float2* g) {
  int4 v = x[0];
  y[0] = (v + 3) * v - 7;
  y[1] = v / 3;
  y[2] = v % 5;
  y[3] = (v << 2) ^ (v >> 1) | int4(1, 2, 4, 8) & ~v;
  y[4] = select(v, -v, v > 2);
  int3 u = v.xyz;
  u /= 2;  // the fourth lane that a three-vector carries must not divide by zero
  y[5] = int4(u, all(v == v) + any(v > 100));
  g[0] = f[0] * 2 + f[1] / f[0];
  g[1] = -f[0] + half2(f[1]).x;
  g[2] = float2(f[0].x < f[0].y ? f[0] : f[1]);
}

kernel void packed(device const packed_half3* x, device packed_float3* y, device half4* z) {
  half3 v = x[1];
  y[0] = float3(v);
  packed_float3 p = y[0];
  p += float3(1.0f);
  y[1] = p;
  y[2] = packed_float3(p.z, p.y, p[0]);
  z[0] = half4(half3(x[0]), 1.0h);
}
