// Sums float32 tensors over their first dimension, all in one kernel on a GPU. The tensors are the gradients that the
// backward of the scan or the convolution leaves per block or row. A 16-bit result is rounded once.
//
// A block computes NUMBERS sums. A lane reads four numbers of a part at once. GROUPS groups of lanes share out the
// parts, and their sums are joined in shared memory. The order is fixed, so two runs agree to the bit. To check a
// change:
// python -m pytest tests/test_cuda.py tests/test_ptx.py -k sums

#include "lanes.h"

#define TENSORS 5                                      // the most tensors per launch
#define GROUPS (THREADS / (NUMBERS / 4))

enum { FLOAT16 = 2 };                                  // a type besides those of lanes.h

// Mirrored in kernels/build.py.
struct Sum {
    int64_t first, parts, n, columns, type;            // first: first block; columns: `to` is (n / columns, columns)
    const float *source;                               // (parts, n), or with columns (parts, columns, n / columns)
    void *to;                                          // (n,) of `type`
};
struct SumsArgs { Sum of[TENSORS]; };
struct alignas(16) Four { float v[4]; };

MATH void sums(const SumsArgs &a) {
    Sum s = a.of[0];
    #pragma unroll
    for (int i = 1; i < TENSORS; i++)
        if (blockIdx.x >= a.of[i].first) s = a.of[i];
    const int64_t start = (blockIdx.x - s.first) * NUMBERS;
    const int64_t from = start + threadIdx.x % (NUMBERS / 4) * 4, left = s.n - from;
    Four sum = {};
    #pragma unroll 4
    for (int64_t p = threadIdx.x / (NUMBERS / 4); p < s.parts; p += GROUPS) {
        const float *at = s.source + p * s.n + from;
        Four v = {};
        if (s.n % 4 == 0) {
            if (left > 0) v = *(const Four *)at;
        } else {
            #pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < left) v.v[i] = at[i];
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) sum.v[i] += v.v[i];
    }
    ((Four *)SHARED_MEMORY)[threadIdx.x] = sum;
    __syncthreads();  // test: sums barrier
    const int64_t i = start + threadIdx.x;
    if (threadIdx.x >= NUMBERS || i >= s.n) return;
    float total = 0.0f;
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) total += SHARED_MEMORY[group * NUMBERS + threadIdx.x];
    int64_t to = i;
    if (s.columns > 1) {
        const uint32_t rows = (uint32_t)s.n / (uint32_t)s.columns, row = (uint32_t)i % rows;
        to = (int64_t)row * s.columns + (uint32_t)i / rows;
    }
    if (s.type == BFLOAT16) set((bf16 *)s.to + to, total);
    else if (s.type == FLOAT16) set((fp16 *)s.to + to, total);
    else set((float *)s.to + to, total);
}

// NUMBERS: sums per block, BLOCK_SUMS in kernels/build.py
extern "C" {
KERNEL(sums_kernel, 8, SumsArgs, (sums(a)))
__device__ int64_t facts[] = {0, sizeof(SumsArgs), THREADS, 0, 0, THREADS * sizeof(Four)};
}
