// Of a kernel compiled for a debug device: asks the executor before each access, counts the writes to each element of an output, finds
// vectors off their alignment and indices outside of an array, and shuffles the order of lanes.
// The compiler's thread sanitizer puts a call before every access to memory; these are the functions it calls.
#pragma once

#define METALMM_UNTRACED __attribute__((no_sanitize("thread"), noinline))
// Where the code is that made an access, and from where to find its callers: of a function of the runtime the kernel's line. Debug modules
// keep frame pointers.
#define METALMM_CALLERS __builtin_return_address(0), __builtin_frame_address(0)

namespace metalmm::debug {

// Not while a module is loaded, when no kernel runs.
METALMM_UNTRACED inline void ask(const void* at, unsigned long size, abi::Access kind, const void* pc, const void* frame) {
  abi::Context* c = fiber::current_context ? fiber::context() : nullptr;
  if (c && c->access) c->access(c, at, size, kind, pc, frame);
}
METALMM_UNTRACED inline void reads(const void* at, unsigned long size, const void* pc, const void* frame) {
  ask(at, size, abi::Access::load, pc, frame);
}
METALMM_UNTRACED inline void touch(const void* at, unsigned long size, abi::Access kind) { ask(at, size, kind, METALMM_CALLERS); }

// A thread's fence counts as if all of its simdgroup came to it.
METALMM_UNTRACED inline void order_by(unsigned flags, bool among_simdgroups, bool among_threadgroups) {
  abi::Simdgroup* g = fiber::context()->group;
  g->met += flags / abi::kThreadgroup % 2;
  g->met_device += flags % 2;
  if (among_simdgroups && flags / abi::kThreadgroup % 2) g->fenced = g->met;
  if (among_simdgroups && flags % 2) g->fenced_device = g->met_device;
  if (among_threadgroups && flags % 2) g->fenced_widely = g->met_device;
}

inline unsigned char *watch_begin, *watch_end, *watch_counts;  // a count for every two bytes

METALMM_UNTRACED inline void count(unsigned char* n) {
  unsigned char old = __atomic_load_n(n, __ATOMIC_RELAXED);
  while (old != 255 && !__atomic_compare_exchange_n(n, &old, old + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

METALMM_UNTRACED inline void wrote(void* at, unsigned long size, const void* pc, const void* frame) {
  ask(at, size, abi::Access::store, pc, frame);
  auto* p = static_cast<unsigned char*>(at);
  if (p >= watch_end || p + size <= watch_begin) return;
  for (unsigned long i = 0; i < size; i += 2)
    if (p + i >= watch_begin && p + i < watch_end) count(&watch_counts[(p + i - watch_begin) / 2]);
}

// x86 reads vectors anywhere, a GPU where they are aligned. The compiler's undefined-behaviour sanitizer looks at every pointer that
// is used; this is what it says. The first such access, until the executor asks.
struct Place {
  const char* file;
  unsigned line, column;
};
struct Type {
  unsigned short kind, info;  // of an integer, info's first bit: it is signed
  char name[1];
};
struct Outside {
  Place place;
  const Type *array, *index;
};
struct Mismatch {
  Place place;
  const void* type;
  unsigned char log_alignment, kind;
};
inline const Mismatch* misaligned;
inline const unsigned char* misaligned_at;

METALMM_UNTRACED inline void found_misaligned(const Mismatch* where, unsigned long at) {
  const Mismatch* none = nullptr;
  if (__atomic_compare_exchange_n(&misaligned, &none, where, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    misaligned_at = reinterpret_cast<const unsigned char*>(at);
}

// clang looks at no pointer that a class is copied from; the thread sanitizer's call for 8 bytes says that they should be aligned.
inline Mismatch copied = {{"", 0, 0}, nullptr, 3, 0};
METALMM_UNTRACED inline void aligned(const void* p, unsigned size) {
  auto at = reinterpret_cast<unsigned long>(p);
  if (size >= 8 && at % 8 != 0) found_misaligned(&copied, at);
}

METALMM_UNTRACED inline void outside(abi::Site site, const char* what, unsigned long index, bool is_signed) {
  abi::Context* c = fiber::current_context ? fiber::context() : nullptr;
  if (c && c->out_of_bounds) c->out_of_bounds(c, site, what, index, is_signed);
}
METALMM_UNTRACED inline void outside(unsigned long count, unsigned long index, bool is_signed) {
  char what[32];
  __builtin_snprintf(what, sizeof(what), "%lu elements", count);
  outside({nullptr, 0, 0}, what, index, is_signed);
}
// The index of a vector, a matrix or an array<T, N>: the compiler's sanitizer lets one past the end through, since its address may be taken.
template <unsigned long N, class I> __attribute__((always_inline)) inline constexpr I inside(I i) {
  if (static_cast<unsigned long>(i) >= N) outside(N, static_cast<unsigned long>(i), I(-1) < I(0));
  return i;
}

inline unsigned order;
METALMM_UNTRACED inline unsigned shuffled() {
  unsigned x = __atomic_add_fetch(&order, 0x9e3779b9u, __ATOMIC_RELAXED);
  x = (x ^ x >> 16) * 0x85ebca6bu;
  return x >> 11 & 31;
}

}  // namespace metalmm::debug

extern "C" {
__attribute__((visibility("default"))) METALMM_UNTRACED inline void metalmm_watch(unsigned char* begin, unsigned char* end,
                                                                                  unsigned char* counts) {
  metalmm::debug::watch_begin = begin;
  metalmm::debug::watch_end = end;
  metalmm::debug::watch_counts = counts;
}
__attribute__((visibility("default"))) METALMM_UNTRACED inline unsigned metalmm_take_misaligned(const unsigned char** at, const char** file,
                                                                                                unsigned* line) {
  const metalmm::debug::Mismatch* found =
      __atomic_exchange_n(&metalmm::debug::misaligned, static_cast<const metalmm::debug::Mismatch*>(nullptr), __ATOMIC_RELAXED);
  if (!found) return 0;
  *at = metalmm::debug::misaligned_at, *file = found->place.file, *line = found->place.line;
  return 1u << found->log_alignment;
}
METALMM_UNTRACED inline void __ubsan_handle_type_mismatch_v1(const metalmm::debug::Mismatch* where, unsigned long at) {
  metalmm::debug::found_misaligned(where, at);
}
METALMM_UNTRACED inline void __ubsan_handle_out_of_bounds(const metalmm::debug::Outside* where, unsigned long index) {
  metalmm::debug::outside({where->place.file, where->place.line, where->place.column}, where->array->name, index, where->index->info & 1);
}
METALMM_UNTRACED inline void __tsan_init() {}
METALMM_UNTRACED inline void __tsan_func_entry(void*) {}
METALMM_UNTRACED inline void __tsan_func_exit(void*) {}
METALMM_UNTRACED inline void __tsan_read_range(void* p, unsigned long size) { metalmm::debug::reads(p, size, METALMM_CALLERS); }
METALMM_UNTRACED inline void __tsan_write_range(void* p, unsigned long size) { metalmm::debug::wrote(p, size, METALMM_CALLERS); }
METALMM_UNTRACED inline void* __tsan_memcpy(void* to, const void* from, unsigned long size) {
  metalmm::debug::reads(from, size, METALMM_CALLERS);
  metalmm::debug::wrote(to, size, METALMM_CALLERS);
  return __builtin_memcpy(to, from, size);
}
METALMM_UNTRACED inline void* __tsan_memmove(void* to, const void* from, unsigned long size) {
  metalmm::debug::reads(from, size, METALMM_CALLERS);
  metalmm::debug::wrote(to, size, METALMM_CALLERS);
  return __builtin_memmove(to, from, size);
}
METALMM_UNTRACED inline void* __tsan_memset(void* to, int value, unsigned long size) {
  metalmm::debug::wrote(to, size, METALMM_CALLERS);
  return __builtin_memset(to, value, size);
}
#define METALMM_TRACE(size)                                                                                          \
  METALMM_UNTRACED inline void __tsan_read##size(void* p) {                                                          \
    metalmm::debug::aligned(p, size);                                                                                \
    metalmm::debug::reads(p, size, METALMM_CALLERS);                                                                             \
  }                                                                                                                  \
  METALMM_UNTRACED inline void __tsan_write##size(void* p) {                                                         \
    metalmm::debug::aligned(p, size);                                                                                \
    metalmm::debug::wrote(p, size, METALMM_CALLERS);                                                                                  \
  }                                                                                                                  \
  METALMM_UNTRACED inline void __tsan_read_write##size(void* p) {                                                    \
    metalmm::debug::reads(p, size, METALMM_CALLERS);                                                                             \
    metalmm::debug::wrote(p, size, METALMM_CALLERS);                                                                                  \
  }                                                                                                                  \
  METALMM_UNTRACED inline void __tsan_volatile_read##size(void* p) { metalmm::debug::reads(p, size, METALMM_CALLERS); }          \
  METALMM_UNTRACED inline void __tsan_volatile_write##size(void* p) { metalmm::debug::wrote(p, size, METALMM_CALLERS); }              \
  METALMM_UNTRACED inline void __tsan_unaligned_read##size(void* p) { metalmm::debug::reads(p, size, METALMM_CALLERS); }         \
  METALMM_UNTRACED inline void __tsan_unaligned_write##size(void* p) { metalmm::debug::wrote(p, size, METALMM_CALLERS); }             \
  METALMM_UNTRACED inline void __tsan_unaligned_read_write##size(void* p) { __tsan_read_write##size(p); }
METALMM_TRACE(1) METALMM_TRACE(2) METALMM_TRACE(4) METALMM_TRACE(8) METALMM_TRACE(16)
#undef METALMM_TRACE
#if defined(__clang__) && __clang_major__ < 15  // calls C's own functions in their place; what is volatile becomes no such call again
METALMM_UNTRACED inline void* metalmm_memmove(void* to, const void* from, unsigned long size) asm("memmove");
METALMM_UNTRACED inline void* metalmm_memcpy(void* to, const void* from, unsigned long size) asm("memcpy");
METALMM_UNTRACED inline void* metalmm_memset(void* to, int value, unsigned long size) asm("memset");
METALMM_UNTRACED inline void* metalmm_move(void* to, const void* from, unsigned long size, const void* pc, const void* frame) {
  metalmm::debug::reads(from, size, pc, frame);
  metalmm::debug::wrote(to, size, pc, frame);
  auto *out = static_cast<volatile unsigned char*>(to);
  auto *in = static_cast<const volatile unsigned char*>(from);
  bool up = out < in;
  for (unsigned long i = 0; i < size; i++) out[up ? i : size - 1 - i] = in[up ? i : size - 1 - i];
  return to;
}
METALMM_UNTRACED inline void* metalmm_memmove(void* to, const void* from, unsigned long size) {
  return metalmm_move(to, from, size, METALMM_CALLERS);
}
METALMM_UNTRACED inline void* metalmm_memcpy(void* to, const void* from, unsigned long size) {
  return metalmm_move(to, from, size, METALMM_CALLERS);
}
METALMM_UNTRACED inline void* metalmm_memset(void* to, int value, unsigned long size) {
  metalmm::debug::wrote(to, size, METALMM_CALLERS);
  for (unsigned long i = 0; i < size; i++) static_cast<volatile unsigned char*>(to)[i] = static_cast<unsigned char>(value);
  return to;
}
#endif
}

namespace metalmm::debug {
// The compiler calls them; nothing in the text does.
__attribute__((used)) inline void* const kept[] = {
    reinterpret_cast<void*>(&metalmm_watch), reinterpret_cast<void*>(&metalmm_take_misaligned),
    reinterpret_cast<void*>(&__ubsan_handle_type_mismatch_v1), reinterpret_cast<void*>(&__ubsan_handle_out_of_bounds), reinterpret_cast<void*>(&__tsan_memcpy),
    reinterpret_cast<void*>(&__tsan_memmove), reinterpret_cast<void*>(&__tsan_memset), reinterpret_cast<void*>(&__tsan_init), reinterpret_cast<void*>(&__tsan_func_entry),
    reinterpret_cast<void*>(&__tsan_func_exit), reinterpret_cast<void*>(&__tsan_read_range), reinterpret_cast<void*>(&__tsan_write_range),
#define METALMM_KEEP(size)                                                                                        \
  reinterpret_cast<void*>(&__tsan_read##size), reinterpret_cast<void*>(&__tsan_write##size),                      \
      reinterpret_cast<void*>(&__tsan_read_write##size), reinterpret_cast<void*>(&__tsan_volatile_read##size),    \
      reinterpret_cast<void*>(&__tsan_volatile_write##size), reinterpret_cast<void*>(&__tsan_unaligned_read##size), \
      reinterpret_cast<void*>(&__tsan_unaligned_write##size), reinterpret_cast<void*>(&__tsan_unaligned_read_write##size)
#if defined(__clang__) && __clang_major__ < 15
    reinterpret_cast<void*>(&metalmm_memmove), reinterpret_cast<void*>(&metalmm_memcpy), reinterpret_cast<void*>(&metalmm_memset),
#endif
    METALMM_KEEP(1), METALMM_KEEP(2), METALMM_KEEP(4), METALMM_KEEP(8), METALMM_KEEP(16)};
#undef METALMM_KEEP
}  // namespace metalmm::debug
