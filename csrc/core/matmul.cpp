#include "matmul.h"

#include <algorithm>

namespace metalmm {
namespace {

[[noreturn]] void bad_shape(const std::string& what) { throw Error(ErrorKind::shape, "matmul: " + what); }

[[noreturn]] void bad(ErrorKind kind, const char* name, const Tensor& t, const std::string& what) {
  throw Error(kind, std::string("matmul: ") + name + " " + t.shape_text() + " " + what);
}

// `of`: what A is, for the operands that must be of its type.
void check_element(const char* name, const Tensor& t, const DType* of = nullptr) {
  if (operand_type(t.dtype) == kOperandTypeCount)
    bad(ErrorKind::dtype, name, t,
        "is " + t.dtype.name() + "; it takes float16, bfloat16 or float32: convert with .astype(numpy.float16), for example");
  if (of && t.dtype != *of)
    bad(ErrorKind::dtype, name, t, "is " + t.dtype.name() + " and a is " + of->name() + "; it takes a's type: convert with .astype()");
  if (t.address() % t.dtype.size) bad(ErrorKind::layout, name, t, "is not aligned to " + std::to_string(t.dtype.size) + " bytes");
}

// An operand of 2 or 3 dimensions whose rows are contiguous; any distance between rows and between matrices.
void check_operand(const char* name, const Tensor& t, const DType* of = nullptr) {
  if (t.ndim != 2 && t.ndim != 3)
    bad(ErrorKind::shape, name, t,
        "has " + std::to_string(t.ndim) + (t.ndim == 1 ? " dimension" : " dimensions") + "; it takes 2, or 3 with a batch");
  for (int i = 0; i < t.ndim; i++)
    if (t.shape[i] == 0) bad(ErrorKind::shape, name, t, "has a dimension of size zero; every size must be at least 1");
  check_element(name, t, of);
  int64_t columns = t.shape[t.ndim - 1], rows = t.shape[t.ndim - 2];
  if (columns > 1 && t.strides[t.ndim - 1] != 1)
    bad(ErrorKind::layout, name, t,
        "is not contiguous along its rows; pass transpose_a or transpose_b for a transposed matrix, or numpy.ascontiguousarray of it");
  if ((rows > 1 && t.strides[t.ndim - 2] < columns) || (t.ndim == 3 && t.shape[0] > 1 && t.strides[0] < 0))
    bad(ErrorKind::layout, name, t, "has rows that overlap or run backwards; pass numpy.ascontiguousarray of it");
}

uint32_t leading(const Tensor& t) {
  int64_t columns = t.shape[t.ndim - 1];
  int64_t ld = t.shape[t.ndim - 2] > 1 ? t.strides[t.ndim - 2] : columns;
  if (ld > UINT32_MAX) bad_shape("a leading dimension of " + std::to_string(ld) + " elements; the limit is 2^32 - 1");
  return static_cast<uint32_t>(ld);
}

// Between the matrices of a batch; 0 for an operand that all share.
uint32_t batch_stride(const Tensor& t) {
  if (t.ndim == 2 || t.shape[0] == 1) return 0;
  if (t.strides[0] > UINT32_MAX) bad_shape("a batch stride of " + std::to_string(t.strides[0]) + " elements; the limit is 2^32 - 1");
  return static_cast<uint32_t>(t.strides[0]);
}

// Of the first element within its vector of 8, in elements.
uint32_t vec_offset(const Tensor& t) { return static_cast<uint32_t>(t.address() / t.dtype.size % 8); }

int64_t batch_of(const Tensor& t) { return t.ndim == 3 ? t.shape[0] : 1; }

bool overlap(const Extent& x, const Extent& y) { return x.begin < y.end && y.begin < x.end; }

uint32_t group_shift(const Storage& s) {
  uint32_t shift = 0;
  while (s.group >> shift > 1) shift++;
  return shift;
}

void check_extent(const char* name, const Tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; i++) last += (t.shape[i] - 1) * t.strides[i];
  if (last >= int64_t{UINT32_MAX})
    bad_shape(std::string(name) + " " + t.shape_text() + " spans " + std::to_string(last + 1) +
              " elements; kernels count in 32 bits, so the limit is 2^32 - 1");
}

MatmulSpec spec_of(const MatmulArgs& args) {
  const Tensor &a = *args.a, &b = *args.b;
  int64_t a_rows = a.shape[a.ndim - 2], a_cols = a.shape[a.ndim - 1];
  const QuantizedB& q = args.quantized;
  bool is_dense = q.storage.is_dense();
  int64_t b_rows = is_dense ? b.shape[b.ndim - 2] : q.n, b_cols = is_dense ? b.shape[b.ndim - 1] : q.k;
  int64_t m = args.transpose_a ? a_cols : a_rows, k = args.transpose_a ? a_rows : a_cols;
  int64_t kb = args.transpose_b ? b_cols : b_rows, n = args.transpose_b ? b_rows : b_cols;
  auto flag = [](bool f) { return f ? "True" : "False"; };
  if (k != kb) {
    std::string of_b = is_dense ? b.shape_text() : q.storage.name() + " (" + std::to_string(q.n) + ", " + std::to_string(q.k) + ")";
    bad_shape("a " + a.shape_text() + " and b " + of_b + " differ in k: " + std::to_string(k) + " and " + std::to_string(kb) +
              " (transpose_a=" + flag(args.transpose_a) + ", transpose_b=" + flag(args.transpose_b) +
              (is_dense && n == k ? std::string("); b would fit with transpose_b=") + flag(!args.transpose_b) : ")"));
  }
  int64_t batch = batch_of(a);
  if (is_dense && b.ndim == 3 && a.ndim == 2)
    bad_shape("b " + b.shape_text() + " has a batch and a " + a.shape_text() + " has none; give a 3 dimensions too");
  if (is_dense && b.ndim == 3 && b.shape[0] != batch)
    bad_shape("a " + a.shape_text() + " and b " + b.shape_text() + " differ in batch: " + std::to_string(batch) + " and " +
              std::to_string(b.shape[0]));
  for (int64_t size : {m, n, k, batch})
    if (size > UINT32_MAX) bad_shape("a size of " + std::to_string(size) + "; the limit is 2^32 - 1");
  MatmulSpec s;
  s.m = static_cast<uint32_t>(m), s.n = static_cast<uint32_t>(n), s.k = static_cast<uint32_t>(k), s.batch = static_cast<uint32_t>(batch);
  s.transpose_a = args.transpose_a, s.transpose_b = args.transpose_b;
  s.a_type = a.dtype, s.b_storage = q.storage;
  s.alpha = args.alpha, s.beta = args.beta, s.bias = args.bias != nullptr, s.c = args.c != nullptr && args.beta != 0.0f;
  return s;
}

// One of the arrays of a quantized B: C-contiguous, of a shape that its format gives. They are made by QuantizedArray, whose checks a
// user can go round.
void check_part(const char* name, const Tensor& t, const std::vector<uint64_t>& shape, DType type, const char* more = "",
                unsigned alignment = 1) {
  bool fits = static_cast<size_t>(t.ndim) == shape.size() &&
              std::equal(shape.begin(), shape.end(), t.shape, [](uint64_t x, int64_t y) { return x == static_cast<uint64_t>(y); });
  std::string expected;
  for (uint64_t s : shape) expected += (expected.empty() ? "(" : ", ") + std::to_string(s);
  if (!fits) bad(ErrorKind::shape, name, t, "does not fit; it takes " + expected + ")");
  if (t.dtype != type) bad(ErrorKind::dtype, name, t, "is " + t.dtype.name() + "; it takes " + type.name() + more);
  if (!t.contiguous()) bad(ErrorKind::layout, name, t, "is not C-contiguous; pass numpy.ascontiguousarray of it");
  if (t.address() % alignment) bad(ErrorKind::layout, name, t, "is not aligned to " + std::to_string(alignment) + " bytes");
}

void check_quantized(const MatmulArgs& args) {
  const QuantizedB& q = args.quantized;
  if (q.n < 1 || q.k < 1 || q.n > UINT32_MAX || q.k > UINT32_MAX)
    bad_shape("b is " + q.storage.name() + " (" + std::to_string(q.n) + ", " + std::to_string(q.k) + "); sizes are 1 to 2^32 - 1");
  auto n = static_cast<uint64_t>(q.n), k = static_cast<uint64_t>(q.k);
  DType value = q.storage.value_type();
  if (q.storage.canonical)
    check_part("b's values", *args.b, {(k - 1) / 32 + 1, n, 32 / q.storage.per_byte()}, value);
  else
    check_part("b's values", *args.b, {n, q.storage.row_bytes(k)}, value);
  if (q.storage.value_bytes(n, k) * q.storage.per_byte() > UINT32_MAX)
    bad_shape("b has more than 2^32 - 1 weights; kernels count in 32 bits");
  const char* as_a = q.storage.is_affine() ? ", a's type: convert a, or quantize weights of that type" : "";
  auto check_scales = [&](const char* name, const Tensor& t, uint64_t groups, unsigned each, DType type) {
    std::vector<uint64_t> shape = {q.storage.canonical ? groups : n, q.storage.canonical ? n : groups};
    if (each > 1) shape.push_back(each);
    check_part(name, t, shape, type, as_a, (each & -each) * type.size);  // twelve bytes stand on four
  };
  check_scales("b's scales", *q.scales, q.storage.groups(k), q.storage.scales_each(), q.storage.scale_type(args.a->dtype));
  if (q.biases)
    check_scales("b's biases", *q.biases, q.storage.bias_groups(k), q.storage.biases_each(), q.storage.bias_type(args.a->dtype));
}

void check_bias(const MatmulArgs& args, const MatmulSpec& s) {
  if (!args.bias) return;
  const Tensor& t = *args.bias;
  check_element("bias", t, &s.a_type);
  if (t.ndim != 1 || t.shape[0] != s.n)
    bad(ErrorKind::shape, "bias", t, "does not fit; it takes (" + std::to_string(s.n) + ",), one for each column");
  if (t.shape[0] > 1 && t.strides[0] != 1) bad(ErrorKind::layout, "bias", t, "is not contiguous; pass numpy.ascontiguousarray of it");
}

void check_c(const MatmulArgs& args, const MatmulSpec& s) {
  if (!args.c) {
    if (args.beta != 0.0f) bad_shape("beta is " + std::to_string(args.beta) + " and there is no c; pass c or leave beta at 0");
    return;
  }
  const Tensor& t = *args.c;
  check_operand("c", t, &s.a_type);
  bool batched = t.ndim == 3;
  if (t.shape[t.ndim - 2] != s.m || t.shape[t.ndim - 1] != s.n || (batched && t.shape[0] != s.batch)) {
    bad(ErrorKind::shape, "c", t,
        "does not fit; it takes (" + std::to_string(s.m) + ", " + std::to_string(s.n) + ") or (" + std::to_string(s.batch) + ", " +
            std::to_string(s.m) + ", " + std::to_string(s.n) + ")");
  }
  check_extent("c", t);
}

}  // namespace

void check_sizes(const MatmulSpec& s) {
  if (!s.m || !s.n || !s.k || !s.batch) bad_shape("a size of zero in " + s.text() + "; every size must be at least 1");
  // Kernels step along k in tiles; the end of the last one must still be a 32-bit number.
  if (s.k > UINT32_MAX - 4096) bad_shape("k=" + std::to_string(s.k) + "; the limit is 2^32 - 4097");
  auto check = [&](const char* name, uint64_t x, uint64_t y, uint64_t z) {  // x * y cannot overflow 64 bits
    if (x * y > UINT32_MAX || x * y * z > UINT32_MAX)
      bad_shape(std::string(name) + " of " + s.text() + " has more than 2^32 - 1 elements; kernels count in 32 bits");
  };
  check("a", s.m, s.k, s.batch);
  check("b", s.k, s.n, 1);
  check("out", s.m, s.n, s.batch);
}

MatmulPlan plan_matmul(const MatmulArgs& args) {
  check_operand("a", *args.a);
  const QuantizedB& q = args.quantized;
  bool is_dense = q.storage.is_dense();
  if (is_dense)
    check_operand("b", *args.b, &args.a->dtype);
  else
    check_quantized(args);
  MatmulPlan plan;
  plan.spec = spec_of(args);
  const MatmulSpec& s = plan.spec;
  check_sizes(s);
  check_extent("a", *args.a);
  if (is_dense) check_extent("b", *args.b);
  check_bias(args, s);
  check_c(args, s);
  plan.params = {s.m,
                 s.n,
                 s.k,
                 s.batch,
                 leading(*args.a),
                 is_dense ? leading(*args.b) : static_cast<uint32_t>(q.storage.ld(s.k)),
                 s.c ? leading(*args.c) : 0,
                 s.n,
                 batch_stride(*args.a),
                 is_dense ? batch_stride(*args.b) : 0,
                 s.c ? batch_stride(*args.c) : 0,
                 s.batch > 1 ? s.m * s.n : 0,
                 s.alpha,
                 s.beta,
                 s.bias ? 1u : 0u,
                 s.c ? 1u : 0u,
                 vec_offset(*args.a),
                 is_dense ? vec_offset(*args.b) : static_cast<uint32_t>(args.b->address() % 16),
                 group_shift(q.storage),
                 0xff};
  plan.out_ndim = args.a->ndim;
  int64_t shape[] = {s.batch, s.m, s.n};
  std::copy(plan.out_ndim == 3 ? shape : shape + 1, shape + 3, plan.out_shape);
  return plan;
}

namespace {

// Elements between neighbouring rows, of one row in each of a batch between those; 0 where there is but one.
int64_t between_rows(const Tensor& t) { return t.shape[t.ndim - 2] > 1 ? leading(t) : batch_stride(t); }

// Two results of a fused call: of one array they may be different columns.
void check_apart(const Tensor& x, const Tensor& y) {
  if (!overlap(extent(x), extent(y))) return;
  if (x.address() > y.address()) return check_apart(y, x);
  int64_t ld = between_rows(x), apart = static_cast<int64_t>(y.address() - x.address()) / x.dtype.size;
  bool columns = ld && between_rows(y) == ld && batch_stride(x) % ld == 0 && batch_stride(y) % ld == 0 &&
                 apart % ld >= x.shape[x.ndim - 1] && apart % ld + y.shape[y.ndim - 1] <= ld;
  if (!columns) bad(ErrorKind::layout, "out", x, "and another result overlap; pass memory of their own, or columns of one array");
}

}  // namespace

void check_outs_apart(const std::vector<FusedPart>& parts) {
  for (const FusedPart& part : parts)
    for (const FusedPart& other : parts) {
      if (&part == &other) continue;
      if (!parts[0].plan.spec.swiglu) check_apart(*part.out, *other.out);  // of swiglu there is one
      const QuantizedB& q = other.args.quantized;
      for (const Tensor* t : {other.args.b, other.args.bias, q.scales, q.biases})
        if (t && overlap(extent(*part.out), extent(*t)))
          bad(ErrorKind::layout, "out", *part.out, "overlaps what another B is read from; pass memory of its own");
    }
}

MatmulSpec fuse(const std::vector<FusedPart>& parts, bool swiglu) {
  MatmulSpec s = parts[0].plan.spec;
  for (size_t i = 0; i < parts.size(); i++) {
    const MatmulSpec& other = parts[i].plan.spec;
    if (other.b_storage != s.b_storage)
      throw Error(ErrorKind::dtype, "matmul_fused: the first B is " + s.b_storage.name() + " and another " + other.b_storage.name() +
                                        "; one kernel reads all of them");
    if (other.b_storage.is_dense() && parts[i].args.b->ndim != 2)
      bad(ErrorKind::shape, "b", *parts[i].args.b, "has a batch; those of a fused call are (n, k), for all of a's batch");
    if (other.bias != s.bias) bad_shape("biases are given for some B and not for others; give all or none");
    if (i) s.also_n[i - 1] = other.n;
  }
  if (swiglu && (parts.size() != 2 || s.also_n[0] != s.n)) bad_shape("swiglu takes two B of one n: " + s.text());
  s.swiglu = swiglu;
  return s;
}

void check_out(MatmulPlan& plan, const MatmulArgs& args, const Tensor& out, bool rows_apart) {
  bool same = out.ndim == plan.out_ndim && std::equal(out.shape, out.shape + out.ndim, plan.out_shape);
  if (!same) {
    Tensor expected;
    expected.ndim = plan.out_ndim;
    std::copy(plan.out_shape, plan.out_shape + plan.out_ndim, expected.shape);
    bad(ErrorKind::shape, "out", out, "does not fit; the result is " + expected.shape_text());
  }
  check_element("out", out, &plan.spec.a_type);
  if (!out.contiguous() && !rows_apart) bad(ErrorKind::layout, "out", out, "is not C-contiguous; pass a contiguous array");
  if (rows_apart) check_operand("out", out);
  if (out.buffer->read_only()) bad(ErrorKind::layout, "out", out, "is read-only; pass a writable array");
  if (rows_apart) {
    check_extent("out", out);
    plan.params.ldd = leading(out), plan.params.stride_d = batch_stride(out);
    int64_t matrix = (out.shape[out.ndim - 2] - 1) * int64_t{plan.params.ldd} + out.shape[out.ndim - 1];
    if (plan.spec.batch > 1 && plan.params.stride_d < matrix)
      bad(ErrorKind::layout, "out", out, "has matrices that overlap; pass memory of their own");
  }
  Extent written = extent(out);
  const std::pair<const char*, const Tensor*> inputs[] = {{"a", args.a},
                                                          {"b", args.b},
                                                          {"bias", args.bias},
                                                          {"c", args.c},
                                                          {"b's scales", args.quantized.scales},
                                                          {"b's biases", args.quantized.biases}};
  for (auto& [name, t] : inputs) {
    if (!t) continue;
    Extent read = extent(*t);
    // D = alpha AB + beta D: each element of C is read by the thread that writes it, so the very same array is fine.
    bool same_rows = t == args.c && plan.params.ldc == plan.params.ldd && plan.params.stride_c == plan.params.stride_d;
    bool in_place = (same_rows || (t == args.c && !plan.spec.c)) && read.begin == written.begin && read.end == written.end;
    if (overlap(written, read) && !in_place)
      bad(ErrorKind::layout, "out", out, std::string("overlaps ") + name + "; pass memory of its own");
  }
}

}  // namespace metalmm
