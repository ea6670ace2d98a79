/* Stand-in for the CuTe DSL's runtime library: hands every launch to a callback.
 *
 * The compiled host function of the DSL calls a small C library to load its module, set kernel
 * attributes and launch.  This file offers the same symbols without any driver: a library handle is
 * the address of a record that keeps the image, a kernel handle is a record that keeps the name, and
 * a launch calls the Python callback with plain C values.  Everything returns 0 (success) unless the
 * callback reports an error.  Symbols that a launch does not need fail loudly with their name.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  const void *image;
} ptxsim_library;
typedef struct {
  const void *image;
  char name[1024];
} ptxsim_kernel;

typedef struct {
  uint32_t grid[3], block[3];
  uint64_t shared_bytes;
  void *stream;
  const uint8_t *attributes; /* 72 bytes each: i32 id at 0, value union at 8 */
  uint32_t attribute_count;
} ptxsim_config;

/* image, kernel name, {grid, block, cluster} as nine words, shared bytes, parameter pointers */
typedef int (*ptxsim_launch_fn)(const void *, const char *, const uint32_t *, uint64_t, void **);
static ptxsim_launch_fn launch_callback = 0;

void ptxsim_set_launch_callback(ptxsim_launch_fn callback) { launch_callback = callback; }

int _cudaLibraryLoadData(void **out, const void *image, void *a, void *b, unsigned n, void *c,
                         void *d, unsigned m) {
  ptxsim_library *library = malloc(sizeof *library);
  (void)a, (void)b, (void)n, (void)c, (void)d, (void)m;
  library->image = image;
  *out = library;
  return 0;
}

int _cudaLibraryUnload(void *library) {
  (void)library; /* kernels may outlive the call order we know of, and a record is 8 bytes */
  return 0;
}

int _cudaLibraryGetKernel(void **out, void *library, const char *name) {
  ptxsim_kernel *kernel = calloc(1, sizeof *kernel);
  kernel->image = ((ptxsim_library *)library)->image;
  strncpy(kernel->name, name, sizeof kernel->name - 1);
  *out = kernel;
  return 0;
}

int _cudaDeviceGetAttribute(int *out, int attribute, int device) {
  (void)device;
  if (attribute != 97) { /* 97: opt-in shared memory of a block */
    fprintf(stderr, "ptxsim: device attribute %d is not known\n", attribute);
    return 1;
  }
  *out = 232448;
  return 0;
}

int _cuKernelGetAttribute(int *out, int attribute, void *kernel, int device) {
  (void)attribute, (void)kernel, (void)device;
  *out = 0; /* static shared bytes: only used to bound the dynamic ones */
  return 0;
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  (void)kernel, (void)attribute, (void)value, (void)device;
  return 0;
}

int _cudaGetDevice(int *out) { return *out = 0; }
int _cudaSetDevice(int device) { return device != 0; }
int _cudaGetDeviceCount(int *out) {
  *out = 1;
  return 0;
}

int _cudaLaunchKernelEx(const ptxsim_config *config, void *kernel, void **params) {
  uint32_t shape[9] = {config->grid[0],  config->grid[1],  config->grid[2],
                       config->block[0], config->block[1], config->block[2], 1, 1, 1};
  const ptxsim_kernel *k = kernel;
  for (uint32_t i = 0; i < config->attribute_count; i++) {
    const uint8_t *attribute = config->attributes + 72 * i;
    int32_t id;
    memcpy(&id, attribute, 4);
    if (id == 4) memcpy(shape + 6, attribute + 8, 12); /* 4: cluster dimensions */
  }
  if (!launch_callback) {
    fprintf(stderr, "ptxsim: a launch of %s outside ptxsim's context\n", k->name);
    return 1;
  }
  return launch_callback(k->image, k->name, shape, config->shared_bytes, params);
}

/* tvm-ffi path: a word per module holds the library once it is loaded. */
int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int),
                                   void (*set_error)(const char *)) {
  void *library = 0;
  int error;
  (void)set_error;
  if (*state) return 0;
  error = init(&library);
  if (!error && load) error = load(&library, 0);
  if (!error) *state = library;
  return error;
}

void cuda_dialect_unload_library_once(void **state) { *state = 0; }
void cuda_dialect_assert_success(int error) {
  if (error) abort();
}
const char *cuda_dialect_get_error_name(int error) {
  return error ? "ptxsim: the launch failed" : "success";
}
void cuda_dialect_print_on_error(int error) {
  if (error) fprintf(stderr, "ptxsim: error %d in a compiled host function\n", error);
}

/* What a launch does not need. */
#define NOT_OFFERED(name)                                         \
  int name(void) {                                                \
    fprintf(stderr, "ptxsim: %s is not offered here\n", #name);   \
    return 1;                                                     \
  }
NOT_OFFERED(_cuDeviceGet)
NOT_OFFERED(_cuTensorMapEncodeTiled)
NOT_OFFERED(_cudaDeviceSynchronize)
NOT_OFFERED(_cudaEventCreate)
NOT_OFFERED(_cudaEventDestroy)
NOT_OFFERED(_cudaEventElapsedTime)
NOT_OFFERED(_cudaEventRecord)
NOT_OFFERED(_cudaFree)
NOT_OFFERED(_cudaFreeAsync)
NOT_OFFERED(_cudaFreeHost)
NOT_OFFERED(_cudaFuncSetAttribute)
NOT_OFFERED(_cudaGraphDestroy)
NOT_OFFERED(_cudaGraphExecDestroy)
NOT_OFFERED(_cudaGraphInstantiate)
NOT_OFFERED(_cudaGraphLaunch)
NOT_OFFERED(_cudaLaunchKernel)
NOT_OFFERED(_cudaLibraryGetGlobal)
NOT_OFFERED(_cudaMalloc)
NOT_OFFERED(_cudaMallocAsync)
NOT_OFFERED(_cudaMallocHost)
NOT_OFFERED(_cudaMallocManaged)
NOT_OFFERED(_cudaMemcpy)
NOT_OFFERED(_cudaMemcpyAsync)
NOT_OFFERED(_cudaMemset)
NOT_OFFERED(_cudaMemsetAsync)
NOT_OFFERED(_cudaOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_OFFERED(_cudaProfilerStart)
NOT_OFFERED(_cudaProfilerStop)
NOT_OFFERED(_cudaStreamAddCallback)
NOT_OFFERED(_cudaStreamBeginCapture)
NOT_OFFERED(_cudaStreamCreate)
NOT_OFFERED(_cudaStreamDestroy)
NOT_OFFERED(_cudaStreamEndCapture)
NOT_OFFERED(_cudaStreamSynchronize)
NOT_OFFERED(_cudaStreamWaitEvent)
