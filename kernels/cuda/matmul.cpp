// Matrix products by cuBLASLt. kernels/matmul.cpp has checked the arguments and calls it through the
// table. Row-major c = op(a) op(b) is, to a library that counts columns first, c^T = op(b)^T op(a)^T
// over the same memory: b goes first, and nothing is moved.
//
// [Note: one algorithm per shape] The bits of a product are the algorithm's. It is the first that
// the library's heuristic names for (shape, dtypes, transposes, epilogue, alignment up to 16 bytes),
// which depends on the library and the GPU and on nothing that was measured. Sums split over K
// and joined in memory are refused: they round in between, or in any order. A stream keeps what was
// chosen.
#include <cublasLt.h>

#include <algorithm>
#include <compare>
#include <map>
#include <memory>

#include "kernels/arguments.h"
#include "kernels/cuda/bias.h"
#include "kernels/cuda/table.h"

namespace shardrun::cuda {
namespace {

// More is not offered, so that a larger workspace does not choose another algorithm.
constexpr size_t kMostLibraryBytes = size_t{32} << 20;
constexpr size_t kMostSumBytes = size_t{32} << 20;  // nor here
constexpr size_t kVectorBytes = 16;  // the widest access whose alignment a kernel depends on

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw DeviceError("{}: {}", call, cublasLtGetStatusString(status));
}

cudaDataType_t type_of(Dtype dtype) {
  return dtype == Dtype::bf16 ? CUDA_R_16BF : dtype == Dtype::fp16 ? CUDA_R_16F : CUDA_R_32F;
}

uint32_t alignment_of(const void* p) {
  const auto bits = reinterpret_cast<uintptr_t>(p) | kVectorBytes;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// The library's objects, each destroyed by its own call.
template <auto kDestroy>
struct Destroy {
  template <typename T>
  void operator()(T* object) const {
    kDestroy(object);
  }
};
template <typename Handle, auto kDestroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<kDestroy>>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// All that chooses an algorithm.
struct Product {
  int64_t m, n, k;
  int64_t lda;  // between rows of a in memory
  Dtype dtype, c_dtype;
  bool transpose_a, transpose_b, bias, accumulate;
  uint32_t align_a, align_b, align_c, align_bias;
  auto operator<=>(const Product&) const = default;
};

// A product as the library wants it, with the algorithm.
struct Plan {
  Operation operation;
  Layout a, b, c;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace = 0;
};

// Rows of ours are columns of the library's; `ld` elements lie between them.
Layout make_layout(Dtype dtype, int64_t rows, int64_t columns, int64_t ld) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, type_of(dtype), static_cast<uint64_t>(columns),
                                   static_cast<uint64_t>(rows), ld),
        "cublasLtMatrixLayoutCreate");
  return Layout(layout);
}

template <typename T>
void set(const Operation& operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(operation.get(), attribute, &value, sizeof value),
        "cublasLtMatmulDescSetAttribute");
}

template <typename T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
}

Operation make_operation(const Product& p, const void* bias) {
  cublasLtMatmulDesc_t raw = nullptr;
  check(cublasLtMatmulDescCreate(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  Operation operation(raw);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (p.bias) {
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(type_of(p.c_dtype)));
    set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
  return operation;
}

Preference make_preference(const Product& p, size_t workspace) {
  cublasLtMatmulPreference_t raw = nullptr;
  check(cublasLtMatmulPreferenceCreate(&raw), "cublasLtMatmulPreferenceCreate");
  Preference preference(raw);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{workspace});
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.align_b);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.align_a);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.align_c);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.align_c);
  return preference;
}

// The handle and the plans of one stream.
class MatmulState : public LibraryState {
 public:
  MatmulState() {
    cublasLtHandle_t raw = nullptr;
    check(cublasLtCreate(&raw), "cublasLtCreate");
    handle_.reset(raw);
  }

  cublasLtHandle_t handle() const { return handle_.get(); }

  // `bias` only for its alignment, which the key holds.
  const Plan& plan(const Product& product, const void* bias, size_t workspace) {
    const auto found = plans_.find(product);
    if (found != plans_.end()) return found->second;
    return plans_.emplace(product, make(product, bias, workspace)).first->second;
  }

 private:
  Plan make(const Product& p, const void* bias, size_t workspace) const {
    Plan plan;
    plan.operation = make_operation(p, bias);
    plan.a = make_layout(p.dtype, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.lda);
    plan.b =
        p.transpose_b ? make_layout(p.dtype, p.n, p.k, p.k) : make_layout(p.dtype, p.k, p.n, p.n);
    plan.c = make_layout(p.c_dtype, p.m, p.n, p.n);
    const Preference preference = make_preference(p, workspace);
    constexpr int kAsked = 8;
    cublasLtMatmulHeuristicResult_t results[kAsked];
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle(), plan.operation.get(), plan.b.get(), plan.a.get(), plan.c.get(), plan.c.get(),
        preference.get(), kAsked, results, &count);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < count; ++i) {
      if (results[i].state != CUBLAS_STATUS_SUCCESS || results[i].workspaceSize > workspace) {
        continue;
      }
      plan.algorithm = results[i].algo;
      plan.workspace = results[i].workspaceSize;
      return plan;
    }
    throw DeviceError("matmul: cuBLASLt has no algorithm for {} x {} x {} in {} -> {} on this GPU",
                      p.m, p.n, p.k, name_of(p.dtype), name_of(p.c_dtype));
  }

  Owned<cublasLtHandle_t, cublasLtDestroy> handle_;
  std::map<Product, Plan> plans_;
};

MatmulState& state_of(Stream& stream) {
  std::unique_ptr<LibraryState>& state = stream.matmul_state();
  if (!state) state = std::make_unique<MatmulState>();
  return static_cast<MatmulState&>(*state);
}

size_t library_bytes(const Stream& stream) {
  // Half is left for sums that wait for their bias.
  return std::min(kMostLibraryBytes, stream.workspace_bytes() / 2) / 256 * 256;
}

// k >= 1; the bias, if any, has c's dtype.
void multiply(void* c, const void* a, const void* b, const void* bias, Product p, Stream& stream) {
  p.bias = bias != nullptr;
  p.align_a = alignment_of(a);
  p.align_b = alignment_of(b);
  p.align_c = alignment_of(c);
  p.align_bias = alignment_of(bias);
  MatmulState& state = state_of(stream);
  const Plan& plan = state.plan(p, bias, library_bytes(stream));
  if (bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  const float alpha = 1, beta = p.accumulate ? 1 : 0;
  check(cublasLtMatmul(state.handle(), plan.operation.get(), &alpha, b, plan.b.get(), a,
                       plan.a.get(), &beta, c, plan.c.get(), c, plan.c.get(), &plan.algorithm,
                       plan.workspace ? stream.workspace(plan.workspace) : nullptr, plan.workspace,
                       kernels::queue(stream)),
        "cublasLtMatmul");
}

// For a bias whose dtype the library does not add to this c. fp32 sums take it where they are; sums
// that end in 16 bits wait in fp32, as many rows at a time as fit beside the library's workspace.
void multiply_then_add(Tensor c, ConstTensor a, ConstTensor b, ConstTensor bias, Product p,
                       Stream& stream) {
  const StreamHandle queue = kernels::queue(stream);
  if (p.c_dtype == Dtype::fp32) {
    multiply(c.data(), a.data(), b.data(), nullptr, p, stream);
    return add_bias(kernels::out(c), kernels::in(c), kernels::in(bias), p.m, p.n, queue);
  }
  const size_t first = library_bytes(stream), row_bytes = static_cast<size_t>(p.n) * sizeof(float);
  const size_t rest = std::min(kMostSumBytes, stream.workspace_bytes() - first);
  const int64_t at_once = std::clamp<int64_t>(static_cast<int64_t>(rest / row_bytes), 1, p.m);
  char* sums =
      static_cast<char*>(stream.workspace(first + static_cast<size_t>(at_once) * row_bytes)) +
      first;
  Product part = p;
  part.c_dtype = Dtype::fp32;
  for (int64_t row = 0; row < p.m; row += at_once) {
    part.m = std::min(at_once, p.m - row);
    const int64_t skipped = p.transpose_a ? row : row * p.lda;
    multiply(sums,
             static_cast<const char*>(a.data()) + skipped * static_cast<int64_t>(size_of(p.dtype)),
             b.data(), nullptr, part, stream);
    add_bias(kernels::out(c.flat(row * p.n, part.m * p.n)), {sums, Dtype::fp32}, kernels::in(bias),
             part.m, p.n, queue);
  }
}

}  // namespace

std::string matmul_library() {
  const size_t version = cublasLtGetVersion();
  return fmt::format("cuBLASLt-{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void matmul(Tensor c, ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b,
            ConstTensor bias, bool accumulate, Stream& stream) {
  Product p{};
  p.m = c.shape().rows();
  p.n = c.shape().columns();
  p.k = transpose_a ? a.shape().rows() : a.shape().columns();
  p.lda = a.shape().columns();
  p.dtype = a.dtype();
  p.c_dtype = c.dtype();
  p.transpose_a = transpose_a;
  p.transpose_b = transpose_b;
  p.accumulate = accumulate;
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {  // an empty sum, which the library has no layout for
    const In before = accumulate ? kernels::in(c) : In{nullptr, Dtype::fp32};
    return add_bias(kernels::out(c), before, kernels::in(bias), p.m, p.n, kernels::queue(stream));
  }
  if (!bias || bias.dtype() == c.dtype()) {
    return multiply(c.data(), a.data(), b.data(), bias ? bias.data() : nullptr, p, stream);
  }
  multiply_then_add(c, a, b, bias, p, stream);
}

}  // namespace shardrun::cuda
