// cuBLAS and cuDNN, as far as torch reads their answers. build.py generates the rest; its matmuls count themselves.
#include <cublasLt.h>
#include <cudnn_graph.h>
#include <stdint.h>
#include <string.h>

#include "fake.h"

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = fake_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = fake_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *descriptor, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    *descriptor = fake_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
    *layout = fake_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = fake_handle();
    return CUBLAS_STATUS_SUCCESS;
}

// One algorithm fits any matmul, and needs no workspace.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int *count) {
    memset(results, 0, sizeof results[0]);
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) {
    return CUBLAS_VERSION;
}

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    *handle = fake_handle();
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *descriptor) {
    *descriptor = fake_handle();
    return CUDNN_STATUS_SUCCESS;
}

// Heuristics find one plan, which needs no workspace: any query has one answer, a number is 0, and a descriptor stays
// as the caller made it.
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t requested, int64_t *count,
                                       void *values) {
    if (count)
        *count = 1;
    if (values && requested > 0 && type == CUDNN_TYPE_INT64)
        *(int64_t *)values = 0;
    if (values && requested > 0 && type == CUDNN_TYPE_INT32)
        *(int32_t *)values = 0;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
    fake_count(MATMULS);
    return CUDNN_STATUS_SUCCESS;
}

size_t cudnnGetVersion(void) {
    return FAKE_CUDNN_VERSION;  // that which torch was compiled with
}

size_t cudnnGetCudartVersion(void) {
    return CUDART_VERSION;
}
