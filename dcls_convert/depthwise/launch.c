// Launch the compiled kernels of a pass by one call from Python; see launching.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>

typedef int (*cu_launch_t)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, unsigned shared, void *stream, void **parameters, void **);
typedef int (*cu_get_context_t)(void **context);
typedef int (*cu_set_context_t)(void *context);
typedef int (*cu_get_device_t)(int *device, int ordinal);
typedef int (*cu_retain_t)(void **context, int device);
static cu_launch_t cu_launch;
static cu_get_context_t cu_get_context;
static cu_set_context_t cu_set_context;
static cu_get_device_t cu_get_device;
static cu_retain_t cu_retain;

static PyObject *data_ptr;  // the name of the method

enum { MAX_TENSORS = 16, MAX_PARAMETERS = 32 };

// A launch, as `launching.packed` writes it. After it come the pointers, as pairs of a tensor's
// number and an offset in bytes, and then the sizes; each is an int64. Kernels take sizes of 32 bits:
// CUDA reads the lower half.
typedef struct {
  uint64_t function;
  uint32_t grid[3];
  uint32_t threads;
  uint32_t shared;
  uint32_t pointers;
  uint32_t sizes;
  uint32_t padding;
} Launch;

static int failed(int error, const char *name) {
  if (error) PyErr_Format(PyExc_RuntimeError, "%s failed: error %d of CUDA's driver", name, error);
  return error;
}

// Autograd's threads may have no context yet.
static int ensure_context(int ordinal) {
  void *context = NULL;
  if (failed(cu_get_context(&context), "cuCtxGetCurrent")) return 1;
  if (context) return 0;
  int device;
  return failed(cu_get_device(&device, ordinal), "cuDeviceGet") ||
         failed(cu_retain(&context, device), "cuDevicePrimaryCtxRetain") ||
         failed(cu_set_context(context), "cuCtxSetCurrent");
}

// run(launches, device, stream, *tensors): the launches are bytes, device and stream are integers.
static PyObject *run(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  char *next;
  Py_ssize_t length;
  if (count < 3 || count - 3 > MAX_TENSORS) {
    PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return NULL;
  }
  if (PyBytes_AsStringAndSize(arguments[0], &next, &length)) return NULL;
  int device = (int)PyLong_AsLong(arguments[1]);
  void *stream = (void *)PyLong_AsUnsignedLongLong(arguments[2]);
  if (PyErr_Occurred() || ensure_context(device)) return NULL;
  uint64_t addresses[MAX_TENSORS];
  for (Py_ssize_t i = 3; i < count; i++) {
    PyObject *address = PyObject_CallMethodNoArgs(arguments[i], data_ptr);
    if (!address) return NULL;
    addresses[i - 3] = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
  }
  if (PyErr_Occurred()) return NULL;
  char *end = next + length;
  int error = 0;
  Py_BEGIN_ALLOW_THREADS;  // a launch waits while the GPU's queue is full
  while (next < end && !error) {
    Launch *launch = (Launch *)next;
    int64_t *value = (int64_t *)(launch + 1);
    uint64_t values[MAX_PARAMETERS] = {0};  // the last ones are Triton's, which stay NULL
    void *parameters[MAX_PARAMETERS];
    unsigned used = 0;
    for (unsigned i = 0; i < launch->pointers; i++, value += 2)
      values[used++] = addresses[value[0]] + value[1];
    for (unsigned i = 0; i < launch->sizes; i++) values[used++] = *value++;
    for (unsigned i = 0; i < MAX_PARAMETERS; i++) parameters[i] = &values[i];
    uint32_t *grid = launch->grid;
    error = cu_launch((void *)launch->function, grid[0], grid[1], grid[2], launch->threads, 1, 1,
                      launch->shared, stream, parameters, NULL);
    next = (char *)value;
  }
  Py_END_ALLOW_THREADS;
  if (failed(error, "cuLaunchKernel")) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"run", (PyCFunction)run, METH_FASTCALL, NULL}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "dcls_convert_launch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_dcls_convert_launch(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver) {
    cu_launch = (cu_launch_t)dlsym(driver, "cuLaunchKernel");
    cu_get_context = (cu_get_context_t)dlsym(driver, "cuCtxGetCurrent");
    cu_set_context = (cu_set_context_t)dlsym(driver, "cuCtxSetCurrent");
    cu_get_device = (cu_get_device_t)dlsym(driver, "cuDeviceGet");
    cu_retain = (cu_retain_t)dlsym(driver, "cuDevicePrimaryCtxRetain");
  }
  if (!cu_launch || !cu_get_context || !cu_set_context || !cu_get_device || !cu_retain) {
    PyErr_SetString(PyExc_ImportError, "CUDA's driver was not found");
    return NULL;
  }
  data_ptr = PyUnicode_InternFromString("data_ptr");
  return data_ptr ? PyModule_Create(&module) : NULL;
}
