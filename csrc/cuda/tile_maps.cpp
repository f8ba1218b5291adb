#include "tile_maps.h"

namespace metalmm::cuda {
namespace {

constexpr unsigned kAlong = 64;      // of k
constexpr unsigned kShortCopy = 32;  // rows

// A matrix of `count` lines of k numbers, `per_byte` of them a byte. Pitches count elements, of that many bytes.
struct Lines {
  Address address;
  unsigned element_bytes, per_byte;
  uint64_t k, count, pitch, batch, batch_pitch;
};

bool encode(const Lines& x, uint32_t rows, abi::TileMap& map) {
  uint64_t sizes[] = {(x.k - 1) / x.per_byte + 1, x.count, x.batch},
           pitches[] = {x.pitch * x.element_bytes, x.batch_pitch * x.element_bytes};
  if (!x.batch_pitch) sizes[2] = 1, pitches[1] = pitches[0];
  for (uint64_t size : sizes)
    if (size > INT32_MAX) return false;  // a copy's place has a sign
  if (x.address % 16 || pitches[0] % 16 || pitches[1] % 16 || !pitches[0]) return false;
  unsigned box[] = {kAlong / x.per_byte, rows, 1}, steps[] = {1, 1, 1}, bytes = box[0] * x.element_bytes;
  int swizzle = bytes == 128 ? kSwizzle128 : bytes == 64 ? kSwizzle64 : kSwizzle32;
  return !driver().encode_tiles(&map, x.element_bytes == 1 ? kTileUint8 : kTileUint16, 3, x.address, sizes, pitches, box, steps, 0, swizzle,
                                kTilePromote256, 0);
}

}  // namespace

void make_maps(abi::TileMaps& maps, const MatmulParams& p, bool quantized, Address a, Address b) {
  Lines of_a = {a, 2, 1, p.k, p.m, p.lda, p.batch, p.stride_a}, of_b = {b, 2, 1, p.k, p.n, p.ldb, p.batch, p.stride_b};
  // Rows of quantized weights have no gaps: fewer bytes than weights are two weights a byte.
  if (quantized) of_b.element_bytes = 1, of_b.per_byte = p.ldb < p.k ? 2 : 1;
  // TMA is slow where 32 or more rows of a copy are past the last. Then all of A comes by copies of 32, and those past the end are left
  // out.
  uint32_t tile = maps.rows_of_a, in_last = (p.m - 1) % tile + 1;
  if (in_last + kShortCopy <= tile) maps.rows_of_a = kShortCopy;
  maps.rows_of_last_a = ((in_last - 1) / maps.rows_of_a + 1) * maps.rows_of_a;
  maps.there = encode(of_a, maps.rows_of_a, maps.a) && encode(of_b, maps.rows_of_b, maps.b);
}

}  // namespace metalmm::cuda
