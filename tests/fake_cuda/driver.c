// libcuda, the driver: Triton and Inductor load and launch kernels through it, and torch's expandable segments map
// memory. build.py generates functions that need only succeed.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

static int context;  // its address stands for every context and module

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = fake_devices();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = fake_attribute(attribute);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) {
    *found = (CUcontext)&context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *found) {
    *found = (CUcontext)&context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)value = pointer;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "error of the fake CUDA";
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    fake_count(DEVICE_WAITS);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    fake_count(STREAM_WAITS);
    return CUDA_SUCCESS;
}

// --- kernels ---

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    *module = (CUmodule)&context;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)&context;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = fake_handle();
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = 0;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        *value = 1024;
    if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS)
        *value = 64;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int block, size_t shared) {
    *count = 2;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    fake_count(TRITON_KERNELS);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    fake_count(TRITON_KERNELS);
    return CUDA_SUCCESS;
}

// --- expandable segments: addresses are reserved, and memory is created and mapped to them ---

typedef struct {
    int device;
    size_t size;
} Piece;

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    *granularity = 2 << 20;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    *start = (CUdeviceptr)fake_reserve(size);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    fake_unreserve((void *)start);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    if (!fake_hold(properties->location.id, size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    Piece *piece = malloc(sizeof *piece);
    *piece = (Piece){properties->location.id, size};
    *handle = (CUmemGenericAllocationHandle)piece;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Piece *piece = (Piece *)handle;
    fake_release(piece->device, piece->size);
    free(piece);
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
