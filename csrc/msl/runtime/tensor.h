// Metal 4's tensors over memory, and mpp::tensor_ops::matmul2d: each thread has some elements of the result and computes them. Which they
// are is nobody's business, on an Apple GPU neither. docs/msl.md says what of it is here.
#pragma once

namespace metal {
constexpr size_t dynamic_extent = static_cast<size_t>(-1);
struct tensor_inline {};

// Of two dimensions, the innermost first.
template <class I, size_t... E> struct extents {
  static_assert(sizeof...(E) == 2 && is_same<I, int>::value, "tensors have two dimensions here, of type int");
  I length[2];
  METALMM_INLINE constexpr extents(I a, I b) : length{a, b} {}
  METALMM_INLINE constexpr extents() : length{static_cast<I>(E)...} {}
  METALMM_INLINE constexpr I extent(size_t i) const { return length[i]; }
};
template <class I, size_t Rank> struct dextents_of;
template <class I> struct dextents_of<I, 2> { using type = extents<I, dynamic_extent, dynamic_extent>; };
template <class I, size_t Rank> using dextents = typename dextents_of<I, Rank>::type;

template <class T, class Extents, class Where> struct tensor {
  static_assert(is_same<Where, tensor_inline>::value, "a tensor that the host binds is not supported here");
  using element_type = T;
  T* first;
  Extents size;
  long step[2];
  METALMM_INLINE tensor(T* data, Extents e) : first(data), size(e), step{1, e.extent(0)} {}
  METALMM_INLINE tensor(T* data, Extents e, array<int, 2> strides) : first(data), size(e), step{strides[0], strides[1]} {}
  // From there on, as far as the whole reaches.
  METALMM_INLINE auto slice(int i, int j) const { return part(i, j, size.extent(0) - i, size.extent(1) - j); }
  template <size_t A, size_t B> METALMM_INLINE auto slice(int i, int j) const {
    return part(i, j, A == dynamic_extent ? size.extent(0) - i : static_cast<int>(A), B == dynamic_extent ? size.extent(1) - j : static_cast<int>(B));
  }
  METALMM_INLINE T& at(int i, int j) const { return first[i * step[0] + j * step[1]]; }
  METALMM_INLINE bool has(int i, int j) const { return i < size.extent(0) && j < size.extent(1); }

 private:
  METALMM_INLINE tensor<T, dextents<int, 2>, tensor_inline> part(int i, int j, int a, int b) const {
    return {&at(i, j), dextents<int, 2>(a, b), array<int, 2>{static_cast<int>(step[0]), static_cast<int>(step[1])}};
  }
};
template <class T, class I, size_t... E> tensor(T*, extents<I, E...>) -> tensor<T, extents<I, E...>, tensor_inline>;
template <class T, class I, size_t... E> tensor(T*, extents<I, E...>, array<I, 2>) -> tensor<T, extents<I, E...>, tensor_inline>;

template <int N> struct execution_simdgroups {
  static constexpr int threads = 32 * N;
  // This thread's number among them. A threadgroup of others is an error.
  static METALMM_INLINE int thread() {
#ifdef __CUDACC__
    int all = static_cast<int>(blockDim.x), own = static_cast<int>(threadIdx.x);
#else
    auto* context = metalmm::fiber::context();
    int all = static_cast<int>(context->threads), own = static_cast<int>(context->lane);
#endif
    if (N > 1 && all != threads) __builtin_trap();
    return own % threads;
  }
};
using execution_simdgroup = execution_simdgroups<1>;
struct execution_thread {
  static constexpr int threads = 1;
  static METALMM_INLINE int thread() { return 0; }
};
}  // namespace metal

namespace mpp::tensor_ops {
template <class T> constexpr T dynamic_length_v = static_cast<T>(2147483647);
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int rows, int columns, int depth = static_cast<int>(metal::dynamic_extent), bool left = false, bool right = false,
                                bool relaxed = false, mode how = mode::multiply)
      : m(rows), n(columns), k(depth == dynamic_length_v<int> ? -1 : depth), transpose_left(left), transpose_right(right),
        relaxed_precision(relaxed), matmul_mode(how) {}
  // As a number: C++17 has no arguments of templates that are of a class.
  constexpr operator unsigned long long() const {
    auto word = [](auto x, int at) { return static_cast<unsigned long long>(x) << at; };
    return word(m, 0) | word(n, 15) | word(k + 1, 30) | word(transpose_left, 61) | word(transpose_right, 62) | word(matmul_mode, 63);
  }
  static constexpr matmul2d_descriptor of(unsigned long long x) {
    auto word = [x](int at, int bits) { return static_cast<int>(x >> at & ((1ull << bits) - 1)); };
    return {word(0, 15), word(15, 15), word(30, 31) - 1, word(61, 1) != 0, word(62, 1) != 0, false, static_cast<mode>(word(63, 1))};
  }
};

// M x N elements over the threads of a scope.
template <class T, int M, int N, class Scope, class Left, class Right> struct CooperativeTensor {
  static constexpr int capacity = (M * N + Scope::threads - 1) / Scope::threads;
  T elements[capacity];
  int thread = Scope::thread();
  static METALMM_INLINE constexpr uint16_t get_capacity() { return capacity; }
  METALMM_INLINE int place(int i) const { return i * Scope::threads + thread; }
  METALMM_INLINE bool is_valid_element(int i) const { return place(i) < M * N; }
  METALMM_INLINE metal::array<int, 2> get_multidimensional_index(int i) const { return {place(i) % N, place(i) / N}; }
  METALMM_INLINE T& operator[](int i) { return elements[METALMM_INSIDE(capacity, i)]; }
  METALMM_INLINE const T& operator[](int i) const { return elements[METALMM_INSIDE(capacity, i)]; }
  METALMM_INLINE T get(int i) const { return is_valid_element(i) ? elements[i] : T(0); }
  METALMM_INLINE void set(int i, T x) {
    if (is_valid_element(i)) elements[i] = x;
  }
  template <class F> METALMM_INLINE void each(F f) {
    for (int i = 0; i < capacity; i++)
      if (is_valid_element(i)) f(elements[i], place(i) % N, place(i) / N);
  }
  template <class Tensor> METALMM_INLINE void load(const Tensor& from) {
    check<Tensor>();
    each([&](T& x, int column, int row) { x = from.has(column, row) ? from.at(column, row) : T(0); });
  }
  template <class Tensor> METALMM_INLINE void store(const Tensor& to) {
    check<Tensor>();
    each([&](T& x, int column, int row) {
      if (to.has(column, row)) to.at(column, row) = x;
    });
  }
  template <class Tensor> static constexpr void check() {
    static_assert(metal::is_same<typename Tensor::element_type, T>::value, "Tensor datatype does not match cooperative tensor");
  }
};

template <unsigned long long Bits, class Scope> class matmul2d {
  static constexpr matmul2d_descriptor D = matmul2d_descriptor::of(Bits);
  static_assert(D.m % 16 == 0 || D.n % 16 == 0, "At least one of M or N must be a multiple of 16");
  static_assert(D.k == -1 || D.k % 16 == 0, "K must be dynamic or a multiple of 16");
  template <class T> using number = metal::conditional_t<metal::is_integral<T>::value, int, float>;

 public:
  template <class Left, class Right, class T> METALMM_INLINE auto get_destination_cooperative_tensor() const {
    CooperativeTensor<T, D.m, D.n, Scope, Left, Right> sums;  // of no value, as on a GPU: a debug device makes them NaN
    return sums;
  }
  template <class Left, class Right, class T>
  METALMM_INLINE void run(Left& a, Right& b, CooperativeTensor<T, D.m, D.n, Scope, Left, Right>& sums) const {
    int depth = D.k == -1 ? a.size.extent(D.transpose_left) : D.k;
    bool is_whole = depth <= a.size.extent(D.transpose_left) && depth <= b.size.extent(!D.transpose_right);
    sums.each([&](T& x, int column, int row) {
      if (row >= a.size.extent(!D.transpose_left) || column >= b.size.extent(D.transpose_right)) return;
      number<T> sum = D.matmul_mode == matmul2d_descriptor::mode::multiply ? 0 : x;
      for (int k = 0; is_whole && k < depth; k++) sum += static_cast<number<T>>(left(a, row, k)) * static_cast<number<T>>(right(b, k, column));
      x = is_whole || metal::is_integral<T>::value ? static_cast<T>(sum) : static_cast<T>(__builtin_nanf(""));
    });
  }

 private:
  template <class A> static METALMM_INLINE auto left(const A& a, int row, int k) { return D.transpose_left ? a.at(row, k) : a.at(k, row); }
  template <class B> static METALMM_INLINE auto right(const B& b, int k, int column) { return D.transpose_right ? b.at(k, column) : b.at(column, k); }
};
}  // namespace mpp::tensor_ops
