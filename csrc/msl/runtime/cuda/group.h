// Four simdgroups together on tensor cores of compute capability 9.0: wgmma, what kernels/cuda/groups.h has of it.
#pragma once

namespace metalmm::msl::library {

METALMM_INLINE uint shared_address(const void* p) { return static_cast<uint>(__cvta_generic_to_shared(p)); }

// After it and a barrier, wgmma sees what threads have stored to threadgroup memory.
METALMM_INLINE void show_group() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// One thread asks for a copy of a box of a matrix (TMA); beyond the matrix are zeros. `ready` is an mbarrier: begin_ready makes it,
// show_group shows it to copies. A turn, 0 or 1, ends when it was said twice how many bytes come, and these have come.
#ifdef METALMM_WATCHED
constexpr bool HAS_TMA = false;  // python/metalmm/ptx.py knows no such copy
#else
constexpr bool HAS_TMA = true;
#endif
METALMM_INLINE void begin_ready(ulong* ready) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" : : "r"(shared_address(ready)) : "memory");
}
METALMM_INLINE void expect_tiles(ulong* ready, uint bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(ready)), "r"(bytes) : "memory");
}
METALMM_INLINE void copy_tile(void* to, const abi::TileMap& map, uint x, uint y, uint z, ulong* ready) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
               :
               : "r"(shared_address(to)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(ready))
               : "memory");
}
METALMM_INLINE void wait_for_tiles(ulong* ready, uint turn) {
  asm volatile("{ .reg .pred there; again: mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1; @!there bra again; }"
               :
               : "r"(shared_address(ready)), "r"(turn)
               : "memory");
}

// Registers of each thread from here on, said by four simdgroups: those that take wait for others to give. ptxas heeds it only where the
// launch bounds say how many a thread begins with.
template <uint N> METALMM_INLINE void take_registers() { if constexpr (HAS_TMA) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(N)); }
template <uint N> METALMM_INLINE void give_registers() { if constexpr (HAS_TMA) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(N)); }

// A cluster: threadgroups that read each other's threadgroup memory. KernelTable says how many along x.
constexpr bool HAS_CLUSTERS = true;
// All threads of its threadgroups; what they stored to threadgroup memory is seen.
METALMM_INLINE void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" : : : "memory");
}
// What the threadgroup of that rank has in the place of x.
METALMM_INLINE vec<float, 4> in_cluster(const vec<float, 4>* x, uint rank) {
  uint address;
  vec<float, 4> there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(x)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(there.e[0]), "=f"(there.e[1]), "=f"(there.e[2]), "=f"(there.e[3])
               : "r"(address)
               : "memory");
  return there;
}

#define METALMM_SUMS_64 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31"
#define METALMM_SUMS_128 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56," \
  "%57,%58,%59,%60,%61,%62,%63"
#define METALMM_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define METALMM_16(i) METALMM_4(i), METALMM_4(i + 4), METALMM_4(i + 8), METALMM_4(i + 12)
#define METALMM_IN_64 METALMM_16(0), METALMM_16(16)
#define METALMM_IN_128 METALMM_IN_64, METALMM_16(32), METALMM_16(48)
// x, y: of a's and b's lines; the next 16 of k are 32 bytes further, in units of 16.
#define METALMM_WGMMA(n, type) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" METALMM_SUMS_##n "}, "
#define METALMM_PRODUCT(n, type) METALMM_WGMMA(n, type) "x, y, all, 1, 1, 0, 0; "
#define METALMM_NEXT(n, type) "add.s64 x, x, 2; add.s64 y, y, 2; " METALMM_PRODUCT(n, type)
#define METALMM_GROUP(n, type, a, b)                                                                                             \
  asm volatile("{ .reg .pred all; .reg .b64 x, y; setp.eq.b32 all, 0, 0; mov.b64 x, " a "; mov.b64 y, " b "; "                    \
               "wgmma.fence.sync.aligned; " METALMM_PRODUCT(n, type) METALMM_NEXT(n, type) METALMM_NEXT(n, type)                 \
                   METALMM_NEXT(n, type) "wgmma.commit_group.sync.aligned; }"                                                    \
               : METALMM_IN_##n : "l"(x), "l"(y) : "memory")
// The same of 16 of k, or of two times 16, whose left lines are in registers. Without `adds` the first forgets what the sums were.
#define METALMM_LEFT(of) "r"(of.x), "r"(of.y), "r"(of.z), "r"(of.w)
#define METALMM_GROUP_OF_16(n, type, first, b, adds)                                                                                 \
  asm volatile("{ .reg .pred old; setp.ne.b32 old, " adds ", 0; wgmma.fence.sync.aligned; " METALMM_WGMMA(n, type) "{" first "}, " b \
               ", old, 1, 1, 0; wgmma.commit_group.sync.aligned; }"                                                                   \
               : METALMM_IN_##n : METALMM_LEFT(left), "l"(y), "n"(ADDS) : "memory")
#define METALMM_GROUP_OF_32(n, type, first, second, b, adds)                                                              \
  asm volatile("{ .reg .pred all, old; .reg .b64 y; setp.eq.b32 all, 0, 0; setp.ne.b32 old, " adds ", 0; mov.b64 y, " b  \
               "; wgmma.fence.sync.aligned; " METALMM_WGMMA(n, type) "{" first "}, y, old, 1, 1, 0; add.s64 y, y, 2; " \
               METALMM_WGMMA(n, type) "{" second "}, y, all, 1, 1, 0; wgmma.commit_group.sync.aligned; }"             \
               : METALMM_IN_##n : METALMM_LEFT(left[0]), METALMM_LEFT(left[1]), "l"(y), "n"(ADDS) : "memory")

// One of these groups, of T's products.
#define METALMM_OF_TYPE(group, n, ...)          \
  if constexpr (is_same<T, half>::value) {      \
    group(n, "f16", __VA_ARGS__);               \
  } else {                                      \
    group(n, "bf16", __VA_ARGS__);              \
  }

// A matrix descriptor, as PTX has it: swizzle of 128 bytes, 1,024 bytes from eight lines to the next eight. Lines have 64 elements. They begin
// at a multiple of 1,024 bytes, since the swizzle goes by the address. Tile of kernels/include/tile.h stores them so.
METALMM_INLINE unsigned long long described(const void* lines) {
  // Not shared_address: with it q8_0 has five instructions more a step.
  unsigned long long address = static_cast<uint>(__cvta_generic_to_shared(lines));
  return 1ull << 62 | 64ull << 32 | 1ull << 16 | address >> 4;
}

// Begins to add to sum the products of 64 of k: 64 lines of a by 2 * COUNT of b. A simdgroup has 16 of a's lines. Its lanes hold them as PTX
// says of wgmma's D.
template <class T, int COUNT> METALMM_INLINE void multiply_group(float (&sum)[COUNT], const T* a, const T* b) {
  static_assert(COUNT == 32 || COUNT == 64, "no other is asked for");
  unsigned long long x = described(a), y = described(b);
  if constexpr (COUNT == 64) {
    METALMM_OF_TYPE(METALMM_GROUP, 128, "%64", "%65")
  } else {
    METALMM_OF_TYPE(METALMM_GROUP, 64, "%32", "%33")
  }
}

// Begins to make sum, or with ADDS to add to it, the products of 32 of k: 64 lines in registers, 16 of a simdgroup as PTX says of wgmma's A,
// by 2 * COUNT of b. Until they are through, left stays as it is.
template <bool ADDS, class T, int COUNT> METALMM_INLINE void multiply_group(float (&sum)[COUNT], const uint4 (&left)[2], const T* b) {
  static_assert(COUNT == 32 || COUNT == 64, "no other is asked for");
  unsigned long long y = described(b);
  if constexpr (COUNT == 64) {
    METALMM_OF_TYPE(METALMM_GROUP_OF_32, 128, "%64,%65,%66,%67", "%68,%69,%70,%71", "%72", "%73")
  } else {
    METALMM_OF_TYPE(METALMM_GROUP_OF_32, 64, "%32,%33,%34,%35", "%36,%37,%38,%39", "%40", "%41")
  }
}

// The same of 16 of k.
template <bool ADDS, class T, int COUNT> METALMM_INLINE void multiply_group(float (&sum)[COUNT], const uint4& left, const T* b) {
  static_assert(COUNT == 32 || COUNT == 64, "no other is asked for");
  unsigned long long y = described(b);
  if constexpr (COUNT == 64) {
    METALMM_OF_TYPE(METALMM_GROUP_OF_16, 128, "%64,%65,%66,%67", "%68", "%69")
  } else {
    METALMM_OF_TYPE(METALMM_GROUP_OF_16, 64, "%32,%33,%34,%35", "%36", "%37")
  }
}

// All but the last N calls of multiply_group are through. What the others read may be overwritten.
template <uint N> METALMM_INLINE void wait_for_groups() { asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory"); }
// The compiler may not read sum before this. Call it when they are through.
template <int COUNT> METALMM_INLINE void take_sums(float (&sum)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sum[i]) : : "memory");
}
#else
template <bool ADDS = false, class T, int COUNT, class Left> METALMM_INLINE void multiply_group(float (&)[COUNT], const Left&, const T*) {
  static_assert(sizeof(T) == 0, "wgmma is of compute capability 9.0 and of this package's kernels");
}
constexpr bool HAS_TMA = false;
METALMM_INLINE void begin_ready(ulong*) {}
METALMM_INLINE void expect_tiles(ulong*, uint) {}
METALMM_INLINE void copy_tile(void*, const abi::TileMap&, uint, uint, uint, ulong*) {}
METALMM_INLINE void wait_for_tiles(ulong*, uint) {}
template <uint N> METALMM_INLINE void take_registers() {}
template <uint N> METALMM_INLINE void give_registers() {}
constexpr bool HAS_CLUSTERS = false;
METALMM_INLINE void meet_cluster() {}
METALMM_INLINE vec<float, 4> in_cluster(const vec<float, 4>* x, uint) { return *x; }
template <uint N> METALMM_INLINE void wait_for_groups() {}
template <int COUNT> METALMM_INLINE void take_sums(float (&)[COUNT]) {}
#endif

}  // namespace metalmm::msl::library
