// The functions of cuBLASLt that matmul.cpp calls, each handed on to the library, which the first
// call loads. This file is linked in place of the library.
#include <cublasLt.h>

#include "runtime/cuda/library.h"

namespace {

#define SHARDRUN_TEXT(x) #x
#define SHARDRUN_FILE(major) "libcublasLt.so." SHARDRUN_TEXT(major)

template <typename Function>
Function* find(Function*, const char* name) {
  static const shardrun::cuda::Library library(SHARDRUN_FILE(CUBLAS_VER_MAJOR));
  return reinterpret_cast<Function*>(library.function(name));
}

}  // namespace

// The arguments' names in brackets, as they are handed on.
#define SHARDRUN_HAND_ON(name, arguments)            \
  {                                                  \
    static const auto function = find(&name, #name); \
    return function arguments;                       \
  }

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) SHARDRUN_HAND_ON(cublasLtCreate, (handle))

    cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
        SHARDRUN_HAND_ON(cublasLtDestroy, (handle))

            size_t cublasLtGetVersion() SHARDRUN_HAND_ON(cublasLtGetVersion, ())

                const char* cublasLtGetStatusString(cublasStatus_t status)
                    SHARDRUN_HAND_ON(cublasLtGetStatusString, (status))

                        cublasStatus_t
    cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                               uint64_t columns, int64_t ld)
        SHARDRUN_HAND_ON(cublasLtMatrixLayoutCreate, (layout, type, rows, columns, ld))

            cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
                SHARDRUN_HAND_ON(cublasLtMatrixLayoutDestroy, (layout))

                    cublasStatus_t
    cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                             cudaDataType_t scale)
        SHARDRUN_HAND_ON(cublasLtMatmulDescCreate, (desc, compute, scale))

            cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
                SHARDRUN_HAND_ON(cublasLtMatmulDescDestroy, (desc))

                    cublasStatus_t
    cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                   cublasLtMatmulDescAttributes_t attribute, const void* value,
                                   size_t bytes)
        SHARDRUN_HAND_ON(cublasLtMatmulDescSetAttribute, (desc, attribute, value, bytes))

            cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference)
                SHARDRUN_HAND_ON(cublasLtMatmulPreferenceCreate, (preference))

                    cublasStatus_t
    cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
        SHARDRUN_HAND_ON(cublasLtMatmulPreferenceDestroy, (preference))

            cublasStatus_t
    cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                         cublasLtMatmulPreferenceAttributes_t attribute,
                                         const void* value, size_t bytes)
        SHARDRUN_HAND_ON(cublasLtMatmulPreferenceSetAttribute,
                         (preference, attribute, value, bytes))

            cublasStatus_t
    cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                   cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                   cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                   cublasLtMatmulPreference_t preference, int asked,
                                   cublasLtMatmulHeuristicResult_t results[], int* count)
        SHARDRUN_HAND_ON(cublasLtMatmulAlgoGetHeuristic,
                         (handle, desc, a, b, c, d, preference, asked, results, count))

            cublasStatus_t
    cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                   const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                   cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                   cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                   const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                   cudaStream_t stream)
        SHARDRUN_HAND_ON(cublasLtMatmul,
                         (handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d,
                          d_layout, algorithm, workspace, workspace_bytes, stream))
}
