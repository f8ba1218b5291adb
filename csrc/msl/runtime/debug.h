// Of a kernel compiled for a debug device: counts the writes to each element of an output, finds vectors off their alignment, and
// shuffles the order of lanes.
// The compiler's thread sanitizer puts a call before every access to memory; these are the functions it calls.
#pragma once

#define METALMM_UNTRACED __attribute__((no_sanitize("thread"), noinline))

namespace metalmm::debug {

inline unsigned char *watch_begin, *watch_end, *watch_counts;  // a count for every two bytes

METALMM_UNTRACED inline void count(unsigned char* n) {
  unsigned char old = __atomic_load_n(n, __ATOMIC_RELAXED);
  while (old != 255 && !__atomic_compare_exchange_n(n, &old, old + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

METALMM_UNTRACED inline void wrote(void* at, unsigned long size) {
  auto* p = static_cast<unsigned char*>(at);
  if (p >= watch_end || p + size <= watch_begin) return;
  for (unsigned long i = 0; i < size; i += 2)
    if (p + i >= watch_begin && p + i < watch_end) count(&watch_counts[(p + i - watch_begin) / 2]);
}

// x86 reads vectors anywhere, a GPU where they are aligned. The first such access, until the executor asks.
inline const unsigned char* misaligned_at;
inline unsigned misaligned_size;
METALMM_UNTRACED inline void accessed(const void* at, unsigned size) {
  if (__builtin_expect(reinterpret_cast<unsigned long>(at) % size == 0, 1)) return;
  unsigned none = 0;
  if (__atomic_compare_exchange_n(&misaligned_size, &none, size, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    misaligned_at = static_cast<const unsigned char*>(at);
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
__attribute__((visibility("default"))) METALMM_UNTRACED inline unsigned metalmm_take_misaligned(const unsigned char** at) {
  *at = metalmm::debug::misaligned_at;
  return __atomic_exchange_n(&metalmm::debug::misaligned_size, 0u, __ATOMIC_RELAXED);
}
METALMM_UNTRACED inline void __tsan_init() {}
METALMM_UNTRACED inline void __tsan_func_entry(void*) {}
METALMM_UNTRACED inline void __tsan_func_exit(void*) {}
METALMM_UNTRACED inline void __tsan_read_range(void*, unsigned long) {}
METALMM_UNTRACED inline void __tsan_write_range(void* p, unsigned long size) { metalmm::debug::wrote(p, size); }
#define METALMM_TRACE(size)                                                                                            \
  METALMM_UNTRACED inline void __tsan_read##size(void* p) { metalmm::debug::accessed(p, size); }                       \
  METALMM_UNTRACED inline void __tsan_write##size(void* p) {                                                           \
    metalmm::debug::accessed(p, size);                                                                                 \
    metalmm::debug::wrote(p, size);                                                                                    \
  }                                                                                                                    \
  METALMM_UNTRACED inline void __tsan_read_write##size(void* p) {                                                      \
    metalmm::debug::accessed(p, size);                                                                                 \
    metalmm::debug::wrote(p, size);                                                                                    \
  }                                                                                                                    \
  METALMM_UNTRACED inline void __tsan_volatile_read##size(void*) {}                                                    \
  METALMM_UNTRACED inline void __tsan_volatile_write##size(void* p) { metalmm::debug::wrote(p, size); }                \
  METALMM_UNTRACED inline void __tsan_unaligned_read##size(void*) {}                                                   \
  METALMM_UNTRACED inline void __tsan_unaligned_write##size(void* p) { metalmm::debug::wrote(p, size); }               \
  METALMM_UNTRACED inline void __tsan_unaligned_read_write##size(void* p) { metalmm::debug::wrote(p, size); }
METALMM_TRACE(1) METALMM_TRACE(2) METALMM_TRACE(4) METALMM_TRACE(8) METALMM_TRACE(16)
#undef METALMM_TRACE
}

namespace metalmm::debug {
// The compiler calls them; nothing in the text does.
__attribute__((used)) inline void* const kept[] = {
    reinterpret_cast<void*>(&metalmm_watch), reinterpret_cast<void*>(&metalmm_take_misaligned), reinterpret_cast<void*>(&__tsan_init), reinterpret_cast<void*>(&__tsan_func_entry),
    reinterpret_cast<void*>(&__tsan_func_exit), reinterpret_cast<void*>(&__tsan_read_range), reinterpret_cast<void*>(&__tsan_write_range),
#define METALMM_KEEP(size)                                                                                        \
  reinterpret_cast<void*>(&__tsan_read##size), reinterpret_cast<void*>(&__tsan_write##size),                      \
      reinterpret_cast<void*>(&__tsan_read_write##size), reinterpret_cast<void*>(&__tsan_volatile_read##size),    \
      reinterpret_cast<void*>(&__tsan_volatile_write##size), reinterpret_cast<void*>(&__tsan_unaligned_read##size), \
      reinterpret_cast<void*>(&__tsan_unaligned_write##size), reinterpret_cast<void*>(&__tsan_unaligned_read_write##size)
    METALMM_KEEP(1), METALMM_KEEP(2), METALMM_KEEP(4), METALMM_KEEP(8), METALMM_KEEP(16)};
#undef METALMM_KEEP
}  // namespace metalmm::debug
