// Runs the CUDA kernels of longhorn_scan.cu on a CPU, one block after another. A block's threads are fibers that switch
// at every barrier and shuffle: fast, and always in the same order. Shared memory starts as NaN, so that reads before
// writes show in the result. If some lanes never reach a barrier or shuffle, the launch ends with an error.
//
// This cannot show speed, coalescing, GPU-specific divergence of a warp's lanes between shuffles, or a missing barrier.
// ptx_shim.h finds missing barriers.
// tests/test_cuda.py includes this file before the kernels, and cuda_driver_shim.h, the driver's functions, after them.

#pragma once
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <deque>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __forceinline__ inline

struct dim3 { unsigned x, y, z; dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };

inline char shim_words[256];                           // the reason why the launch ended early, for example a trap

inline dim3 threadIdx, blockIdx;
inline ucontext_t shim_scheduler, *shim_fiber;
inline unsigned long shim_steps;                       // arrivals at barriers and ends of fibers
inline void shim_leave() { setcontext(&shim_scheduler); }
inline void shim_yield() {
    const dim3 me = threadIdx;
    swapcontext(shim_fiber, &shim_scheduler);
    threadIdx = me;
}
struct ShimBarrier {
    unsigned n, arrived = 0, round = 0;
    ShimBarrier(unsigned n) : n(n) {}
    void wait() {
        const unsigned mine = round;
        shim_steps++;
        if (++arrived == n) { arrived = 0; round++; }
        while (round == mine) shim_yield();
    }
};

inline void shim_trap(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(shim_words, sizeof shim_words, format, values);
    va_end(values);
    shim_leave();
}

struct ShimBlock {
    struct Warp { ShimBarrier barrier{32}; float slots[32]; };
    struct Copy { void *to; const void *from; int bytes; };
    struct Copies { std::vector<Copy> open; std::deque<std::vector<Copy>> groups; };
    ShimBarrier barrier;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<Copies> copies;                        // per thread: started and not awaited
    std::vector<float> shared;
    ShimBlock(unsigned threads, size_t bytes) : barrier(threads), copies(threads), shared((bytes + 3) / 4 + 4) {
        for (unsigned w = 0; w < threads / 32; w++) warps.push_back(std::make_unique<Warp>());
        for (auto &v : shared) v = __builtin_nanf("");
    }
};
inline ShimBlock *shim_block;

inline void __syncthreads() { shim_block->barrier.wait(); }
inline void __syncwarp() { shim_block->warps[threadIdx.x / 32]->barrier.wait(); }

// Asynchronous copies happen only when they are awaited, so reading too early gives NaN or old values.
template <int BYTES> void copy_begin(void *shared, const void *global) {
    if ((uintptr_t)shared % BYTES || (uintptr_t)global % BYTES)
        shim_trap("a copy of %d bytes from %p to %p: not aligned", BYTES, global, shared);
    shim_block->copies[threadIdx.x].open.push_back({shared, global, BYTES});
}
inline void copy_group() {
    auto &mine = shim_block->copies[threadIdx.x];
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
}
template <int LEFT> void copy_wait() {
    auto &groups = shim_block->copies[threadIdx.x].groups;
    for (; groups.size() > LEFT; groups.pop_front())
        for (auto &one : groups.front()) memcpy(one.to, one.from, one.bytes);
}

inline float __shfl_xor_sync(unsigned, float v, int mask) {
    auto &warp = *shim_block->warps[threadIdx.x / 32];
    const unsigned lane = threadIdx.x % 32;
    warp.slots[lane] = v;
    warp.barrier.wait();
    const float other = warp.slots[lane ^ mask];
    warp.barrier.wait();
    return other;
}

inline float __uint_as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float reciprocal(float v) { return 1.0f / v; }
inline uint32_t __float_as_uint(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

inline uint16_t round_to_bf16(float f) {
    uint32_t u = __float_as_uint(f);
    return f != f ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
inline uint16_t round_to_fp16(float f) { _Float16 v = (_Float16)f; uint16_t h; memcpy(&h, &v, 2); return h; }
inline float widen_fp16(uint16_t h) { _Float16 v; memcpy(&v, &h, 2); return (float)v; }
inline float exp2_fast(float v) { return exp2f(v); }
inline float log2_fast(float v) { return log2f(v); }
inline void store_32(int active, void *p, float v) { if (active) memcpy(p, &v, 4); }
inline void store_16(int active, void *p, uint16_t v) { if (active) memcpy(p, &v, 2); }
inline void store_two(float *shared, float a, float b) { shared[0] = a; shared[1] = b; }
inline uint32_t read_16(const void *p) { uint16_t u; memcpy(&u, p, 2); return u; }
inline uint32_t read_32(const void *p) { uint32_t u; memcpy(&u, p, 4); return u; }
inline int64_t wide_product(int a, int b) { return (int64_t)a * b; }
inline int opaque(int n) { return n; }
inline float pick(int if_, float a, float b) { return if_ ? a : b; }
inline float maximum(float v, float low) { return v < low ? low : v; }
inline float minimum(float v, float high) { return v > high ? high : v; }

#define SHARED_MEMORY shim_block->shared.data()

template <class Body> void shim_run_block(unsigned threads, Body body) {
    static Body *current;
    static unsigned running;
    static bool done;
    const size_t stack = 1 << 18;
    static std::vector<char> stacks;                   // zeroed once: 32 MB per block would take most of the time
    stacks.resize(threads * stack);
    std::vector<ucontext_t> fibers(threads);
    std::vector<bool> finished(threads, false);
    current = &body;
    for (unsigned t = 0; t < threads; t++) {
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = stacks.data() + t * stack;
        fibers[t].uc_stack.ss_size = stack;
        fibers[t].uc_link = &shim_scheduler;
        makecontext(&fibers[t], (void (*)()) + [] { (*current)(running); done = true; }, 0);
    }
    for (unsigned left = threads; left > 0;) {
        const unsigned long before = shim_steps;
        for (unsigned t = 0; t < threads; t++) {
            if (finished[t]) continue;
            running = t; done = false; shim_fiber = &fibers[t];
            swapcontext(&shim_scheduler, &fibers[t]);
            if (shim_words[0]) return;
            if (done) { finished[t] = true; left--; shim_steps++; }
        }
        if (shim_steps == before) {
            snprintf(shim_words, sizeof shim_words, "%u of %u threads wait for others that never come", left, threads);
            return;
        }
    }
}

template <class Kernel, class... Args> void shim_launch(Kernel kernel, dim3 grid, unsigned threads, size_t bytes,
                                                        Args... args) {
    shim_words[0] = 0;
    for (unsigned x = 0; x < grid.x && !shim_words[0]; x++) {
        ShimBlock block(threads, bytes);
        shim_block = &block;
        shim_run_block(threads, [=](unsigned t) {
            threadIdx = dim3(t);
            blockIdx = dim3(x);
            kernel(args...);
        });
        for (auto &of_thread : block.copies)
            if (!shim_words[0] && of_thread.open.size() + of_thread.groups.size())
                snprintf(shim_words, sizeof shim_words, "a thread ended before its asynchronous copies");
    }
}
