#include <metal_stdlib>
using namespace metal;

kernel void pairs(device const half2* a [[buffer(0)]], device const half2* b [[buffer(1)]], device const half2* c [[buffer(2)]],
                  device half2* sum [[buffer(3)]], device half2* difference [[buffer(4)]], device half2* product [[buffer(5)]],
                  device half2* both [[buffer(6)]], uint i [[thread_position_in_grid]]) {
  sum[i] = a[i] + b[i];
  difference[i] = a[i] - b[i];
  product[i] = a[i] * b[i];
  both[i] = fma(a[i], b[i], c[i]);
}
