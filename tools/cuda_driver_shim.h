// The CUDA driver functions that kernels/cuda.py calls. They "load" the kernels included before this file by name, and
// cuda_shim.h runs these on the CPU, so the tests also cover the launch.

#if defined(CONV_WIDTH)
typedef ConvArgs Args;
#elif defined(LOSS_ROOM)
typedef LossArgs Args;
#elif defined(SUMS_TYPE)
typedef SumsArgs Args;
#else
typedef ScanArgs Args;
#endif

extern "C" {
inline int shim_error = 0;                             // the next launch returns this
int shim_fail(int code) { shim_error = code; return 0; }
int cuModuleLoadData(void **module, const char *) { *module = nullptr; return 0; }
int cuModuleGetFunction(void **function, void *, const char *name) {
    const struct { const char *name; void (*kernel)(Args); } all[] = {
#if defined(CONV_WIDTH)
        {"conv_forward_kernel", conv_forward_kernel}, {"conv_backward_kernel", conv_backward_kernel}};
#elif defined(LOSS_ROOM)
        {"loss_kernel", loss_kernel}};
#elif defined(SUMS_TYPE)
        {"sums_kernel", sums_kernel}};
#else
        {"forward_kernel", forward_kernel}, {"forward_whole_kernel", forward_whole_kernel},
        {"backward_kernel", backward_kernel}, {"backward_whole_kernel", backward_whole_kernel},
        {"segment_state_kernel", segment_state_kernel}, {"segment_grad_kernel", segment_grad_kernel},
        {"combine_kernel", combine_kernel}};
#endif
    *function = nullptr;
    for (auto &one : all) if (!strcmp(name, one.name)) *function = (void *)one.kernel;
    return *function ? 0 : 500;
}
int cuModuleGetGlobal_v2(void **at, size_t *bytes, void *, const char *name) {
    *at = facts; *bytes = sizeof facts;
    return strcmp(name, "facts") ? 500 : 0;
}
int cuMemcpyDtoH_v2(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); return 0; }
// an H100 has 227 KB
int cuFuncSetAttribute(void *, int attribute, int bytes) { return attribute == 8 && bytes <= 232448 ? 0 : 1; }
int cuCtxSetCurrent(void *) { return 0; }
// the values of an H100
int cuDeviceGetAttribute(int *value, int attribute, int) { *value = attribute == 97 ? 232448 : 233472; return 0; }
int cuDevicePrimaryCtxRetain(void **, int) { return 0; }
int cuGetErrorString(int, const char **words) {
    *words = shim_words[0] ? shim_words : "message of the driver";
    return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned bytes,
                   void *,
                   void **params, void **) {
    shim_words[0] = 0;                                 // clear the message of an earlier launch; all libraries share it
    if (!x) return 1;                                  // as a driver does: CUDA_ERROR_INVALID_VALUE
    if (shim_error) { const int code = shim_error; shim_error = 0; return code; }
    shim_launch((void (*)(Args))function, dim3(x), threads, bytes, *(const Args *)params[0]);
    return shim_words[0] ? 700 : 0;
}
}
