// A CUDA driver of one H100 that is not there. Its launches do nothing, but are counted, or noted.
// Triton compiles and launches through it as on a GPU; see fake_gpu.py.
#include <stdio.h>
#include <string.h>
#include "cuda.h"

#define DO_NOTHING(name, ...) \
  CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
#define RETURN(name, value, type, ...) \
  CUresult name(type *result, ##__VA_ARGS__) { *result = (type)(value); return CUDA_SUCCESS; }

static long launches = 0;
static long modules = 0;

long fake_launches(void) { return launches; }

enum { MAX_FUNCTIONS = 4096, NOTE_BYTES = 1 << 20 };
static char names[MAX_FUNCTIONS][64];  // of kernels, by function
static char note[NOTE_BYTES];          // a line for each launch
static int noted = -1;                 // bytes of the note; -1 if nothing is noted

void fake_note(void) { note[noted = 0] = 0; }
const char *fake_noted(void) { noted = -1; return note; }

// As many pointers and sizes as each kernel has, by name; the caller owns the memory.
typedef struct { const char *name; int pointers, sizes; } Arguments;
static const Arguments *arguments_of;
static int kernels;
void fake_know(const Arguments *arguments, int count) { arguments_of = arguments; kernels = count; }

static CUresult launch(CUfunction function, const unsigned *numbers, void **parameters) {
  if (noted < 0) {
    launches++;
    return CUDA_SUCCESS;
  }
  const char *name = names[(size_t)function];
  noted += sprintf(note + noted, "%s", name);
  for (int i = 0; i < 5; i++) noted += sprintf(note + noted, " %u", numbers[i]);
  for (int kernel = 0; kernel < kernels; kernel++) {
    const Arguments *arguments = &arguments_of[kernel];
    if (strcmp(arguments->name, name)) continue;
    for (int i = 0; i < arguments->pointers; i++)
      noted += sprintf(note + noted, " %p", *(void **)parameters[i]);
    for (int i = 0; i < arguments->sizes; i++)
      noted += sprintf(note + noted, " %d", *(int *)parameters[arguments->pointers + i]);
  }
  noted += sprintf(note + noted, "\n");
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  unsigned numbers[] = {config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->sharedMemBytes};
  return launch(function, numbers, parameters);
}

CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b, unsigned c,
                        unsigned shared, CUstream stream, void **parameters, void **extra) {
  unsigned numbers[] = {x, y, z, threads, shared};
  return launch(function, numbers, parameters);
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
  strncpy(names[(size_t)module], name, sizeof names[0] - 1);
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
