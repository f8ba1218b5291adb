// A cublasLt that multiplies on the CPU, as work of the fake's streams: what csrc/cuda/blas.cpp asks of it, and its rules.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../../csrc/cuda/blas.h"
#include "fake.h"

// What the product looks for has these types.
#define FAKE_DECLARE(name, symbol, parameters) FAKE_EXPORT int symbol parameters;
namespace fake_api {
using namespace metalmm::cuda;
METALMM_CUBLAS_FUNCTIONS(FAKE_DECLARE)
}  // namespace fake_api
#undef FAKE_DECLARE

namespace fake {
#ifdef __clang__
using Half = __fp16;  // clang 14 has no _Float16 on x86
#else
using Half = _Float16;
#endif

namespace {

constexpr int kStatusInvalid = 7, kStatusExecution = 13, kStatusUnsupported = 15;
constexpr size_t kNeeds = 1024;  // bytes to work in, so that somebody has to give them

struct Numbers : Object {  // attributes by number
  explicit Numbers(const char* kind) : Object(kind) {}
  std::map<int, uint64_t> values;
  uint64_t get(int attribute, uint64_t otherwise) const {
    auto it = values.find(attribute);
    return it == values.end() ? otherwise : it->second;
  }
};
struct LayoutState : Numbers {
  LayoutState() : Numbers("LtLayout") {}
  int type = 0;
  uint64_t rows = 0, columns = 0;
  int64_t ld = 0;
  uint64_t batch() const { return get(5, 1); }
  uint64_t stride() const { return get(6, 0); }
  size_t element() const { return type == 2 ? 2 : 4; }
  size_t bytes() const { return ((batch() - 1) * stride() + (columns - 1) * static_cast<uint64_t>(ld) + rows) * element(); }
  bool operator==(const LayoutState& o) const {
    return type == o.type && rows == o.rows && columns == o.columns && ld == o.ld && values == o.values;
  }
};

// cuBLAS ends with the process; who calls it after that has broken it.
std::atomic<bool> ended{false};
void alive() {
  if (ended) std::fprintf(stderr, "fake cuBLAS: called after its end\n"), std::abort();
}

int status_of(const Call& call) { return call.result ? kStatusExecution : 0; }
int invalid(Call& call, const std::string& what) { return call.wrong(kInvalidValue, "cublas", what), kStatusInvalid; }

template <class T>
int destroy_object(const char* name, const void* handle, const char* kind) {
  Call call(name, true, false, false);
  if (call.result) return kStatusExecution;
  if (auto object = find<T>(call, handle, kind)) remove(*object);
  return status_of(call);
}

int set(const char* name, const void* handle, const char* kind, int attribute, const void* value, size_t size,
        const std::map<int, size_t>& known) {
  Call call(name);
  if (call.result) return kStatusExecution;
  auto numbers = find<Numbers>(call, handle, kind);
  if (!numbers) return kStatusInvalid;
  auto it = known.find(attribute);
  if (it == known.end() || it->second != size)
    return invalid(call, "attribute " + std::to_string(attribute) + " of " + number(size) + " bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, value, size);
  numbers->values[attribute] = bits;
  return 0;
}

float load(const uint8_t* p, int type) {
  if (type == 2) {
    Half half;
    std::memcpy(&half, p, 2);
    return static_cast<float>(half);
  }
  float value;
  std::memcpy(&value, p, 4);
  return value;
}
void store(uint8_t* p, int type, float value) {
  if (type == 2) {
    auto half = static_cast<Half>(value);
    std::memcpy(p, &half, 2);
  } else {
    std::memcpy(p, &value, 4);
  }
}

// All that a product is, with pointers of the CPU.
struct Product {
  LayoutState a, b, c, d;
  const uint8_t *at_a, *at_b, *at_c, *bias;
  uint8_t* at_d;
  bool transpose_a, transpose_b;
  float alpha, beta;

  void run() const {
    auto element = [](const uint8_t* p, const LayoutState& l, uint64_t batch, uint64_t row, uint64_t column) {
      return load(p + (batch * l.stride() + column * static_cast<uint64_t>(l.ld) + row) * l.element(), l.type);
    };
    uint64_t depth = transpose_a ? a.rows : a.columns;
    for (uint64_t batch = 0; batch < d.batch(); batch++)
      for (uint64_t j = 0; j < d.columns; j++)
        for (uint64_t i = 0; i < d.rows; i++) {
          float sum = 0;
          for (uint64_t k = 0; k < depth; k++)
            sum += (transpose_a ? element(at_a, a, batch, k, i) : element(at_a, a, batch, i, k)) *
                   (transpose_b ? element(at_b, b, batch, j, k) : element(at_b, b, batch, k, j));
          sum *= alpha;
          if (beta != 0) sum += beta * element(at_c, c, batch, i, j);
          if (bias) sum += load(bias + i * d.element(), d.type);
          store(at_d + (batch * d.stride() + j * static_cast<uint64_t>(d.ld) + i) * d.element(), d.type, sum);
        }
  }
};

// Empty, or why these are no product.
std::string wrong_product(const Numbers& of, const LayoutState& a, const LayoutState& b, const LayoutState& c, const LayoutState& d) {
  bool ta = of.get(3, 0) != 0, tb = of.get(4, 0) != 0;
  uint64_t m = ta ? a.columns : a.rows, k = ta ? a.rows : a.columns, n = tb ? b.rows : b.columns;
  for (auto* l : {&a, &b, &c, &d}) {
    if (l->type != d.type || (l->type != 0 && l->type != 2)) return "types";
    if (l->batch() != d.batch()) return "batches";
    if (l->ld < static_cast<int64_t>(l->rows) || !l->rows || !l->columns) return "a leading dimension of " + std::to_string(l->ld);
  }
  if (k != (tb ? b.columns : b.rows) || m != d.rows || n != d.columns || c.rows != m || c.columns != n) return "sizes";
  return {};
}

}  // namespace

FAKE_EXPORT int cublasLtCreate(LtContext** out) {
  static bool once = (std::atexit([] { ended = true, usleep(50000); }), true);
  (void)once;
  Call call("cublas_create");
  if (call.result) return kStatusExecution;
  *out = reinterpret_cast<LtContext*>(add(std::make_shared<Object>("LtContext"), call.context));
  return 0;
}
FAKE_EXPORT int cublasLtDestroy(LtContext* c) {
  alive();
  Call call("cublas_destroy", true, false, false);
  if (call.result) call.wrong(call.result, "cublas", "after its context was lost");
  auto context = call.result ? nullptr : find(call, c, "LtContext");
  if (context) remove(*context);
  return status_of(call);
}

FAKE_EXPORT int cublasLtMatmulDescCreate(LtDescription** out, int compute, int scale) {
  Call call("cublas_description_create");
  if (call.result) return kStatusExecution;
  if (compute != 68 || scale != 0) return invalid(call, "sums that are not float32");
  *out = reinterpret_cast<LtDescription*>(add(std::make_shared<Numbers>("LtDescription"), call.context));
  return 0;
}
FAKE_EXPORT int cublasLtMatmulDescDestroy(LtDescription* d) {
  return destroy_object<Numbers>("cublas_description_destroy", d, "LtDescription");
}
FAKE_EXPORT int cublasLtMatmulDescSetAttribute(LtDescription* d, int attribute, const void* value, size_t size) {
  int status = set("cublas_description_set", d, "LtDescription", attribute, value, size, {{3, 4}, {4, 4}, {7, 4}, {8, 8}});
  if (attribute == 8) usleep(50);  // so that another thread comes between
  return status;
}

FAKE_EXPORT int cublasLtMatrixLayoutCreate(LtLayout** out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  Call call("cublas_layout_create");
  if (call.result) return kStatusExecution;
  auto layout = std::make_shared<LayoutState>();
  layout->type = type, layout->rows = rows, layout->columns = columns, layout->ld = ld;
  *out = reinterpret_cast<LtLayout*>(add(layout, call.context));
  return 0;
}
FAKE_EXPORT int cublasLtMatrixLayoutDestroy(LtLayout* l) { return destroy_object<LayoutState>("cublas_layout_destroy", l, "LtLayout"); }
FAKE_EXPORT int cublasLtMatrixLayoutSetAttribute(LtLayout* l, int attribute, const void* value, size_t size) {
  return set("cublas_layout_set", l, "LtLayout", attribute, value, size, {{5, 4}, {6, 8}});
}

FAKE_EXPORT int cublasLtMatmulPreferenceCreate(LtPreference** out) {
  Call call("cublas_preference_create");
  if (call.result) return kStatusExecution;
  *out = reinterpret_cast<LtPreference*>(add(std::make_shared<Numbers>("LtPreference"), call.context));
  return 0;
}
FAKE_EXPORT int cublasLtMatmulPreferenceDestroy(LtPreference* p) {
  return destroy_object<Numbers>("cublas_preference_destroy", p, "LtPreference");
}
FAKE_EXPORT int cublasLtMatmulPreferenceSetAttribute(LtPreference* p, int attribute, const void* value, size_t size) {
  return set("cublas_preference_set", p, "LtPreference", attribute, value, size, {{1, 8}, {3, 4}, {5, 4}, {6, 4}, {7, 4}, {8, 4}});
}

// What is chosen remembers for which alignments.
FAKE_EXPORT int cublasLtMatmulAlgoGetHeuristic(LtContext* context, LtDescription* description, LtLayout* la, LtLayout* lb, LtLayout* lc,
                                               LtLayout* ld, LtPreference* preference, int wanted, LtHeuristic* out, int* found) {
  Call call("cublas_heuristic");
  *found = 0;
  if (call.result) return call.result == kNotSupported ? kStatusUnsupported : kStatusExecution;
  auto of = find<Numbers>(call, description, "LtDescription"), allowed = find<Numbers>(call, preference, "LtPreference");
  auto a = find<LayoutState>(call, la, "LtLayout"), b = find<LayoutState>(call, lb, "LtLayout"),
       c = find<LayoutState>(call, lc, "LtLayout"), d = find<LayoutState>(call, ld, "LtLayout");
  if (!find(call, context, "LtContext") || !of || !allowed || !a || !b || !c || !d || wanted < 1) return kStatusInvalid;
  if (std::string wrong = wrong_product(*of, *a, *b, *c, *d); !wrong.empty()) return invalid(call, wrong);
  if (allowed->get(1, 0) < kNeeds) return 0;
  *out = {};
  for (int i = 0; i < 4; i++) out->algorithm.data[i] = allowed->get(5 + i, 256);
  out->workspace = kNeeds;
  *found = 1;
  return 0;
}

FAKE_EXPORT int cublasLtMatmul(LtContext* context, LtDescription* description, const void* alpha, const void* a, LtLayout* la,
                               const void* b, LtLayout* lb, const void* beta, const void* c, LtLayout* lc, void* d, LtLayout* ld,
                               const LtAlgorithm* algorithm, void* workspace, size_t workspace_size, Stream s) {
  alive();
  Call call("cublas_matmul");
  if (call.result) return kStatusExecution;
  auto of = find<Numbers>(call, description, "LtDescription");
  LtLayout* handles[] = {la, lb, lc, ld};
  std::shared_ptr<LayoutState> layouts[4];
  for (int i = 0; i < 4; i++)
    if (!(layouts[i] = find<LayoutState>(call, handles[i], "LtLayout"))) return kStatusInvalid;
  auto stream = find_stream(call, s);
  if (!find(call, context, "LtContext") || !of || !stream) return kStatusInvalid;
  if (std::string wrong = wrong_product(*of, *layouts[0], *layouts[1], *layouts[2], *layouts[3]); !wrong.empty())
    return invalid(call, wrong);
  if (c == d && !(*layouts[2] == *layouts[3])) return invalid(call, "in place, in two layouts");
  Uses uses;
  auto touch = std::make_shared<Touch>();
  touch->name = "a product of cuBLAS";
  touch->programmatic = true;  // as it may be: it lets the next begin before it has waited itself
  auto host = [&](Address address, size_t size, bool written, const char* what) -> uint8_t* {
    auto memory = memory_at(address, size);
    if (!memory || !memory->pages) return invalid(call, std::string(what) + ": " + number(size) + " bytes at " + hex(address)), nullptr;
    uses.push_back(memory);
    (written ? touch->writes : touch->reads).emplace_back(address, address + size);
    return memory->host + (address - memory->address);
  };
  Product p{*layouts[0], *layouts[1], *layouts[2],        *layouts[3],        nullptr, nullptr, nullptr,
            nullptr,     nullptr,     of->get(3, 0) != 0, of->get(4, 0) != 0, 0,       0};
  std::memcpy(&p.alpha, alpha, 4), std::memcpy(&p.beta, beta, 4);
  const void* given[] = {a, b, c, d};
  uint8_t* at[4];
  for (int i = 0; i < 4; i++) {
    auto address = reinterpret_cast<Address>(given[i]);
    if (address % algorithm->data[i]) return invalid(call, hex(address) + ", where it was told of " + number(algorithm->data[i]));
    if (!(at[i] = host(address, layouts[i]->bytes(), i == 3, "an operand"))) return kStatusInvalid;
  }
  p.at_a = at[0], p.at_b = at[1], p.at_c = at[2], p.at_d = at[3];
  if (of->get(7, 1) == 4 && of->get(8, 0) % algorithm->data[3]) return invalid(call, "a bias that is less aligned than D was said to be");
  if (of->get(7, 1) == 4 && !(p.bias = host(of->get(8, 0), p.d.rows * p.d.element(), false, "the bias"))) return kStatusInvalid;
  if (workspace_size < kNeeds || !host(reinterpret_cast<Address>(workspace), workspace_size, true, "memory to work in"))
    return kStatusInvalid;
  push(*stream, {[p] { return p.run(), 0; }, uses, touch});
  return 0;
}

}  // namespace fake
