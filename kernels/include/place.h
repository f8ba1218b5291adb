// Which elements of a simdgroup matrix a lane holds.
#pragma once
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

// Two neighbours of one row: `column` and the next.
struct Place {
  uint row, column;
};

// To Apple's compiler thread_elements() is a vector of 64 elements, of which a lane has the first two.
template <class T>
METAL_FUNC void put(thread metal::simdgroup_matrix<T, 8, 8>& matrix, metal::vec<T, 2> pair) {
  matrix.thread_elements()[0] = pair.x;
  matrix.thread_elements()[1] = pair.y;
}

// MSL does not say. Matrices of another compiler's runtime have `row` and `column`; what has none is Apple's.
template <class Matrix, class Row = decltype(Matrix::row())>
METAL_FUNC Place place_in(uint, int) {
  return {Matrix::row(), Matrix::column()};
}
template <class Matrix>
METAL_FUNC Place place_in(uint lane, long) {
  return {(lane / 4 & 4) + lane / 2 % 4, (lane / 4 & 2) * 2 + lane % 2 * 2};
}
METAL_FUNC Place place_of(uint lane) { return place_in<metal::simdgroup_float8x8>(lane, 0); }
