// A CUDA driver of one H100 that is not there. Its launches count, and do nothing.
// Triton compiles and launches through it as on a GPU; see fake_gpu.py.
#include "cuda.h"

#define DO_NOTHING(name, ...) \
  CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
#define RETURN(name, value, type, ...) \
  CUresult name(type *result, ##__VA_ARGS__) { *result = (type)(value); return CUDA_SUCCESS; }

static long launches = 0;
static long modules = 0;

long fake_launches(void) { return launches; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  launches++;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 65536;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *result, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)result = pointer;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}

RETURN(cuModuleLoadData, ++modules, CUmodule, const void *image)
RETURN(cuCtxGetCurrent, 1, CUcontext)
RETURN(cuCtxGetDevice, 0, CUdevice)
RETURN(cuCtxGetLimit, 0, size_t, CUlimit limit)
RETURN(cuDeviceGet, 0, CUdevice, int ordinal)
RETURN(cuDeviceGetCount, 1, int)
RETURN(cuDevicePrimaryCtxRetain, 1, CUcontext, CUdevice device)
RETURN(cuDriverGetVersion, 13000, int)
RETURN(cuOccupancyMaxActiveClusters, 1, int, CUfunction function, const CUlaunchConfig *config)
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "none"; return CUDA_SUCCESS; }
DO_NOTHING(cuInit, unsigned flags)
DO_NOTHING(cuCtxSetCurrent, CUcontext context)
DO_NOTHING(cuCtxSetLimit, CUlimit limit, size_t value)
DO_NOTHING(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
DO_NOTHING(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
DO_NOTHING(cuModuleUnload, CUmodule module)
