// Times ggml_mul_mat of ggml's CUDA backend and checks its results. peers_ggml.py builds and runs it.
//     ggml_rows TYPE N K M[,M...] [TYPE N K M[,M...]]...
// Multiplies M rows of float32 by N rows of K weights of TYPE. A call includes ggml's rounding of A. Each product is one line of JSON:
// `us` is a call's time in a CUDA graph (median of 9 samples), `bytes` the size of the weights. All calls write the same result.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-cpp.h"
#include "ggml-cuda.h"

using std::runtime_error, std::string, std::to_string;
constexpr size_t kCacheBytes = 256 << 20;  // of all copies: four times an H200's second-level cache
constexpr double kGraphSeconds = 3e-3;     // at least
constexpr int kSamples = 9, kReplays = 10, kChecked = 24;
// Of the root of the summed squares of a dot product's terms. Rounding A to 8 bits gives 0.5% (standard deviation), and 1.4% where a
// type's offset is multiplied apart, as q4_0's. Wrong weights give more than 100%.
constexpr double kTolerance = 0.08;

struct Product {
  ggml_type type;
  int64_t n, k;
  std::vector<int64_t> rows;
  std::vector<char> weights;
  std::vector<float> a;
};

Product parse(const string& type, const string& n, const string& k, const string& rows) {
  Product p{GGML_TYPE_COUNT, std::atoll(n.c_str()), std::atoll(k.c_str()), {}, {}, {}};
  for (int i = 0; i < GGML_TYPE_COUNT; ++i)
    if (ggml_get_type_traits(ggml_type(i))->to_float && type == ggml_type_name(ggml_type(i))) p.type = ggml_type(i);
  if (p.type == GGML_TYPE_COUNT || ggml_quantize_requires_imatrix(p.type)) throw runtime_error(type + ": no type that is measured here");
  std::istringstream list(rows);
  for (string m; std::getline(list, m, ',');) p.rows.push_back(std::atoll(m.c_str()));
  if (p.n < 1 || p.k < 1 || p.rows.empty() || *std::min_element(p.rows.begin(), p.rows.end()) < 1)
    throw runtime_error("n=" + n + " k=" + k + " m=" + rows + ": not all are at least 1");
  if (const int64_t block = ggml_blck_size(p.type); p.k % block)
    throw runtime_error("k=" + k + " is not a multiple of " + to_string(block) + ", the block of " + type);
  return p;
}

void fill(Product& p) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> weights(p.n * p.k);
  p.a.resize(*std::max_element(p.rows.begin(), p.rows.end()) * p.k), p.weights.resize(p.n * ggml_row_size(p.type, p.k));
  for (float& x : p.a) x = normal(random);
  for (float& x : weights) x = normal(random) / 8;
  ggml_quantize_chunk(p.type, weights.data(), p.weights.data(), 0, p.n, p.k, nullptr);
}

void check(const Product& p, int64_t m, const ggml_tensor* result, const string& label) {
  std::vector<float> weights(p.k);
  for (int64_t i = 0; i < kChecked; ++i) {
    const int64_t row = i * (m - 1) / (kChecked - 1), column = i * 7 % kChecked * (p.n - 1) / (kChecked - 1);
    ggml_get_type_traits(p.type)->to_float(&p.weights[column * ggml_row_size(p.type, p.k)], weights.data(), p.k);
    double sum = 0, squares = 0;
    for (int64_t j = 0; j < p.k; ++j) {
      const double term = double(weights[j]) * p.a[row * p.k + j];
      sum += term, squares += term * term;
    }
    float found;
    ggml_backend_tensor_get(result, &found, (row * p.n + column) * sizeof(float), sizeof(float));
    if (!(std::abs(found - sum) <= kTolerance * std::sqrt(squares)))  // NaN is wrong too
      throw runtime_error(label + " is WRONG: " + to_string(found) + " instead of " + to_string(sum) + " in row " + to_string(row));
  }
}

// Seconds of a replay. The difference leaves out what the host does before the first one starts.
double sample(ggml_backend_t backend, ggml_cgraph* graph) {
  const auto seconds = [&](int replays) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < replays; ++i) ggml_backend_graph_compute_async(backend, graph);
    ggml_backend_synchronize(backend);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  return (seconds(kReplays + 1) - seconds(1)) / kReplays;
}

void measure(ggml_backend_t backend, const Product& p) {
  const ggml_context_ptr owner(ggml_init({1 << 30, nullptr, true}));  // descriptions of tensors and graphs: hardly touched
  ggml_context* context = owner.get();
  std::vector<ggml_tensor*> copies(std::clamp<size_t>(kCacheBytes / p.weights.size() + 1, 3, 64));
  for (ggml_tensor*& copy : copies) copy = ggml_new_tensor_2d(context, p.type, p.k, p.n);
  ggml_tensor* a = ggml_new_tensor_2d(context, GGML_TYPE_F32, p.k, p.a.size() / p.k);
  ggml_tensor* result = ggml_new_tensor_2d(context, GGML_TYPE_F32, p.n, p.a.size() / p.k);
  const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(context, backend));
  if (!buffer) throw runtime_error("no memory for " + to_string(copies.size()) + " copies");
  for (ggml_tensor* copy : copies) ggml_backend_tensor_set(copy, p.weights.data(), 0, p.weights.size());
  ggml_backend_tensor_set(a, p.a.data(), 0, p.a.size() * sizeof(float));
  const auto graph_of = [&](int64_t m, size_t calls) {
    ggml_cgraph* graph = ggml_new_graph_custom(context, calls + copies.size() + 1, false);
    ggml_tensor* rows = ggml_new_tensor_2d(context, GGML_TYPE_F32, p.k, m);
    ggml_backend_tensor_alloc(a->buffer, rows, a->data);
    for (size_t i = 0; i < calls; ++i) {
      ggml_build_forward_expand(graph, ggml_mul_mat(context, copies[i % copies.size()], rows));
      ggml_backend_tensor_alloc(result->buffer, ggml_graph_node(graph, -1), result->data);
    }
    if (!ggml_backend_supports_op(backend, ggml_graph_node(graph, 0))) throw runtime_error("ggml's CUDA backend lacks the type");
    sample(backend, graph);  // ggml captures the second replay
    return graph;
  };
  for (const int64_t m : p.rows) {
    size_t calls = copies.size();
    ggml_cgraph* graph = graph_of(m, calls);
    for (double once; (once = sample(backend, graph)) < kGraphSeconds; graph = graph_of(m, calls))
      calls *= 1 + size_t(kGraphSeconds / std::max(once, kGraphSeconds / 50));
    double samples[kSamples];
    for (double& each : samples) each = sample(backend, graph);
    std::sort(samples, samples + kSamples);
    ggml_backend_tensor_memset(result, 0xff, 0, ggml_nbytes(result));  // NaN
    ggml_backend_graph_compute(backend, graph);
    const string label = "\"type\": \"" + string(ggml_type_name(p.type)) + "\", \"m\": " + to_string(m) + ", \"n\": " + to_string(p.n) +
                         ", \"k\": " + to_string(p.k);
    check(p, m, result, label);
    std::printf("{%s, \"us\": %.3f, \"bytes\": %zu}\n", label.c_str(), samples[kSamples / 2] / calls * 1e6, p.weights.size());
    std::fflush(stdout);
  }
}

int main(int count, char** words) try {
  if (count < 5 || count % 4 != 1) throw runtime_error("usage: ggml_rows TYPE N K M[,M...] [TYPE N K M[,M...]]...");
  std::vector<Product> products;
  for (int i = 1; i < count; i += 4) products.push_back(parse(words[i], words[i + 1], words[i + 2], words[i + 3]));
  const ggml_backend_ptr backend(ggml_backend_cuda_init(0));
  if (!backend) throw runtime_error("no CUDA device");
  for (Product& product : products) fill(product), measure(backend.get(), product);
} catch (const std::exception& error) {
  std::fprintf(stderr, "ggml_rows: %s\n", error.what());
  return 1;
}
