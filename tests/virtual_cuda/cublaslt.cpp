// cuBLASLt over host memory: what kernels/cuda/matmul.cpp calls, for the tests. It computes when the
// stream gets there, and answers INVALID_VALUE where the library would, or would misbehave: layouts
// that do not fit together, a leading dimension below the rows, memory that is less aligned than the
// heuristic was told, too little workspace, an algorithm made for another product. A reason goes to
// stderr. Beyond the library:
//
//   - the first algorithm of the heuristic is at times one that does not work, as its state says
//   - if reductions over parts of K are allowed, the product is so reduced, and rounded in between
//   - the workspace that was asked for is NaN when all else is done
#include <cublasLt.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels/math/convert.h"
#include "tests/virtual_cuda/runtime.h"

struct cublasLtContext {
  uint64_t alive;
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType_t type;
  int64_t rows, columns, ld;
  bool operator==(const cublasLtMatrixLayoutOpaque_t&) const = default;
};
struct cublasLtMatmulDescOpaque_t {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  int32_t bias_type = -1;
};
struct cublasLtMatmulPreferenceOpaque_t {
  uint64_t workspace = 0;
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignment[4] = {256, 256, 256, 256};  // a, b, c, d
};

namespace {

using shardrun::Bf16;
using shardrun::Fp16;
namespace math = shardrun::math;

constexpr uint64_t kAlive = 0x6d61746d756c2121;
constexpr uint64_t kAlignedWorkspace = 256;

cublasStatus_t invalid(const char* what) {
  std::fprintf(stderr, "virtual cuBLASLt: %s\n", what);
  return CUBLAS_STATUS_INVALID_VALUE;
}

size_t size_of(cudaDataType_t type) {
  return type == CUDA_R_32F ? 4 : 2;
}

float get(const void* data, cudaDataType_t type, int64_t i) {
  if (type == CUDA_R_16BF) return math::widen(static_cast<const Bf16*>(data)[i]);
  if (type == CUDA_R_16F) return math::widen(static_cast<const Fp16*>(data)[i]);
  return static_cast<const float*>(data)[i];
}

void set(void* data, cudaDataType_t type, int64_t i, float x) {
  if (type == CUDA_R_16BF) return math::narrow(x, static_cast<Bf16*>(data)[i]);
  if (type == CUDA_R_16F) return math::narrow(x, static_cast<Fp16*>(data)[i]);
  static_cast<float*>(data)[i] = x;
}

struct Product {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t a, b, c, d;
  int64_t m() const { return d.rows; }
  int64_t n() const { return d.columns; }
  int64_t k() const { return desc.transpose_a == CUBLAS_OP_T ? a.rows : a.columns; }
};

// What an algorithm was made for, without pointers.
struct Algorithm {
  uint64_t product;
  uint64_t workspace;
  uint32_t alignment[4];
  uint32_t parts;  // of K
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

uint64_t fingerprint(const Product& p) {
  uint64_t h = 0xcbf29ce484222325u;
  const auto mix = [&](int64_t x) { h = (h ^ static_cast<uint64_t>(x)) * 0x100000001b3u; };
  for (const auto& layout : {p.a, p.b, p.c, p.d}) {
    for (int64_t x : {int64_t{layout.type}, layout.rows, layout.columns, layout.ld}) mix(x);
  }
  for (int64_t x : {int64_t{p.desc.compute}, int64_t{p.desc.transpose_a},
                    int64_t{p.desc.transpose_b}, int64_t{p.desc.epilogue}}) {
    mix(x);
  }
  return h;
}

cublasStatus_t check(const Product& p) {
  for (const auto& layout : {p.a, p.b, p.c, p.d}) {
    if (layout.rows < 1 || layout.columns < 1) return invalid("an empty matrix");
    if (layout.ld < layout.rows) return invalid("a leading dimension below the rows");
  }
  const bool ta = p.desc.transpose_a == CUBLAS_OP_T, tb = p.desc.transpose_b == CUBLAS_OP_T;
  const int64_t m = ta ? p.a.columns : p.a.rows, n = tb ? p.b.rows : p.b.columns;
  const int64_t k_b = tb ? p.b.columns : p.b.rows;
  if (m != p.m() || n != p.n() || k_b != p.k()) return invalid("shapes that do not fit together");
  if (p.c != p.d) return invalid("c and d have different layouts");
  if (p.desc.compute != CUBLAS_COMPUTE_32F || p.desc.scale != CUDA_R_32F) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (p.a.type != p.b.type || (p.d.type != p.a.type && p.d.type != CUDA_R_32F)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const bool bias = p.desc.epilogue == CUBLASLT_EPILOGUE_BIAS;
  if (bias && p.desc.bias_type != -1 && p.desc.bias_type != p.d.type) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}

// Column by column of d, each a row of sums over the rows of a.
struct Work {
  Product p;
  float alpha, beta;
  const void *a, *b, *c;
  void* d;
  uint32_t parts;

  void operator()() const {
    const int64_t m = p.m(), n = p.n(), k = p.k();
    const bool ta = p.desc.transpose_a == CUBLAS_OP_T, tb = p.desc.transpose_b == CUBLAS_OP_T;
    std::vector<float> wide(static_cast<size_t>(m * k));  // a, its columns one after another
    for (int64_t q = 0; q < k; ++q) {
      for (int64_t i = 0; i < m; ++i) {
        wide[static_cast<size_t>(q * m + i)] =
            get(a, p.a.type, ta ? q + i * p.a.ld : i + q * p.a.ld);
      }
    }
    std::vector<float> sum(static_cast<size_t>(m)), total(static_cast<size_t>(m));
    for (int64_t j = 0; j < n; ++j) {
      std::fill(total.begin(), total.end(), 0.0f);
      for (uint32_t part = 0; part < parts; ++part) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t q = k * part / parts; q < k * (part + 1) / parts; ++q) {
          const float factor = get(b, p.b.type, tb ? j + q * p.b.ld : q + j * p.b.ld);
          const float* column = wide.data() + q * m;
          for (int64_t i = 0; i < m; ++i) sum[static_cast<size_t>(i)] += column[i] * factor;
        }
        for (int64_t i = 0; i < m; ++i)
          add_part(total[static_cast<size_t>(i)], sum[static_cast<size_t>(i)]);
      }
      finish(j, total);
    }
  }

  void add_part(float& total, float sum) const {
    total += sum;
    if (parts == 1) return;
    char rounded[4];
    set(rounded, p.d.type, 0, total);
    total = get(rounded, p.d.type, 0);
  }

  void finish(int64_t j, const std::vector<float>& total) const {
    for (int64_t i = 0; i < p.m(); ++i) {
      float x = alpha * total[static_cast<size_t>(i)];
      if (beta != 0) x += beta * get(c, p.c.type, i + j * p.c.ld);
      if (p.desc.epilogue == CUBLASLT_EPILOGUE_BIAS) x += get(p.desc.bias, p.d.type, i);
      set(d, p.d.type, i + j * p.d.ld, x);
    }
  }
};

// As kernels do: without a stream at once, and over any memory.
cublasStatus_t enqueue(cudaStream_t stream, std::function<void()> work) {
  if (!stream) {
    work();
    return CUBLAS_STATUS_SUCCESS;
  }
  using namespace shardrun::virtual_cuda;
  const cudaError_t error =
      submit(stream, {Kind::library, "cublasLtMatmul", 0, std::move(work), {}});
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

template <typename T>
cublasStatus_t copy_attribute(T& to, const void* value, size_t bytes) {
  if (bytes != sizeof to) return invalid("an attribute of the wrong size");
  std::memcpy(&to, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "the requested functionality is not supported";
    default:
      return "the operation failed";
  }
}

size_t cublasLtGetVersion() {
  return 130100;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext{kAlive};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  if (!handle || handle->alive != kAlive) return invalid("destroys a handle that is none");
  handle->alive = 0;
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  *layout = new cublasLtMatrixLayoutOpaque_t{type, static_cast<int64_t>(rows),
                                             static_cast<int64_t>(cols), ld};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  *desc = new cublasLtMatmulDescOpaque_t{};
  (*desc)->compute = compute;
  (*desc)->scale = scale;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete desc;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return copy_attribute(desc->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return copy_attribute(desc->transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return copy_attribute(desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return copy_attribute(desc->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return copy_attribute(desc->bias_type, value, bytes);
  }
  return invalid("an attribute that is not known here");
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return copy_attribute(preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return copy_attribute(preference->reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return copy_attribute(
          preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value,
          bytes);
  }
  return invalid("an attribute that is not known here");
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* count) {
  *count = 0;
  if (!handle || handle->alive != kAlive) return CUBLAS_STATUS_NOT_INITIALIZED;
  const Product p{*desc, *a, *b, *c, *d};
  const cublasStatus_t status = check(p);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (asked < 1) return invalid("no algorithm is asked for");

  Algorithm algorithm{};
  algorithm.product = fingerprint(p);
  std::memcpy(algorithm.alignment, preference->alignment, sizeof algorithm.alignment);
  algorithm.parts = preference->reductions != CUBLASLT_REDUCTION_SCHEME_NONE && p.k() > 1 ? 2 : 1;
  const uint64_t liked = p.m() % 2 == 0 ? 4096 : 0;
  algorithm.workspace = liked <= preference->workspace ? liked : 0;
  const auto add = [&](cublasStatus_t state) {
    cublasLtMatmulHeuristicResult_t& result = results[(*count)++];
    result = {};
    result.state = state;
    if (state != CUBLAS_STATUS_SUCCESS) return;
    result.workspaceSize = algorithm.workspace;
    std::memcpy(&result.algo, &algorithm, sizeof algorithm);
  };
  if (asked > 1 && algorithm.product % 3 == 0) add(CUBLAS_STATUS_NOT_SUPPORTED);
  add(CUBLAS_STATUS_SUCCESS);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  if (!handle || handle->alive != kAlive) return CUBLAS_STATUS_NOT_INITIALIZED;
  const Product p{*desc, *a_layout, *b_layout, *c_layout, *d_layout};
  const cublasStatus_t status = check(p);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  Algorithm algorithm;
  std::memcpy(&algorithm, algo, sizeof algorithm);
  if (algorithm.product != fingerprint(p)) return invalid("an algorithm for another product");
  const void* operands[] = {a, b, c, d};
  const cudaDataType_t types[] = {p.a.type, p.b.type, p.c.type, p.d.type};
  for (int i = 0; i < 4 && stream; ++i) {
    const std::string wrong = shardrun::virtual_cuda::not_reachable(operands[i], size_of(types[i]));
    if (!wrong.empty()) return invalid(("an operand: " + wrong).c_str());
  }
  for (int i = 0; i < 4; ++i) {
    const auto address = reinterpret_cast<uintptr_t>(operands[i]);
    if (address == 0) return invalid("an operand is null");
    if (address % size_of(types[i]) != 0 || address % algorithm.alignment[i] != 0) {
      return invalid("an operand is aligned less than the heuristic was told");
    }
  }
  if (p.desc.epilogue == CUBLASLT_EPILOGUE_BIAS && !p.desc.bias) return invalid("bias is null");
  if (workspace_bytes < algorithm.workspace || (algorithm.workspace && !workspace) ||
      reinterpret_cast<uintptr_t>(workspace) % kAlignedWorkspace != 0) {
    return invalid("workspace too small or not aligned");
  }
  const Work work{p,
                  *static_cast<const float*>(alpha),
                  *static_cast<const float*>(beta),
                  a,
                  b,
                  c,
                  d,
                  algorithm.parts};
  return enqueue(stream, [work, workspace, bytes = algorithm.workspace] {
    work();
    if (bytes > 0) std::memset(workspace, 0xff, bytes);
  });
}
}
