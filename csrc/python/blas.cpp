#include "blas.h"

#include <cstring>
#include <map>

#include "../core/matmul.h"
#include "../cpu/cpu_device.h"
#include "array.h"

namespace metalmm {
namespace {

struct Operands {
  const Dispatch& dispatch;
  DType type;
  MatmulParams p;

  Operands(const Dispatch& d, DType type) : dispatch(d), type(type) { std::memcpy(&p, d.bytes[0].data, sizeof(p)); }

  const std::shared_ptr<Buffer>& buffer(uint32_t index) const { return *dispatch.buffers[index].buffer; }  // in index order

  // The operand at a buffer index as a NumPy view of (batch, rows, columns).
  nb::object view(uint32_t index, uint32_t batch, uint32_t rows, uint32_t columns, uint32_t stride, uint32_t ld) const {
    size_t shape[] = {batch, rows, columns};
    int64_t strides[] = {stride, ld, 1};
    // An owner that owns nothing: the views die before this call returns.
    nb::ndarray<nb::numpy> array(buffer(index)->host() + dispatch.buffers[index].offset, 3, shape, nb::none(), strides,
                                 nb::dlpack::dtype{type.kind, static_cast<uint8_t>(type.size * 8), 1});
    return nb::cast(array);
  }
};

// B in float32. Converted once for a device array, for as long as nothing may have written to it.
class Weights {
 public:
  // What of a buffer: offset, batch, rows, columns, their strides.
  using Part = std::array<size_t, 6>;

  nb::object get(const std::shared_ptr<Buffer>& buffer, const Part& part, const nb::object& view) {
    if (!buffer->native() || buffer->mutable_since) return convert(view);
    auto it = converted_.find({buffer.get(), part});
    if (it != converted_.end() && it->second.buffer.lock() == buffer) return it->second.array;
    for (auto old = converted_.begin(); old != converted_.end();) old = old->second.buffer.expired() ? converted_.erase(old) : ++old;
    return (converted_[{buffer.get(), part}] = {buffer, convert(view)}).array;
  }

 private:
  static nb::object convert(const nb::object& view) { return call_python(view.attr("astype"), "float32"); }
  struct Converted {
    std::weak_ptr<Buffer> buffer;
    nb::object array;
  };
  std::map<std::pair<const Buffer*, Part>, Converted> converted_;
};

void multiply(const Dispatch& d, const LibraryMatmul& what) {
  static Weights* weights = new Weights;  // guarded by the GIL
  // No initializer of a static: an import lets go of the GIL, and another thread would wait for its guard with it.
  static nb::object* function = nullptr;
  if (!function) {
    nb::object found = nb::module_::import_("metalmm.blas").attr("matmul");
    if (!function) function = new nb::object(std::move(found));
  }
  Operands o(d, what.type);
  bool transpose_a = what.transpose_a, transpose_b = what.transpose_b;
  const MatmulParams& p = o.p;
  uint32_t b_batch = p.stride_b ? p.batch : 1;
  nb::object a = o.view(kIndexA, p.batch, transpose_a ? p.k : p.m, transpose_a ? p.m : p.k, p.stride_a, p.lda);
  uint32_t rows = transpose_b ? p.n : p.k, columns = transpose_b ? p.k : p.n;
  nb::object b = o.view(kIndexB, b_batch, rows, columns, p.stride_b, p.ldb);
  if (what.type != kFloat32) b = weights->get(o.buffer(kIndexB), {d.buffers[kIndexB].offset, b_batch, rows, columns, p.stride_b, p.ldb}, b);
  nb::object c = p.has_c ? o.view(kIndexC, p.batch, p.m, p.n, p.stride_c, p.ldc) : nb::none();
  nb::object bias = p.has_bias ? o.view(kIndexBias, 1, 1, p.n, 0, p.n) : nb::none();
  nb::object out = o.view(kIndexD, p.batch, p.m, p.n, p.stride_d, p.ldd);
  call_python(*function, a, b, c, bias, out, p.alpha, p.beta, transpose_a, transpose_b);
}

}  // namespace

void add_blas() {
  auto run = [](const Dispatch& d, const LibraryMatmul& what) {
    Gil gil;
    try {
      multiply(d, what);
    } catch (const nb::python_error& e) {
      throw Error(ErrorKind::kernel, (*d.pipeline)->name + ": " + nb::cast<std::string>(nb::str(e.value())));
    }
  };
  cpu::host_libraries()["blas"] = {run, [](DType type) { return type == kFloat16 || type == kFloat32; }};
}

}  // namespace metalmm
