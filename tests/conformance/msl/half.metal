// half is IEEE binary16: every operation rounds, conversions behave as those of a built-in type.
#include <metal_stdlib>
using namespace metal;

kernel void rounding(device const half* x, device const half* y, device half* sum, device half* product, device half* quotient,
                     device half* fused, device half* chained, uint i [[thread_position_in_grid]]) {
  sum[i] = x[i] + y[i];
  product[i] = x[i] * y[i];
  quotient[i] = x[i] / y[i];
  fused[i] = fma(x[i], y[i], 0.333h);
  chained[i] = x[i] * y[i] + x[i];  // two roundings
}

kernel void conversions(device const float* x, device half* y, device half4* v, device const float4* w,
                        uint i [[thread_position_in_grid]]) {
  y[i] = half(x[i]);
  if (i == 0) {
    v[0] = half4(w[0]);
    half4 h = v[0] * 2.0h + 1;
    v[1] = h;
    half a = 1.5, b = 2;
    float mixed = true ? a : 0.0f;
    half integer = false ? a : 0;
    v[2] = half4(a * b, half(mixed), integer, max(a, b));
    v[3] = half4(as_type<half>(ushort(0x3c00)), HALF_MAX, numeric_limits<half>::min(), half(1e-3h));
  }
}
