// Python's MatmulSpec.
#include <cstring>

#include "matmul.h"

namespace metalmm {

namespace {

uint32_t size_of(PyObject* value, const char* name, int64_t otherwise) {
  int64_t size = value ? number<int64_t>(value, ("MatmulSpec: " + std::string(name)).c_str(), ErrorKind::shape) : otherwise;
  if (size < 1 || size > UINT32_MAX)
    throw Error(ErrorKind::shape, "MatmulSpec: a size of " + std::to_string(size) + "; sizes are 1 to 2^32 - 1");
  return static_cast<uint32_t>(size);
}

DType operand_dtype(nb::handle value) {
  nb::object structured;
  DType type = dtype_of(value, &structured);
  if (operand_type(type) == kOperandTypeCount)
    throw Error(ErrorKind::dtype, "MatmulSpec: operands of " + type.name() + "; they are float16, bfloat16 or float32");
  return type;
}

MatmulSpec make_spec(const nb::args& args, const nb::kwargs& kwargs) {
  enum { kM, kN, kK, kBatch, kTa, kTb, kBias, kAlpha, kBeta, kDtype, kStorage, kAlsoN, kSwiglu, kRowInvariant, kCount };
  static const auto* parameters = new Parameters("MatmulSpec",
                                                 {"m", "n", "k", "batch", "transpose_a", "transpose_b", "bias", "alpha", "beta", "dtype",
                                                  "b_storage", "also_n", "swiglu", "row_invariant"},
                                                 3, kCount);
  PyObject* v[kCount];
  parameters->take(args, kwargs, v);
  MatmulSpec s;
  s.m = size_of(v[kM], "m", 1), s.n = size_of(v[kN], "n", 1), s.k = size_of(v[kK], "k", 1), s.batch = size_of(v[kBatch], "batch", 1);
  s.transpose_a = flag(v[kTa], "MatmulSpec: transpose_a", false), s.transpose_b = flag(v[kTb], "MatmulSpec: transpose_b", false);
  s.bias = flag(v[kBias], "MatmulSpec: bias", false);
  s.alpha = static_cast<float>(factor(v[kAlpha], "MatmulSpec: alpha", 1.0));
  s.beta = static_cast<float>(factor(v[kBeta], "MatmulSpec: beta", 0.0));
  s.c = s.beta != 0.0f;
  if (v[kDtype]) s.a_type = operand_dtype(v[kDtype]);
  unsigned others = 0;
  if (v[kAlsoN])
    for_each_size(v[kAlsoN], [&](nb::handle n) {
      if (others == 2) bad_argument("MatmulSpec: also_n is " + repr_of(v[kAlsoN]) + "; a fused operation has two or three matrices B");
      s.also_n[others++] = size_of(n.ptr(), "also_n", 1);
    });
  s.swiglu = flag(v[kSwiglu], "MatmulSpec: swiglu", false);
  s.row_invariant = flag(v[kRowInvariant], "MatmulSpec: row_invariant", false);
  if (others && (s.c || s.alpha != 1.0f)) bad_argument("MatmulSpec: a fused operation has no alpha and beta");
  if (others && !flag(v[kTb], "MatmulSpec: transpose_b", true))
    bad_argument("MatmulSpec: transpose_b is False; the matrices B of a fused operation are n rows of k");
  if (others) s.transpose_b = true;
  if (s.swiglu && (others != 1 || s.also_n[0] != s.n)) bad_argument("MatmulSpec: swiglu takes two matrices B of one n");
  if (v[kStorage]) {
    std::string name = PyUnicode_Check(v[kStorage]) ? text_of(v[kStorage]) : repr_of(v[kStorage]);
    auto storage = Storage::parse(name);
    if (!storage)
      bad_argument("MatmulSpec: b_storage is " + name + "; it takes 'dense', or for example 'q8_0', 'affine4:32', 'q4_0:canonical'");
    s.b_storage = *storage;
    if (!s.b_storage.is_dense()) {
      if (!flag(v[kTb], "MatmulSpec: transpose_b", true))
        bad_argument("MatmulSpec: transpose_b is False; a quantized B is n rows of k weights");
      s.transpose_b = true;
    }
  }
  for (unsigned i = 0; i < s.parts(); i++) {
    MatmulSpec one = s;
    one.n = s.part_n(i), one.also_n[0] = one.also_n[1] = 0;
    check_sizes(one);
  }
  return s;
}

nb::tuple also_n_of(const MatmulSpec& s) {
  nb::list sizes;
  for (unsigned i = 1; i < s.parts(); i++) sizes.append(s.part_n(i));
  return nb::tuple(sizes);
}

// What MatmulSpec(*…) makes the same one of.
nb::tuple arguments_of(const MatmulSpec& s) {
  return nb::make_tuple(s.m, s.n, s.k, s.batch, s.transpose_a, s.transpose_b, s.bias, s.alpha, s.beta, s.a_type.name(), s.b_storage.name(),
                        also_n_of(s), s.swiglu, s.row_invariant);
}

// The same for equal ones; NaN is equal to itself, and the zeros to one another.
auto key_of(const MatmulSpec& s) {
  auto bits = [](float x) {
    uint32_t b;
    std::memcpy(&b, &x, sizeof(b));
    return x == 0 ? 0 : b;
  };
  return std::tuple(s.m, s.n, s.k, s.batch, s.layout_index(), s.bias, bits(s.alpha), bits(s.beta), operand_type(s.a_type),
                    s.b_storage.name(), s.also_n[0], s.also_n[1], s.swiglu, s.row_invariant);
}

}  // namespace

void bind_spec(nb::module_& m) {
  nb::class_<MatmulSpec>(
      m, "MatmulSpec",
      "MatmulSpec(m, n, k, batch=1, transpose_a=False, transpose_b=False, bias=False, alpha=1.0, beta=0.0, "
      "dtype='float16', b_storage='dense', also_n=(), swiglu=False, row_invariant=False)\n--\n\n"
      "What a matmul asks for, without its data: sizes, layout, epilogue and the type of its operands.\n\n"
      "beta other than 0 means that beta * c is added. dtype: of A, B, C, bias and the result: float16, bfloat16 or\n"
      "float32, as numpy.dtype() takes it. b_storage: how B lies: 'dense', or as\n"
      "QuantizedArray.storage says. also_n: of matmul_fused, n of the second and third B; swiglu: its activation. Both and a\n"
      "quantized B mean transpose_b. row_invariant: of matmul. Raises ShapeError for a size of zero or an operand of more than 2^32 - 1\n"
      "elements, DTypeError, ArgumentError.")
      .def("__init__",
           [](MatmulSpec* self, const nb::args& args, const nb::kwargs& kwargs) { new (self) MatmulSpec(make_spec(args, kwargs)); })
      .def_ro("m", &MatmulSpec::m, "Rows of A and of the result.")
      .def_ro("n", &MatmulSpec::n, "Columns of B and of the result.")
      .def_ro("k", &MatmulSpec::k, "Columns of A and rows of B.")
      .def_ro("batch", &MatmulSpec::batch, "Matrices in a batch.")
      .def_ro("transpose_a", &MatmulSpec::transpose_a, "Whether A lies as (k, m).")
      .def_ro("transpose_b", &MatmulSpec::transpose_b, "Whether B lies as (n, k).")
      .def_ro("bias", &MatmulSpec::bias, "Whether a bias is added.")
      .def_ro("alpha", &MatmulSpec::alpha, "Factor of A times B.")
      .def_ro("beta", &MatmulSpec::beta, "Factor of C; 0: C is not read.")
      .def_prop_ro(
          "dtype", [](const MatmulSpec& s) { return s.a_type.name(); }, "Of the operands, by NumPy's name.")
      .def_prop_ro(
          "layout", [](const MatmulSpec& s) { return std::string(s.layout()); }, "nn, nt, tn or tt: n as given, t transposed.")
      .def_prop_ro(
          "b_storage", [](const MatmulSpec& s) { return s.b_storage.name(); },
          "How B lies in memory: dense, or quantized as QuantizedArray.storage says.")
      .def_prop_ro("also_n", &also_n_of, "Of a fused operation, n of the second and third B.")
      .def_ro("swiglu", &MatmulSpec::swiglu, "Whether the result is silu(A B0) * (A B1).")
      .def_ro("row_invariant", &MatmulSpec::row_invariant, "Whether a row's bits depend on neither m nor its place.")
      .def_prop_ro("b_bytes", &MatmulSpec::b_bytes, "Of B, of a fused operation of all of them.")
      .def_prop_ro("least_bytes", &MatmulSpec::least_bytes,
                   "The least that must move: A, B and the result, C where beta is not 0, and the bias, each once.")
      .def("__eq__", [](const MatmulSpec& a,
                        nb::handle b) { return nb::isinstance<MatmulSpec>(b) && key_of(a) == key_of(nb::cast<const MatmulSpec&>(b)); })
      .def("__hash__", [](const MatmulSpec& s) { return nb::hash(nb::cast(key_of(s))); })
      .def("__reduce__", [](nb::handle self) { return nb::make_tuple(self.type(), arguments_of(nb::cast<const MatmulSpec&>(self))); })
      .def("__repr__", [](const MatmulSpec& s) { return "MatmulSpec(" + s.text() + ")"; });
}

}  // namespace metalmm
