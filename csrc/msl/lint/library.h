// Atomics, simdgroups, matrices, textures and what else MSL's library has. See declarations.h.
// clang-format off
#pragma once
#pragma clang system_header

void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device);

template <class T>
struct atomic {
  T strict_value;
};
typedef atomic<int> metalmm_atomic_int;
typedef atomic<uint> metalmm_atomic_uint;
typedef atomic<bool> metalmm_atomic_bool;
typedef atomic<float> metalmm_atomic_float;
typedef atomic<ulong> metalmm_atomic_ulong;
template <class T>
struct strict_id {
  typedef T type;
};
#define STRICT_RELAXED(O) __attribute__((diagnose_if(O != memory_order_relaxed, "atomics are memory_order_relaxed", "error")))
template <class T>
struct strict_atomic {};
template <>
struct strict_atomic<int> {
  typedef int add, least, bits;
};
template <>
struct strict_atomic<uint> {
  typedef int add, least, bits;
};
template <>
struct strict_atomic<float> {
  typedef int add;
};
#define STRICT_ATOMIC(AS)                                                                                                     \
  template <class T>                                                                                                          \
  T atomic_load_explicit(const volatile AS atomic<T>*, memory_order o) STRICT_RELAXED(o);                                     \
  template <class T>                                                                                                          \
  void atomic_store_explicit(volatile AS atomic<T>*, typename strict_id<T>::type, memory_order o) STRICT_RELAXED(o);          \
  template <class T>                                                                                                          \
  T atomic_exchange_explicit(volatile AS atomic<T>*, typename strict_id<T>::type, memory_order o) STRICT_RELAXED(o);          \
  template <class T>                                                                                                          \
  bool atomic_compare_exchange_weak_explicit(volatile AS atomic<T>*, __private T*, typename strict_id<T>::type, memory_order, \
                                             memory_order);                                                                   \
  template <class T, class = typename strict_atomic<T>::add>                                                                  \
  T atomic_fetch_add_explicit(volatile AS atomic<T>*, typename strict_id<T>::type, memory_order o) STRICT_RELAXED(o);         \
  template <class T, class = typename strict_atomic<T>::add>                                                                  \
  T atomic_fetch_sub_explicit(volatile AS atomic<T>*, typename strict_id<T>::type, memory_order o) STRICT_RELAXED(o);         \
  template <class T, class = typename strict_atomic<T>::least>                                                                \
  T atomic_fetch_min_explicit(volatile AS atomic<T>*, typename strict_id<T>::type, memory_order o) STRICT_RELAXED(o);         \
  template <class T, class = typename strict_atomic<T>::least>                                                                \
  T atomic_fetch_max_explicit(volatile AS atomic<T>*, typename strict_id<T>::type, memory_order o) STRICT_RELAXED(o);         \
  template <class T, class = typename strict_atomic<T>::bits>                                                                 \
  T atomic_fetch_or_explicit(volatile AS atomic<T>*, typename strict_id<T>::type, memory_order o) STRICT_RELAXED(o);          \
  template <class T, class = typename strict_atomic<T>::bits>                                                                 \
  T atomic_fetch_and_explicit(volatile AS atomic<T>*, typename strict_id<T>::type, memory_order o) STRICT_RELAXED(o);         \
  template <class T, class = typename strict_atomic<T>::bits>                                                                 \
  T atomic_fetch_xor_explicit(volatile AS atomic<T>*, typename strict_id<T>::type, memory_order o) STRICT_RELAXED(o);
STRICT_ATOMIC(__global)
STRICT_ATOMIC(__local)
void atomic_min_explicit(volatile __global atomic<ulong>*, ulong, memory_order o) STRICT_RELAXED(o);
void atomic_max_explicit(volatile __global atomic<ulong>*, ulong, memory_order o) STRICT_RELAXED(o);

// Types of simdgroup functions: numbers and their vectors; no structures, no bool.
template <class T>
struct strict_simd {
  typedef typename element_of<T>::type E;
  enum { value = int(strict::is_number<E>::value) && sizeof(E) <= 4 && !strict::same<E, bool>::value };
};
#define STRICT_LANE(T) class = typename strict::when<strict_simd<T>::value>::type
// Of a simdgroup, and of a quad.
#define STRICT_OF_ONE(NAME)          \
  template <class T, STRICT_LANE(T)> \
  T simd_##NAME(T);                  \
  template <class T, STRICT_LANE(T)> \
  T quad_##NAME(T)
#define STRICT_OF_TWO(NAME)          \
  template <class T, STRICT_LANE(T)> \
  T simd_##NAME(T, ushort);          \
  template <class T, STRICT_LANE(T)> \
  T quad_##NAME(T, ushort)
#define STRICT_VOTES(GROUP, TYPE, WIDTH)                                       \
  struct GROUP##_vote {                                                        \
    typedef TYPE vote_t;                                                       \
    explicit operator vote_t() const;                                          \
    bool all() const;                                                          \
    bool any() const;                                                          \
  };                                                                           \
  GROUP##_vote GROUP##_ballot(bool);                                           \
  GROUP##_vote GROUP##_active_threads_mask();                                  \
  bool GROUP##_is_first();                                                     \
  bool GROUP##_is_helper_thread();                                             \
  bool GROUP##_all(bool);                                                      \
  bool GROUP##_any(bool);                                                      \
  template <class T, STRICT_LANE(T)>                                           \
  T GROUP##_shuffle_and_fill_up(T, T, ushort, ushort = WIDTH);                 \
  template <class T, STRICT_LANE(T)>                                           \
  T GROUP##_shuffle_and_fill_down(T, T, ushort, ushort = WIDTH)
STRICT_OF_ONE(sum);
STRICT_OF_ONE(product);
STRICT_OF_ONE(min);
STRICT_OF_ONE(max);
STRICT_OF_ONE(and);
STRICT_OF_ONE(or);
STRICT_OF_ONE(xor);
STRICT_OF_ONE(prefix_inclusive_sum);
STRICT_OF_ONE(prefix_exclusive_sum);
STRICT_OF_ONE(prefix_inclusive_product);
STRICT_OF_ONE(prefix_exclusive_product);
STRICT_OF_ONE(broadcast_first);
STRICT_OF_TWO(broadcast);
STRICT_OF_TWO(shuffle);
STRICT_OF_TWO(shuffle_xor);
STRICT_OF_TWO(shuffle_up);
STRICT_OF_TWO(shuffle_down);
STRICT_OF_TWO(shuffle_rotate_up);
STRICT_OF_TWO(shuffle_rotate_down);
STRICT_VOTES(simd, ulong, 32);
STRICT_VOTES(quad, ushort, 4);

template <class T, int C, int R>
struct simdgroup_matrix {
  static_assert(C == 8 && R == 8 && strict::is_float<T>::value, "simdgroup matrices are 8 x 8, of half, bfloat or float");
  vec<T, 64> strict_elements;  // a lane has the first two
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  __private vec<T, 64>& thread_elements();
  const __private vec<T, 64>& thread_elements() const;
};
template <class T, int C, int R = C>
simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
template <class T, int C, int R = C>
simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T);
#define STRICT_MATRIX(AS)                                                                                           \
  template <class T, int C, int R>                                                                                  \
  void simdgroup_load(__private simdgroup_matrix<T, C, R>&, const AS T*, ulong = C, ulong2 = {0, 0}, bool = false); \
  template <class T, int C, int R>                                                                                  \
  void simdgroup_store(__private const simdgroup_matrix<T, C, R>&, AS T*, ulong = C, ulong2 = {0, 0}, bool = false);
STRICT_MATRIX(__global)
STRICT_MATRIX(__local)
template <class T, class A, class B, class D>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<T, 8, 8>&, const __private simdgroup_matrix<A, 8, 8>&,
                                   const __private simdgroup_matrix<B, 8, 8>&, const __private simdgroup_matrix<D, 8, 8>&);
template <class T, class A, class B>
void simdgroup_multiply(__private simdgroup_matrix<T, 8, 8>&, const __private simdgroup_matrix<A, 8, 8>&,
                        const __private simdgroup_matrix<B, 8, 8>&);
template <class T, class A>
simdgroup_matrix<T, 8, 8> operator*(const __private simdgroup_matrix<T, 8, 8>&, const __private simdgroup_matrix<A, 8, 8>&);
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C, int R>
struct matrix {
  vec<T, R> columns[C];
  matrix() = default;
  explicit matrix(T);
  template <class... A, class = typename strict::when<sizeof...(A) + 1 == C>::type>
  matrix(vec<T, R>, A...);
  template <class... A, class = typename strict::when<sizeof...(A) + 1 == C * R>::type>
  matrix(T, A...);
  template <class U>
  explicit matrix(matrix<U, C, R>);
#define STRICT_IN(AS)               \
  AS vec<T, R>& operator[](int) AS; \
  const AS vec<T, R>& operator[](int) const AS;
  STRICT_SPACES(STRICT_IN)
#undef STRICT_IN
  const __constant vec<T, R>& operator[](int) const __constant;
};
template <class T, int C, int R>
vec<T, R> operator*(matrix<T, C, R>, vec<T, C>);
template <class T, int C, int R>
vec<T, C> operator*(vec<T, R>, matrix<T, C, R>);
template <class T, int C, int R>
matrix<T, C, R> operator*(matrix<T, C, R>, T);
template <class T, int C, int R>
matrix<T, C, R> operator*(T, matrix<T, C, R>);
template <class T, int C, int R, int K>
matrix<T, K, R> operator*(matrix<T, C, R>, matrix<T, K, C>);
template <class T, int C, int R>
matrix<T, C, R> operator+(matrix<T, C, R>, matrix<T, C, R>);
template <class T, int C, int R>
matrix<T, C, R> operator-(matrix<T, C, R>, matrix<T, C, R>);
template <class T, int C, int R>
matrix<T, C, R> operator-(matrix<T, C, R>);
#define STRICT_IN(AS)                                                   \
  template <class T, int C, int R>                                      \
  AS matrix<T, C, R>& operator+=(AS matrix<T, C, R>&, matrix<T, C, R>); \
  template <class T, int C, int R>                                      \
  AS matrix<T, C, R>& operator-=(AS matrix<T, C, R>&, matrix<T, C, R>); \
  template <class T, int C, int R>                                      \
  AS matrix<T, C, R>& operator*=(AS matrix<T, C, R>&, typename strict_id<T>::type);
STRICT_IN(__global)
STRICT_IN(__local)
STRICT_IN(__private)
#undef STRICT_IN
template <class T, int C, int R>
matrix<T, R, C> transpose(matrix<T, C, R>);
template <class T, int N>
T determinant(matrix<T, N, N>);
#define STRICT_M(T, C)              \
  typedef matrix<T, C, 2> T##C##x2; \
  typedef matrix<T, C, 3> T##C##x3; \
  typedef matrix<T, C, 4> T##C##x4;
STRICT_M(float, 2)
STRICT_M(float, 3) STRICT_M(float, 4) STRICT_M(half, 2) STRICT_M(half, 3) STRICT_M(half, 4) typedef matrix<bfloat, 4, 4> bfloat4x4;

template <class T, size_t N>
struct array {
  T strict_elements[N];
#define STRICT_IN(AS)                      \
  AS T& operator[](size_t) AS;             \
  const AS T& operator[](size_t) const AS; \
  AS T* data() AS;                         \
  const AS T* data() const AS;
  STRICT_SPACES(STRICT_IN)
#undef STRICT_IN
  const __constant T& operator[](size_t) const __constant;
  const __constant T* data() const __constant;
  constexpr size_t size() const { return N; }
  constexpr size_t size() const __constant { return N; }
};

#define STRICT_C static __constant constexpr const
template <class T, T V>
struct integral_constant {
  STRICT_C T value = V;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
STRICT_C bool is_same_v = strict::same<A, B>::value;
template <bool B, class T = void>
struct enable_if : strict::when<B, T> {};
template <bool B, class T = void>
using enable_if_t = typename strict::when<B, T>::type;
template <bool B, class X, class Y>
struct conditional : strict::pick<B, X, Y> {};
template <bool B, class X, class Y>
using conditional_t = typename strict::pick<B, X, Y>::type;
template <class T>
struct is_integral : bool_constant<bool(strict::is_int<T>::value)> {};
template <class T>
struct is_floating_point : bool_constant<bool(strict::is_float<typename strict::shape<T>::element>::value)> {};
template <class T>
struct is_arithmetic : bool_constant<bool(strict::is_number<T>::value)> {};
template <class T>
struct is_scalar : bool_constant<bool(strict::is_number<T>::value)> {};
template <class T>
struct is_vector : bool_constant<bool(strict::shape<T>::is_vector)> {};
template <class T>
struct vec_elements : integral_constant<uint, bool(strict::shape<T>::is_vector) ? uint(strict::shape<T>::size) : 0u> {};
template <class T>
struct __is_valid_simdgroup_type : bool_constant<bool(strict::is_number<typename strict::shape<T>::element>::value) && sizeof(typename strict::shape<T>::element) <= 4> {};
template <class T>
struct is_signed : bool_constant<(T(-1) < T(0))> {};
template <class T>
struct is_unsigned : bool_constant<!(T(-1) < T(0))> {};
template <class T>
struct is_class : bool_constant<__is_class(T)> {};
template <class T>
STRICT_C bool is_integral_v = strict::is_int<T>::value;
template <class T>
STRICT_C bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
STRICT_C bool is_arithmetic_v = strict::is_number<T>::value;
template <class T>
STRICT_C bool is_scalar_v = strict::is_number<T>::value;
template <class T>
STRICT_C bool is_vector_v = bool(strict::shape<T>::is_vector);
template <class T>
STRICT_C bool is_signed_v = T(-1) < T(0);
template <class T>
STRICT_C bool is_unsigned_v = !(T(-1) < T(0));
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <class A, class B>
STRICT_C bool is_convertible_v = __is_convertible_to(A, B);
template <class T>
struct remove_reference : strict::remove_ref<T> {};
template <class T>
struct remove_cv : strict::remove_cv<T> {};
template <class T>
struct remove_const : strict::remove_cv<T> {};
template <class T>
struct make_unsigned;
template <>
struct make_unsigned<int> {
  typedef uint type;
};
template <>
struct make_unsigned<short> {
  typedef ushort type;
};
template <>
struct make_unsigned<long> {
  typedef ulong type;
};
template <class T>
struct make_signed {
  typedef T type;
};
template <>
struct make_signed<uchar> {
  typedef char type;
};
template <>
struct make_signed<uint> {
  typedef int type;
};
template <>
struct make_signed<ushort> {
  typedef short type;
};
template <>
struct make_signed<ulong> {
  typedef long type;
};
template <class T>
using make_signed_t = typename make_signed<T>::type;
template <class T>
using remove_reference_t = typename strict::remove_ref<T>::type;
template <class T>
using remove_cv_t = typename strict::remove_cv<T>::type;
template <class T>
using decay_t = strict::bare<T>;
template <class T>
using remove_addrspace_t = typename strict::remove_as<T>::type;
template <class... B>
struct _disjunction : false_type {};
template <class A, class... B>
struct _disjunction<A, B...> : bool_constant<bool(A::value) || bool(_disjunction<B...>::value)> {};
template <class... B>
struct _conjunction : true_type {};
template <class A, class... B>
struct _conjunction<A, B...> : bool_constant<bool(A::value) && bool(_conjunction<B...>::value)> {};

// What a kernel beside the one that is looked at may take.
enum class access { sample, read, write, metalmm_read_write };
enum class coord { normalized, pixel };
enum class filter { nearest, linear, bicubic };
enum class mip_filter { none, nearest, linear };
enum class mag_filter { nearest, linear, bicubic };
enum class min_filter { nearest, linear, bicubic };
enum class address { clamp_to_zero, clamp_to_edge, clamp_to_border, repeat, mirrored_repeat };
enum class s_address { clamp_to_zero, clamp_to_edge, clamp_to_border, repeat, mirrored_repeat };
enum class t_address { clamp_to_zero, clamp_to_edge, clamp_to_border, repeat, mirrored_repeat };
enum class compare_func { never, less, less_equal, greater, greater_equal, equal, not_equal, always };
struct sampler {
  template <class... A>
  constexpr sampler(A...) {}
};
template <class T>
struct strict_texture {
#define STRICT_IN(AS)                 \
  template <class... A>               \
  vec<T, 4> sample(A...) const AS;    \
  template <class... A>               \
  vec<T, 4> read(A...) const AS;      \
  template <class... A>               \
  vec<T, 4> gather(A...) const AS;    \
  template <class... A>               \
  void write(A...) const AS;          \
  uint get_width(uint = 0) const AS;  \
  uint get_height(uint = 0) const AS; \
  uint get_depth(uint = 0) const AS;  \
  uint get_array_size() const AS;     \
  uint get_num_mip_levels() const AS; \
  void fence() const AS;
  STRICT_IN(__generic) STRICT_IN(__constant)
#undef STRICT_IN
};
#define STRICT_TEXTURE(NAME)                    \
  template <class T, access A = access::sample> \
  struct NAME : strict_texture<T> {};
STRICT_TEXTURE(texture1d)
STRICT_TEXTURE(texture1d_array)
STRICT_TEXTURE(texture2d)
STRICT_TEXTURE(texture2d_array)
STRICT_TEXTURE(texture3d)
STRICT_TEXTURE(texturecube)
STRICT_TEXTURE(texturecube_array)
STRICT_TEXTURE(texture_buffer)
STRICT_TEXTURE(depth2d)
STRICT_TEXTURE(depth2d_array)
struct os_log {
#define STRICT_LOG(NAME) \
  template <class... A>  \
  void NAME(A...) const __constant;
  STRICT_LOG(log) STRICT_LOG(log_debug) STRICT_LOG(log_info) STRICT_LOG(log_error) STRICT_LOG(log_fault)
};
extern __constant os_log os_log_default;

template <class T>
T declval();
template <class T>
struct _numeric_limits_impl {
  static constexpr T max() { return T(); }
  static constexpr T min() { return T(); }
  static constexpr T lowest() { return T(); }
  static constexpr T infinity() { return T(); }
  static constexpr T quiet_NaN() { return T(); }
  static constexpr T epsilon() { return T(); }
  static constexpr T denorm_min() { return T(); }
  static constexpr T signaling_NaN() { return T(); }
  static constexpr T round_error() { return T(); }
  STRICT_C bool is_signed = true, is_integer = true, is_exact = true, is_bounded = true, is_iec559 = true, is_modulo = true;
  STRICT_C int digits = 24, digits10 = 6, max_digits10 = 9, radix = 2, min_exponent = 0, max_exponent = 0, min_exponent10 = 0, max_exponent10 = 0;
};
template <class T>
struct numeric_limits : _numeric_limits_impl<T> {};
template <class T, class U>
struct pair {
  T first;
  U second;
};
void floats_of_bytes(const __global uchar* bytes, int shift, int mask, int flip, int offset, __private float* to);  // ours: kernels/cpu
}  // namespace metal
