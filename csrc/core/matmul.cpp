#include "matmul.h"

#include <algorithm>

namespace metalmm {
namespace {

std::string shape_text(const Tensor& t) {
  std::string s = "(";
  for (int i = 0; i < t.ndim; i++) s += (i ? ", " : "") + std::to_string(t.shape[i]);
  return s + (t.ndim == 1 ? ",)" : ")");
}

[[noreturn]] void bad_shape(const std::string& what) { throw Error(ErrorKind::shape, "matmul: " + what); }

std::string dtype_text(DTypeCode d) {
  const char* kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  return (d.code < 7 ? kinds[d.code] : "type") + std::to_string(d.bits);
}

[[noreturn]] void bad(ErrorKind kind, const char* name, const Tensor& t, const std::string& what) {
  throw Error(kind, std::string("matmul: ") + name + " " + shape_text(t) + " " + what);
}

void check_element(const char* name, const Tensor& t) {
  if (!(t.dtype == kFloat16))
    bad(ErrorKind::dtype, name, t,
        "is " + dtype_text(t.dtype) + "; only float16 is supported for now: convert with .astype(numpy.float16)");
  if ((reinterpret_cast<uintptr_t>(t.buffer->data()) + t.offset) % 2) bad(ErrorKind::layout, name, t, "is not aligned to 2 bytes");
}

// An operand of 2 or 3 dimensions whose rows are contiguous; any distance between rows and between matrices.
void check_operand(const char* name, const Tensor& t) {
  if (t.ndim != 2 && t.ndim != 3)
    bad(ErrorKind::shape, name, t,
        "has " + std::to_string(t.ndim) + (t.ndim == 1 ? " dimension" : " dimensions") + "; it takes 2, or 3 with a batch");
  for (int i = 0; i < t.ndim; i++)
    if (t.shape[i] == 0) bad(ErrorKind::shape, name, t, "has a dimension of size zero; every size must be at least 1");
  check_element(name, t);
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

uint32_t phase(const Tensor& t) { return static_cast<uint32_t>((reinterpret_cast<uintptr_t>(t.buffer->data()) + t.offset) / 2 % 4); }

int64_t batch_of(const Tensor& t) { return t.ndim == 3 ? t.shape[0] : 1; }

void check_extent(const char* name, const Tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; i++) last += (t.shape[i] - 1) * t.strides[i];
  if (last >= int64_t{UINT32_MAX})
    bad_shape(std::string(name) + " " + shape_text(t) + " spans " + std::to_string(last + 1) +
              " elements; kernels count in 32 bits, so the limit is 2^32 - 1");
}

MatmulSpec spec_of(const MatmulArgs& args) {
  const Tensor &a = *args.a, &b = *args.b;
  int64_t a_rows = a.shape[a.ndim - 2], a_cols = a.shape[a.ndim - 1];
  int64_t b_rows = b.shape[b.ndim - 2], b_cols = b.shape[b.ndim - 1];
  int64_t m = args.transpose_a ? a_cols : a_rows, k = args.transpose_a ? a_rows : a_cols;
  int64_t kb = args.transpose_b ? b_cols : b_rows, n = args.transpose_b ? b_rows : b_cols;
  auto flag = [](bool f) { return f ? "True" : "False"; };
  if (k != kb) {
    bad_shape("a " + shape_text(a) + " and b " + shape_text(b) + " differ in k: " + std::to_string(k) + " and " + std::to_string(kb) +
              " (transpose_a=" + flag(args.transpose_a) + ", transpose_b=" + flag(args.transpose_b) + ")");
  }
  int64_t batch = batch_of(a);
  if (b.ndim == 3 && a.ndim == 2)
    bad_shape("b " + shape_text(b) + " has a batch and a " + shape_text(a) + " has none; give a 3 dimensions too");
  if (b.ndim == 3 && b.shape[0] != batch)
    bad_shape("a " + shape_text(a) + " and b " + shape_text(b) + " differ in batch: " + std::to_string(batch) + " and " +
              std::to_string(b.shape[0]));
  for (int64_t size : {m, n, k, batch})
    if (size > UINT32_MAX) bad_shape("a size of " + std::to_string(size) + "; the limit is 2^32 - 1");
  MatmulSpec s;
  s.m = static_cast<uint32_t>(m), s.n = static_cast<uint32_t>(n), s.k = static_cast<uint32_t>(k), s.batch = static_cast<uint32_t>(batch);
  s.transpose_a = args.transpose_a, s.transpose_b = args.transpose_b;
  s.alpha = args.alpha, s.beta = args.beta, s.bias = args.bias != nullptr, s.c = args.c != nullptr && args.beta != 0.0f;
  return s;
}

void check_bias(const MatmulArgs& args, const MatmulSpec& s) {
  if (!args.bias) return;
  const Tensor& t = *args.bias;
  check_element("bias", t);
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
  check_operand("c", t);
  bool batched = t.ndim == 3;
  if (t.shape[t.ndim - 2] != s.m || t.shape[t.ndim - 1] != s.n || (batched && t.shape[0] != s.batch)) {
    bad(ErrorKind::shape, "c", t,
        "does not fit; it takes (" + std::to_string(s.m) + ", " + std::to_string(s.n) + ") or (" + std::to_string(s.batch) + ", " +
            std::to_string(s.m) + ", " + std::to_string(s.n) + ")");
  }
  check_extent("c", t);
}

// Bytes from the first to the last element.
std::pair<const uint8_t*, const uint8_t*> extent(const Tensor& t) {
  const uint8_t* begin = t.buffer->data() + t.offset;
  int64_t last = 0;
  for (int i = 0; i < t.ndim; i++) last += (t.shape[i] - 1) * t.strides[i];
  return {begin, begin + (last + 1) * t.dtype.bits / 8};
}

}  // namespace

std::string MatmulSpec::text() const {
  std::string s =
      "m=" + std::to_string(m) + " n=" + std::to_string(n) + " k=" + std::to_string(k) + " batch=" + std::to_string(batch) + " " + layout();
  if (bias) s += " bias";
  if (c) s += " beta*c";
  return s;
}

const char* MatmulSpec::layout() const {
  static const char* const names[] = {"nn", "tn", "nt", "tt"};
  return names[layout_index()];
}

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

bool Variant::supports(const MatmulSpec& s) const {
  auto within = [](uint32_t value, const Range& r) { return value >= r.least && value <= r.most; };
  return within(s.m, m) && within(s.n, n) && within(s.k, k) && within(s.batch, batch) && (layouts >> s.layout_index() & 1) &&
         (bias || !s.bias) && (c || !s.c) && (alpha || s.alpha == 1.0f) &&
         (n_values.empty() || std::find(n_values.begin(), n_values.end(), s.n) != n_values.end());
}

unsigned Variant::specialization(const MatmulSpec& s, const MatmulParams& p) const {
  unsigned found = s.layout_index();
  if (specializes == (kTransposeA | kTransposeB)) return found;
  if (s.m % tiling.bm == 0) found |= kAlignM;
  if (tiling.bn && s.n % tiling.bn == 0) found |= kAlignN;
  if (s.k % bk == 0) found |= kAlignK;
  if ((p.lda | p.ldb | p.stride_a | p.stride_b | p.phase_a | p.phase_b) % 4 == 0) found |= kVec4;
  return found & (specializes | kTransposeA | kTransposeB);
}

std::string Variant::lacks(const MatmulSpec& s) const {
  auto range = [](const char* name, uint32_t value, const Range& r) -> std::string {
    if (value >= r.least && value <= r.most) return {};
    std::string limit = r.least == r.most
                            ? std::to_string(r.least)
                            : "in " + std::to_string(r.least) + " to " + (r.most == UINT32_MAX ? "any" : std::to_string(r.most));
    return std::string(name) + "=" + std::to_string(value) + " is not " + limit;
  };
  for (auto& text : {range("m", s.m, m), range("n", s.n, n), range("k", s.k, k), range("batch", s.batch, batch)})
    if (!text.empty()) return text;
  if (!n_values.empty() && std::find(n_values.begin(), n_values.end(), s.n) == n_values.end()) {
    std::string list;
    for (uint32_t v : n_values) list += (list.empty() ? "" : ", ") + std::to_string(v);
    return "n=" + std::to_string(s.n) + " is not one of " + list;
  }
  if (!(layouts >> s.layout_index() & 1)) {
    std::string list;
    for (unsigned i = 0; i < kLayouts; i++) {
      MatmulSpec other;
      other.transpose_a = i & 1, other.transpose_b = i & 2;
      if (layouts >> i & 1) list += (list.empty() ? "" : ", ") + std::string(other.layout());
    }
    return std::string("layout ") + s.layout() + " is not one of " + list;
  }
  if (s.bias && !bias) return "it takes no bias";
  if (s.c && !c) return "it adds no beta*c";
  if (s.alpha != 1.0f && !alpha) return "it takes no alpha";
  return {};
}

MatmulPlan plan_matmul(const MatmulArgs& args) {
  check_operand("a", *args.a);
  check_operand("b", *args.b);
  MatmulPlan plan;
  plan.spec = spec_of(args);
  const MatmulSpec& s = plan.spec;
  check_sizes(s);
  check_extent("a", *args.a);
  check_extent("b", *args.b);
  check_bias(args, s);
  check_c(args, s);
  const Tensor& c = s.c ? *args.c : *args.a;
  uint32_t ldd = s.n;
  plan.params = {s.m,
                 s.n,
                 s.k,
                 s.batch,
                 leading(*args.a),
                 leading(*args.b),
                 s.c ? leading(c) : 0,
                 ldd,
                 batch_stride(*args.a),
                 batch_stride(*args.b),
                 s.c ? batch_stride(c) : 0,
                 s.batch > 1 ? s.m * s.n : 0,
                 s.alpha,
                 s.beta,
                 s.bias ? 1u : 0u,
                 s.c ? 1u : 0u,
                 phase(*args.a),
                 phase(*args.b)};
  plan.out_ndim = args.a->ndim;
  int64_t shape[] = {s.batch, s.m, s.n};
  std::copy(plan.out_ndim == 3 ? shape : shape + 1, shape + 3, plan.out_shape);
  return plan;
}

MatmulParams contiguous_params(const MatmulSpec& s) {
  uint32_t lda = s.transpose_a ? s.m : s.k, ldb = s.transpose_b ? s.k : s.n;
  bool batched = s.batch > 1;
  return {s.m,
          s.n,
          s.k,
          s.batch,
          lda,
          ldb,
          s.c ? s.n : 0,
          s.n,
          batched ? s.m * s.k : 0,
          batched ? s.k * s.n : 0,
          batched && s.c ? s.m * s.n : 0,
          batched ? s.m * s.n : 0,
          s.alpha,
          s.beta,
          s.bias,
          s.c,
          0,
          0};
}

void check_out(const MatmulPlan& plan, const MatmulArgs& args, const Tensor& out) {
  bool same = out.ndim == plan.out_ndim && std::equal(out.shape, out.shape + out.ndim, plan.out_shape);
  if (!same) {
    Tensor expected;
    expected.ndim = plan.out_ndim;
    std::copy(plan.out_shape, plan.out_shape + plan.out_ndim, expected.shape);
    bad(ErrorKind::shape, "out", out, "does not fit; the result is " + shape_text(expected));
  }
  check_element("out", out);
  int64_t stride = 1;
  for (int i = out.ndim - 1; i >= 0; i--) {
    if (out.shape[i] > 1 && out.strides[i] != stride) bad(ErrorKind::layout, "out", out, "is not C-contiguous; pass a contiguous array");
    stride *= out.shape[i];
  }
  if (out.buffer->read_only()) bad(ErrorKind::layout, "out", out, "is read-only; pass a writable array");
  auto [begin, end] = extent(out);
  const std::pair<const char*, const Tensor*> inputs[] = {{"a", args.a}, {"b", args.b}, {"bias", args.bias}, {"c", args.c}};
  for (auto& [name, t] : inputs) {
    if (!t) continue;
    auto [first, last] = extent(*t);
    // D = alpha AB + beta D: each element of C is read by the thread that writes it, so the very same array is fine.
    bool same_rows = t == args.c && plan.params.ldc == plan.params.ldd && plan.params.stride_c == plan.params.stride_d;
    bool in_place = (same_rows || (t == args.c && !plan.spec.c)) && first == begin && last == end;
    if (begin < last && first < end && !in_place)
      bad(ErrorKind::layout, "out", out, std::string("overlaps ") + name + "; pass memory of its own");
  }
}

}  // namespace metalmm
