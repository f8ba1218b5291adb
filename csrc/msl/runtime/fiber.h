// Lanes of a threadgroup as fibers: the switch, and the two places where lanes meet.
#pragma once
#include "abi.h"

// A defaulted parameter that holds the caller's file, line and column.
#if defined(__clang__)
#define METALMM_SITE \
  ::metalmm::abi::Site site = ::metalmm::abi::Site { __builtin_FILE(), __builtin_LINE(), __builtin_COLUMN() }
#define METALMM_SITE_VALUE site
#else
namespace std {
struct source_location {  // the layout that __builtin_source_location asks for
  struct __impl {
    const char* _M_file_name;
    const char* _M_function_name;
    unsigned _M_line, _M_column;
  };
};
}  // namespace std
#define METALMM_SITE                          \
  const ::std::source_location::__impl* site = \
      static_cast<const ::std::source_location::__impl*>(__builtin_source_location())
#define METALMM_SITE_VALUE \
  ::metalmm::abi::Site { site->_M_file_name, site->_M_line, site->_M_column }
#endif

namespace metalmm::msl {
template <abi::u32 Width> struct First;
}

namespace metalmm::fiber {

using namespace metalmm::abi;

// A thread_local here would need static TLS in every kernel (glibc has about 0.5 KB for all of them) or a call for each
// look; the executor has one thread_local and tells kernels where it lies.
inline long tls_offset;
inline Context* (*current_context)();

METALMM_INLINE Context* context() {
#if defined(__linux__) && defined(__x86_64__)
  Context* c;
  asm("movq %%fs:(%1), %0" : "=r"(c) : "r"(tls_offset));
  return c;
#elif defined(__linux__) && defined(__aarch64__)
  char* base;
  asm("mrs %0, tpidr_el0" : "=r"(base));
  return *reinterpret_cast<Context**>(base + tls_offset);
#else
  return current_context();
#endif
}

}  // namespace metalmm::fiber

#ifdef METALMM_DEBUG
#include "debug.h"
#endif

namespace metalmm::fiber {

METALMM_INLINE u32 lane() { return context()->lane & 31; }

// Saves where we are in `from`, goes to `to`. Everything but the three pointers is declared clobbered, so the compiler
// keeps alive what it needs and nothing else is saved: less than half the time of a switch that pushes registers.
METALMM_INLINE void switch_lane(Lane* from, Lane* to) {
  // clang 14, from -O1 on, once gave the switch the two the wrong way round where it saw how they were computed.
  asm volatile("" : "+r"(from), "+r"(to));
#if defined(__x86_64__)
  asm volatile(
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rsp, (%0)\n\t"
      "movq %%rbp, 8(%0)\n\t"
      "movq %%rax, 16(%0)\n\t"
      "movq (%1), %%rsp\n\t"
      "movq 8(%1), %%rbp\n\t"
      "jmpq *16(%1)\n"
      "1:\n\t"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc", "xmm0", "xmm1",
        "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",
        "xmm15"
#if defined(__AVX512F__)
        ,
        "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27",
        "xmm28", "xmm29", "xmm30", "xmm31", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#endif
  );
#elif defined(__aarch64__)
  register Lane* x0 asm("x0") = from;
  register Lane* x1 asm("x1") = to;
  asm volatile(
      "adr x9, 1f\n\t"
      "mov x10, sp\n\t"
      "str x10, [x0]\n\t"
      "str x29, [x0, #8]\n\t"
      "str x9, [x0, #16]\n\t"
      "ldr x10, [x1]\n\t"
      "ldr x29, [x1, #8]\n\t"
      "ldr x9, [x1, #16]\n\t"
      "mov sp, x10\n\t"
      "br x9\n"
      "1:\n\t"
      : "+r"(x0), "+r"(x1)
      :
      : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17",
#if !defined(__APPLE__)
        "x18",  // the platform's own on macOS
#endif
        "x19",
        "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30", "memory", "cc", "v0", "v1", "v2", "v3",
        "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20",
        "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31");
#else
#error "metalmm: the CPU device knows x86-64 and aarch64"
#endif
}

// Where the search for the next lane begins.
METALMM_INLINE u32 turn_after(u32 lane) {
#ifdef METALMM_DEBUG
  (void)lane;
  return debug::shuffled();
#else
  return lane;
#endif
}

// The next lane after `lane` in ring order that is in `ready`; going round gives every lane its turn.
METALMM_INLINE u32 next_in(u32 ready, u32 lane) {
  u32 shift = (lane + 1) & 31;
  u32 rotated = (ready >> shift) | (ready << ((32 - shift) & 31));
  return (static_cast<u32>(__builtin_ctz(rotated)) + shift) & 31;
}

// The running lane has left `ready`: where to go on; null: here. Whoever makes this one ready again comes back to it.
METALMM_INLINE Lane* next_lane(Context* c, Simdgroup* g, u32 lane_in_group) {
  u32 next;
  if (__builtin_expect(g->ready != 0, 1)) {
    next = g->base + next_in(g->ready, turn_after(lane_in_group));
  } else {
    next = c->schedule(c);
    if (next == g->base + lane_in_group) return nullptr;
    if (next == kNoLane) return &c->host;
  }
  c->lane = next;
  return &c->lanes[next];
}

METALMM_INLINE void nothing_to_order() {}
// cuda/lanes.h has work in these; fibers meet at operations alone.
struct Join {};
template <bool> struct Scope {
  bool stays = false;
};
template <bool PARTS> struct Branch : Scope<PARTS> {
  bool is;
  explicit METALMM_INLINE Branch(bool c) : is(c) {}
};
METALMM_INLINE bool goes(bool c) { return c; }
METALMM_INLINE bool leaves(bool c) { return c; }
template <class T, class F> METALMM_INLINE T chosen(T value, F) { return value; }
struct Turns {
  Turn turn;
  explicit METALMM_INLINE Turns(u32 count = 0, METALMM_SITE) {
    Lane& lane = context()->lanes[context()->lane];
    turn = {lane.turn, METALMM_SITE_VALUE, count};
    lane.turn = &turn;
  }
  METALMM_INLINE ~Turns() { context()->lanes[context()->lane].turn = turn.outer; }
  METALMM_INLINE bool next() {
    turn.count++;
    return true;
  }
};

METALMM_ONCE Lane* come_to_barrier(u32 orders, Site site) {
  Context* c = context();
  Simdgroup* g = c->group;
  u32 lane = c->lane & 31;
  u32 bit = 1u << lane;
  if (c->barrier_site.file == nullptr) c->barrier_site = site;
  if (__builtin_expect(c->barrier_mixed || c->barrier_site != site, 0)) c->differs(c, {site, nullptr, nullptr});
  c->barrier_strict |= orders != 0;
#ifdef METALMM_DEBUG
  c->barrier_orders &= orders;
#endif
  g->tg_wait |= bit;
  g->ready &= ~bit;
  return next_lane(c, g, lane);
}
METALMM_INLINE void threadgroup_barrier(u32 orders, Site site) {
  Context* c = context();
  Lane* self = &c->lanes[c->lane];
  if (Lane* to = come_to_barrier(orders, site)) switch_lane(self, to);
}

// The running lane is at a simdgroup operation; the last lane to come there computes every result. Where to go on, as next_lane says.
METALMM_INLINE Lane* come_to(Context* c, Simdgroup* g, u32 lane, void (*complete)(Simdgroup*, u32), Site site) {
  u32 bit = 1u << lane;
  const Turn* turn = c->lanes[c->lane].turn;
  if (g->simd_wait == 0) g->first = {site, complete, turn};
  else if (__builtin_expect(g->mixed || g->first.site != site || g->first.turn != turn, 0)) c->differs(c, {site, complete, turn});
  u32 waiting = g->simd_wait | bit;
  if (waiting == g->live && !g->mixed) {
    complete(g, waiting);
#ifdef METALMM_DEBUG
    has_met(g);
#endif
    g->simd_wait = 0;
    g->ready = waiting;
    return nullptr;
  }
  g->simd_wait = waiting;
  g->ready &= ~bit;
  return next_lane(c, g, lane);
}
METALMM_INLINE void meet(Context* c, Simdgroup* g, u32 lane, void (*complete)(Simdgroup*, u32), Site site) {
  Lane* self = &c->lanes[c->lane];
  if (Lane* to = come_to(c, g, lane, complete, site)) switch_lane(self, to);
}

template <class T> METALMM_INLINE T* slots(u8* memory) {
  static_assert(sizeof(T) <= kMaxPayload && (sizeof(T) & (sizeof(T) - 1)) == 0, "payload of a simdgroup operation");
  return reinterpret_cast<T*>(memory + kSimdWidth * (sizeof(T) - 1));  // after the regions of all smaller sizes
}

// Of a kernel that says its lanes are all there at each operation: cuda/lanes.h would wait for one that is not.
METALMM_INLINE void check_whole(u32 mask) {
#ifdef METALMM_CONVERGED
  if (mask != ~0u) __builtin_trap();
#else
  (void)mask;
#endif
}
// But where a kernel asks for the first lane: that is one who does not know which are there.
template <class Op> constexpr bool may_be_few = false;
template <abi::u32 Width> inline constexpr bool may_be_few<msl::First<Width>> = true;

// The lanes of a simdgroup bring `value` and `arg`, Op computes all results, each lane leaves with its own. A result not
// yet fetched is safe: its lane has to fetch it before it can bring anything new.
template <class Op, class In, class Out = In>
METALMM_INLINE Out exchange(const In& value, u32 arg, Site site) {
  struct Complete {
    static void all(Simdgroup* g, u32 mask) {
      if (!may_be_few<Op>) check_whole(mask);
      Op::run(mask, slots<In>(g->in), g->arg, slots<Out>(g->out));
    }
  };
  Context* c = context();
  Simdgroup* g = c->group;
  u32 lane = c->lane & 31;
  slots<In>(g->in)[lane] = value;
  if (Op::uses_arg) g->arg[lane] = arg;
  meet(c, g, lane, &Complete::all, site);
  return slots<Out>(g->out)[lane];
}

}  // namespace metalmm::fiber
