// metal_type_traits, metal_limits, metal_array and metal_atomic.
#pragma once
#include "pack.h"

namespace metal {

template <class T, T V> struct integral_constant {
  static constexpr T value = V;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return V; }
  constexpr T operator()() const { return V; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> struct remove_volatile { using type = T; };
template <class T> struct remove_volatile<volatile T> { using type = T; };
template <class T> struct remove_cv { using type = typename remove_volatile<typename remove_const<T>::type>::type; };
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> struct remove_pointer { using type = T; };
template <class T> struct remove_pointer<T*> { using type = T; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> using remove_volatile_t = typename remove_volatile<T>::type;
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> using remove_pointer_t = typename remove_pointer<T>::type;
template <class T> struct remove_addrspace { using type = T; };
template <class T> using remove_addrspace_t = T;
// Whose numbers go among lanes: public kernels ask it, and have other ways for the rest.
template <class T, bool = (metalmm::msl::width_of<T> > 0)> struct __is_valid_simdgroup_type : false_type {};
template <class T> struct __is_valid_simdgroup_type<T, true> {
  using element = metalmm::msl::value_t<T>;
  static constexpr bool value = sizeof(element) <= 4 && !metalmm::msl::is_same<element, bool>::value && !metalmm::msl::is_same<element, bfloat>::value;
};
template <class T> struct make_unsigned { using type = metalmm::msl::unsigned_t<T>; };
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> struct make_signed { using type = typename metalmm::msl::signed_of<T>::type; };
template <class T> using make_signed_t = typename make_signed<T>::type;
template <class T> using decay_t = remove_cv_t<remove_reference_t<T>>;
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
#ifdef METALMM_UTILITIES  // lowering says where a program asks for these in metal; another may have a global `move` or `swap`
template <class T> struct decay { using type = remove_cv_t<remove_reference_t<T>>; };
template <class T> T&& declval();
template <class T> constexpr remove_reference_t<T>&& move(T&& t) { return static_cast<remove_reference_t<T>&&>(t); }
template <class T> constexpr T&& forward(remove_reference_t<T>& t) { return static_cast<T&&>(t); }
template <class T> METALMM_INLINE void swap(T& a, T& b) { T c = a; a = b; b = c; }
#endif

#define METALMM_PREDICATE(name, ...)                              \
  template <class T> struct name : bool_constant<__VA_ARGS__> {}; \
  template <class T> constexpr bool name##_v = name<T>::value;
METALMM_PREDICATE(is_floating_point, metalmm::msl::is_float<metalmm::msl::element_t<remove_cv_t<T>>>::value)  // of a vector, too
METALMM_PREDICATE(is_integral, metalmm::msl::is_int<remove_cv_t<T>>::value || metalmm::msl::is_same<remove_cv_t<T>, bool>::value)
METALMM_PREDICATE(is_arithmetic, metalmm::msl::is_scalar<remove_cv_t<T>>::value)
METALMM_PREDICATE(is_scalar, metalmm::msl::is_scalar<remove_cv_t<T>>::value)
METALMM_PREDICATE(is_vector, metalmm::msl::is_vector<remove_cv_t<T>>)
// Of a number none. No document of Apple's names it; public kernels count on both.
template <class T> struct vec_elements : integral_constant<uint, metalmm::msl::is_vector<remove_cv_t<T>> ? metalmm::msl::width_of<remove_cv_t<T>> : 0> {};
METALMM_PREDICATE(is_signed, metalmm::msl::is_float<remove_cv_t<T>>::value || metalmm::msl::is_signed_int<remove_cv_t<T>>)
METALMM_PREDICATE(is_unsigned, metalmm::msl::is_int<remove_cv_t<T>>::value && !metalmm::msl::is_signed_int<remove_cv_t<T>>)
METALMM_PREDICATE(is_void, metalmm::msl::is_same<remove_cv_t<T>, void>::value)
METALMM_PREDICATE(is_class, __is_class(T))
METALMM_PREDICATE(is_enum, __is_enum(T))
METALMM_PREDICATE(is_const, !metalmm::msl::is_same<T, remove_const_t<T>>::value)
METALMM_PREDICATE(is_reference, !metalmm::msl::is_same<T, remove_reference_t<T>>::value)
METALMM_PREDICATE(is_trivially_copyable, __is_trivially_copyable(T))
#undef METALMM_PREDICATE
template <class T> struct is_pointer : false_type {};
template <class T> struct is_pointer<T*> : true_type {};
template <class T> constexpr bool is_pointer_v = is_pointer<T>::value;
template <class A, class B> struct is_same : bool_constant<metalmm::msl::is_same<A, B>::value> {};
template <class A, class B> constexpr bool is_same_v = metalmm::msl::is_same<A, B>::value;
template <class B, class D> struct is_base_of : bool_constant<__is_base_of(B, D)> {};
template <class B, class D> constexpr bool is_base_of_v = is_base_of<B, D>::value;
template <class From, class To> struct is_convertible {
  template <class T> static char test(T);
  template <class F> static F&& value_of();
  template <class F, class T, class = decltype(test<T>(value_of<F>()))> static true_type check(int);
  template <class F, class T> static false_type check(...);
  static constexpr bool value = decltype(check<From, To>(0))::value;
};
template <class From, class To> constexpr bool is_convertible_v = is_convertible<From, To>::value;
template <class...> struct conjunction : true_type {};
template <class B, class... R> struct conjunction<B, R...> : conditional_t<bool(B::value), conjunction<R...>, B> {};
template <class...> struct disjunction : false_type {};
template <class B, class... R> struct disjunction<B, R...> : conditional_t<bool(B::value), B, disjunction<R...>> {};
template <class B> struct negation : bool_constant<!bool(B::value)> {};
template <class... B> using _conjunction = conjunction<B...>;
template <class... B> using _disjunction = disjunction<B...>;
template <class B> using _negation = negation<B>;

// Public kernels specialize the one with the underscore, as they may with Apple's headers, and ask the other.
template <class T> struct _numeric_limits_impl {
  static constexpr bool is_specialized = metalmm::msl::is_int<T>::value, is_signed = metalmm::msl::is_signed_int<T>, is_integer = true;
  static constexpr bool is_exact = true, is_bounded = true, is_iec559 = false, is_modulo = !is_signed && !metalmm::msl::is_same<T, bool>::value, has_signaling_NaN = false;
  static constexpr int digits = metalmm::msl::is_same<T, bool>::value ? 1 : 8 * sizeof(T) - metalmm::msl::is_signed_int<T>, digits10 = digits * 301 / 1000, max_digits10 = 0, radix = 2;
  static constexpr int min_exponent = 0, max_exponent = 0, min_exponent10 = 0, max_exponent10 = 0;
  static constexpr T min() { return metalmm::msl::int_min<T>; }
  static constexpr T max() { return metalmm::msl::int_max<T>; }
  static constexpr T lowest() { return metalmm::msl::int_min<T>; }
  static constexpr bool has_infinity = false, has_quiet_NaN = false;
  static constexpr T epsilon() { return T(0); }
  static constexpr T denorm_min() { return T(0); }
  static constexpr T infinity() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
  static constexpr T signaling_NaN() { return T(0); }
  static constexpr T round_error() { return T(0); }
};
#define METALMM_LIMITS(T, DIGITS, MAX, MIN, EPSILON, DENORM, LEAST, MOST)                      \
  template <> struct _numeric_limits_impl<T> {                                                 \
    static constexpr bool is_specialized = true, is_signed = true, is_integer = false;         \
    static constexpr bool has_infinity = true, has_quiet_NaN = true, has_signaling_NaN = true; \
    static constexpr bool is_exact = false, is_bounded = true, is_iec559 = true, is_modulo = false; \
    static constexpr int digits = DIGITS, digits10 = (DIGITS - 1) * 301 / 1000;                \
    static constexpr int max_digits10 = DIGITS * 301 / 1000 + 2, radix = 2;                    \
    static constexpr int min_exponent = LEAST, max_exponent = MOST;                            \
    static constexpr int min_exponent10 = (LEAST - 1) * 301 / 1000, max_exponent10 = MOST * 301 / 1000; \
    static constexpr T min() { return static_cast<T>(MIN); }                                   \
    static constexpr T max() { return static_cast<T>(MAX); }                                   \
    static constexpr T lowest() { return static_cast<T>(-(MAX)); }                             \
    static constexpr T epsilon() { return static_cast<T>(EPSILON); }                           \
    static constexpr T denorm_min() { return static_cast<T>(DENORM); }                         \
    static constexpr T infinity() { return static_cast<T>(__builtin_inff()); }                 \
    static constexpr T quiet_NaN() { return static_cast<T>(__builtin_nanf("")); }              \
    static constexpr T signaling_NaN() { return quiet_NaN(); }                                 \
    static constexpr T round_error() { return static_cast<T>(0.5f); }                          \
  };
METALMM_LIMITS(float, 24, 0x1.fffffep127f, 0x1p-126f, 0x1p-23f, 0x1p-149f, -125, 128)
METALMM_LIMITS(half, 11, 65504.0f, 0x1p-14f, 0x1p-10f, 0x1p-24f, -13, 16)
METALMM_LIMITS(bfloat, 8, 0x1.fep127f, 0x1p-126f, 0x1p-7f, 0x1p-133f, -125, 128)
#undef METALMM_LIMITS
template <class T> struct numeric_limits : _numeric_limits_impl<T> {};
template <class T, int N> struct numeric_limits<metalmm::msl::vec<T, N>> : numeric_limits<T> {};

template <class T, size_t N> struct array {
  T elements[N];
  METALMM_INLINE T& operator[](size_t i) { return elements[METALMM_INSIDE(N, i)]; }
  METALMM_INLINE constexpr const T& operator[](size_t i) const { return elements[METALMM_INSIDE(N, i)]; }
  static constexpr size_t size() { return N; }
  T* data() { return elements; }
  constexpr const T* data() const { return elements; }
  T* begin() { return elements; }
  T* end() { return elements + N; }
  constexpr const T* begin() const { return elements; }
  constexpr const T* end() const { return elements + N; }
};

enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return static_cast<mem_flags>(static_cast<uint>(a) | static_cast<uint>(b)); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return static_cast<mem_flags>(static_cast<uint>(a) & static_cast<uint>(b)); }

// MSL's atomics are relaxed; the order argument is taken and sequential consistency given.
template <class T> struct atomic { T value; };
template <class T> using _atomic = atomic<T>;
#ifdef METALMM_DEBUG  // g++'s sanitizer would call its library
#define METALMM_ATOMIC METALMM_UNTRACED
#define METALMM_TOUCH(object, kind) ::metalmm::debug::touch(const_cast<const T*>(&object->value), sizeof(T), ::metalmm::abi::Access::kind)
METALMM_UNTRACED inline void atomic_thread_fence(mem_flags flags, memory_order order, thread_scope scope = thread_scope_device) {
  if (order != memory_order_relaxed && scope != thread_scope_thread)
    ::metalmm::debug::order_by(static_cast<unsigned>(flags), scope >= thread_scope_threadgroup, scope == thread_scope_device);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
#else
METALMM_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#define METALMM_ATOMIC METALMM_INLINE
#define METALMM_TOUCH(object, kind) static_cast<void>(0)
#endif
#define METALMM_FETCH(name, ...)                                                                                  \
  template <class T, class U> METALMM_ATOMIC T atomic_fetch_##name##_explicit(volatile atomic<T>* object, U operand, memory_order) { \
    METALMM_TOUCH(object, atomic);                                                                                \
    T old, y = static_cast<T>(operand), next;                                                                     \
    __atomic_load(&object->value, &old, __ATOMIC_SEQ_CST);                                                        \
    do {                                                                                                          \
      T x = old;                                                                                                  \
      next = static_cast<T>(__VA_ARGS__);                                                                         \
    } while (!__atomic_compare_exchange(&object->value, &old, &next, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));  \
    return old;                                                                                                   \
  }
METALMM_FETCH(add, x + y) METALMM_FETCH(sub, x - y) METALMM_FETCH(and, x & y) METALMM_FETCH(or, x | y)
METALMM_FETCH(xor, x ^ y) METALMM_FETCH(min, x < y ? x : y) METALMM_FETCH(max, x > y ? x : y)
#undef METALMM_FETCH
METALMM_INLINE void atomic_min_explicit(volatile atomic<ulong>* object, ulong operand, memory_order o) { atomic_fetch_min_explicit(object, operand, o); }
METALMM_INLINE void atomic_max_explicit(volatile atomic<ulong>* object, ulong operand, memory_order o) { atomic_fetch_max_explicit(object, operand, o); }
template <class T, class U> METALMM_ATOMIC void atomic_store_explicit(volatile atomic<T>* object, U desired, memory_order) {
  METALMM_TOUCH(object, atomic_store);
  T d = static_cast<T>(desired);
  __atomic_store(&object->value, &d, __ATOMIC_SEQ_CST);
}
template <class T> METALMM_ATOMIC T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  METALMM_TOUCH(object, atomic_load);
  T r;
  __atomic_load(&object->value, &r, __ATOMIC_SEQ_CST);
  return r;
}
template <class T, class U> METALMM_ATOMIC T atomic_exchange_explicit(volatile atomic<T>* object, U desired, memory_order) {
  METALMM_TOUCH(object, atomic);
  T d = static_cast<T>(desired), r;
  __atomic_exchange(&object->value, &d, &r, __ATOMIC_SEQ_CST);
  return r;
}
template <class T, class U>
METALMM_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected, U desired, memory_order, memory_order) {
  METALMM_TOUCH(object, atomic);
  T d = static_cast<T>(desired);
  return __atomic_compare_exchange(&object->value, expected, &d, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
#undef METALMM_ATOMIC
#undef METALMM_TOUCH
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;

// metal_logging: nobody reads the log of the CPU device.
struct os_log {
  os_log() = default;
  constexpr os_log(const char*, const char*) {}
  template <class... A> METALMM_INLINE void log(const char*, const A&...) const {}
  template <class... A> METALMM_INLINE void log_debug(const char*, const A&...) const {}
  template <class... A> METALMM_INLINE void log_info(const char*, const A&...) const {}
  template <class... A> METALMM_INLINE void log_error(const char*, const A&...) const {}
  template <class... A> METALMM_INLINE void log_fault(const char*, const A&...) const {}
};
constexpr os_log os_log_default{"", ""};

}  // namespace metal

namespace metalmm::msl {
template <class A, class... R> constexpr bool are_alike = (is_same<metal::decay_t<A>, metal::decay_t<R>>::value && ...);

// An arm of `c ? a : b` where the other is of type Other: of two types of floating point a float, of one beside an integer that one.
template <class Other, class A> METALMM_INLINE constexpr decltype(auto) arm(A&& a) {
  using T = metal::decay_t<A>;
  using O = metal::decay_t<Other>;
  if constexpr (is_float<T>::value && is_float<O>::value && !is_same<T, O>::value)
    return static_cast<float>(a);
  else if constexpr (is_scalar<T>::value && !is_float<T>::value && (is_same<O, half>::value || is_same<O, bfloat>::value))
    return O(a);
  else
    return static_cast<A&&>(a);
}
template <class A> metal::remove_reference_t<A>& made();
template <class A, class B> using either = decltype(true ? arm<B>(made<A>()) : arm<A>(made<B>()));
}  // namespace metalmm::msl
