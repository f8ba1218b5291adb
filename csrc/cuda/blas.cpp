#include "blas.h"

#include <dlfcn.h>

#include <shared_mutex>

#include "../core/error.h"

namespace metalmm::cuda {
namespace {

// cudaDataType_t, cublasComputeType_t
constexpr int kReal32 = 0, kReal16 = 2, kCompute32 = 68;
// cublasLtMatmulDescAttributes_t, cublasLtMatrixLayoutAttribute_t, cublasLtMatmulPreferenceAttributes_t
constexpr int kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8;
constexpr int kBatchCount = 5, kBatchStride = 6;
constexpr int kMaxWorkspace = 1, kReductions = 3, kAlignmentA = 5;
constexpr int kEpilogueBias = 4;
constexpr size_t kMostPlans = 1024;
// Of split sums, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; in place they would be rounded to the result's type.
constexpr uint32_t kSumsInFloat = 2;

const Cublas& cublas(const std::string& path) {
  static std::mutex mutex;
  static auto* loaded = new std::map<std::string, Cublas>;
  std::lock_guard lock(mutex);
  auto it = loaded->find(path);
  if (it != loaded->end()) return it->second;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw Error(ErrorKind::device, "cuBLAS: " + path + " cannot be loaded: " + dlerror());
  Cublas lt;
#define METALMM_FIND(name, symbol, parameters)                            \
  lt.name = reinterpret_cast<decltype(lt.name)>(dlsym(library, #symbol)); \
  if (!lt.name) throw Error(ErrorKind::device, "cuBLAS: " + path + " has no " #symbol);
  METALMM_CUBLAS_FUNCTIONS(METALMM_FIND)
#undef METALMM_FIND
  return loaded->emplace(path, lt).first->second;
}

std::string text_of(int status) {
  const std::map<int, const char*> names = {{1, "NOT_INITIALIZED"}, {3, "ALLOC_FAILED"},   {7, "INVALID_VALUE"},
                                            {8, "ARCH_MISMATCH"},   {11, "MAPPING_ERROR"}, {13, "EXECUTION_FAILED"},
                                            {14, "INTERNAL_ERROR"}, {15, "NOT_SUPPORTED"}};
  auto it = names.find(status);
  return it == names.end() ? "status " + std::to_string(status) : std::string("CUBLAS_STATUS_") + it->second;
}

void check(int status, const std::string& doing) {
  if (status) throw Error(ErrorKind::device, "cuBLAS: " + doing + ": " + text_of(status));
}

// cuBLAS's own end, when the process exits, does not wait for threads that are in it. Never destroyed: they may be here yet.
struct Door {
  std::shared_mutex mutex;
  bool closed = false;
  uint32_t generation = fork_generation();
  bool is_here() const { return generation == fork_generation(); }  // else a parent's, with locks of threads that are not in this process
};
Door& door() {
  static Door* d = new Door;
  return *d;
}

std::shared_lock<std::shared_mutex> enter() {
  std::shared_lock lock(door().mutex);
  if (door().closed) throw Error(ErrorKind::closed, "cuBLAS: the process ends");
  return lock;
}

}  // namespace

void end_blas() {
  if (!door().is_here()) return;
  std::unique_lock lock(door().mutex);
  door().closed = true;
}

// What cuBLAS was told of one size, and what it chose. Its matrices have columns one after another: what is m x n here is n x m there, and
// the product is op(b)' op(a)'.
struct BlasMatmul::Plan {
  const Cublas& lt;
  LtDescription* description = nullptr;
  LtLayout *a = nullptr, *b = nullptr, *c = nullptr, *d = nullptr;
  LtHeuristic chosen{};

  explicit Plan(const Cublas& lt) : lt(lt) {}
  ~Plan() {
    for (LtLayout* layout : {a, b, c, d})
      if (layout) lt.layout_destroy(layout);
    if (description) lt.description_destroy(description);
  }
  template <class T>
  void describe(int attribute, T value) {
    check(lt.description_set(description, attribute, &value, sizeof(value)), "describing a matmul");
  }
  LtLayout* layout(int type, uint64_t rows, uint64_t columns, uint32_t ld, uint32_t batch, int64_t stride) {
    LtLayout* made = nullptr;
    check(lt.layout_create(&made, type, columns, rows, ld), "describing a matrix");
    auto count = static_cast<int32_t>(batch);
    int status = lt.layout_set(made, kBatchCount, &count, sizeof(count));
    if (!status) status = lt.layout_set(made, kBatchStride, &stride, sizeof(stride));
    if (status) lt.layout_destroy(made);
    check(status, "describing a batch");
    return made;
  }
};

BlasMatmul::BlasMatmul(const std::string& library, const LibraryMatmul& what) : what_(what) {
  auto inside = enter();
  lt_ = &cublas(library);
  check(lt_->create(&context_), "starting " + library);
}

BlasMatmul::~BlasMatmul() {
  std::shared_lock<std::shared_mutex> lock;
  if (door().is_here()) lock = std::shared_lock(door().mutex);
  if (lock && !door().closed && context_) {
    plans_.clear();
    lt_->destroy(context_);
  }
  for (auto& [_, plan] : plans_) (void)plan.release();
}

BlasMatmul::Plan& BlasMatmul::plan_for(const MatmulParams& p, const BlasOperands& o) {
  auto alignment = [](Address address) { return static_cast<uint32_t>(std::min<Address>(address & (~address + 1), 256)); };
  Address c = p.has_c ? o.c : o.d;
  // Its A is our B. Of the bias it cannot be told; D's stands for both, for there is a kernel that loads the bias as it stores D.
  const uint32_t aligned[] = {alignment(o.b), alignment(o.a), alignment(c), std::min(alignment(o.d), p.has_bias ? alignment(o.bias) : 256)};
  const Key key = {p.m,        p.n,        p.k,        p.batch,    p.lda,   p.ldb,      p.ldc,      p.ldd,      p.stride_a,
                   p.stride_b, p.stride_c, p.stride_d, p.has_bias, p.has_c, aligned[0], aligned[1], aligned[2], aligned[3]};
  if (auto it = plans_.find(key); it != plans_.end()) return *it->second;
  if (plans_.size() >= kMostPlans) plans_.clear();  // a model's sizes change with each position
  auto made = std::make_unique<Plan>(*lt_);
  int type = what_.type == kFloat32 ? kReal32 : kReal16;
  check(lt_->description_create(&made->description, kCompute32, kReal32), "describing a matmul");
  made->describe<int32_t>(kTransA, what_.transpose_b);
  made->describe<int32_t>(kTransB, what_.transpose_a);
  if (p.has_bias) {
    made->describe<int32_t>(kEpilogue, kEpilogueBias);
    made->describe<Address>(kBiasPointer, o.bias);
  }
  made->a = made->layout(type, what_.transpose_b ? p.n : p.k, what_.transpose_b ? p.k : p.n, p.ldb, p.batch, p.stride_b);
  made->b = made->layout(type, what_.transpose_a ? p.k : p.m, what_.transpose_a ? p.m : p.k, p.lda, p.batch, p.stride_a);
  made->c = made->layout(type, p.m, p.n, p.has_c ? p.ldc : p.ldd, p.batch, p.has_c ? p.stride_c : p.stride_d);
  made->d = made->layout(type, p.m, p.n, p.ldd, p.batch, p.stride_d);
  LtPreference* preference = nullptr;
  check(lt_->preference_create(&preference), "saying what is allowed");
  int status = lt_->preference_set(preference, kMaxWorkspace, &kWorkspace, sizeof(kWorkspace));
  if (!status) status = lt_->preference_set(preference, kReductions, &kSumsInFloat, sizeof(kSumsInFloat));
  for (int i = 0; i < 4 && !status; i++) status = lt_->preference_set(preference, kAlignmentA + i, &aligned[i], sizeof(aligned[i]));
  int found = 0;
  if (!status)
    status = lt_->heuristic(context_, made->description, made->a, made->b, made->c, made->d, preference, 1, &made->chosen, &found);
  lt_->preference_destroy(preference);
  std::string size = std::to_string(p.m) + " x " + std::to_string(p.n) + " x " + std::to_string(p.k);
  if (!status && found) status = made->chosen.status;
  if (status == 15 || (!status && !found)) throw Error(ErrorKind::unsupported, "cuBLAS has no way to multiply " + size + " of this layout");
  check(status, "choosing how to multiply " + size);
  return *(plans_[key] = std::move(made));
}

void BlasMatmul::launch(const MatmulParams& p, const BlasOperands& o, Stream stream, Address workspace) {
  auto inside = enter();
  std::lock_guard lock(mutex_);  // the description's bias is this call's
  Plan& plan = plan_for(p, o);
  if (p.has_bias) plan.describe<Address>(kBiasPointer, o.bias);
  auto at = [](Address address) { return reinterpret_cast<void*>(address); };
  check(lt_->matmul(context_, plan.description, &p.alpha, at(o.b), plan.a, at(o.a), plan.b, &p.beta, at(p.has_c ? o.c : o.d), plan.c,
                    at(o.d), plan.d, &plan.chosen.algorithm, at(workspace), kWorkspace, stream),
        "multiplying");
}

}  // namespace metalmm::cuda
