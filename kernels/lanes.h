// Arithmetic for the native kernels, both for a GPU lane, where a number is a float, and for a CPU vector of LANES
// channels. longhorn_scan.cu, conv_norm.cu, loss.cu and sums.cu include it. Both halves define the same names
// (to_float, reciprocal, maximum, exp_clamped ...), so a formula is written once. No header of PyTorch or CUDA is
// included.
//
// Order: macros, GPU lanes, CPU vectors and tasks, common code. In all these files `test: NAME` at the end of a line
// marks where a test plants a mistake.

#pragma once

#if defined(__CUDACC__) || defined(LONGHORN_SHIM)
#define ON_GPU                                         // LONGHORN_SHIM: the tests run GPU kernels on a CPU
#endif
#ifdef __CUDACC_RTC__                                  // NVRTC has no headers at all
typedef long long int64_t; typedef int int32_t; typedef unsigned int uint32_t; typedef unsigned short uint16_t;
#else
#include <stdint.h>
#include <string.h>
#endif

#define LOG2E 1.44269504f

enum { FLOAT32 = 0, BFLOAT16 = 1 };                    // dtypes of the CPU kernels; a GPU kernel has just one

#ifdef ON_GPU
#define MATH static __device__ __forceinline__
#else
#define MATH static inline __attribute__((always_inline))
#endif

MATH int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#ifdef ON_GPU

// ---------------------------------------------------------------------------------------------------- lanes of a GPU

#ifndef THREADS
#define THREADS 128                                    // lanes of a block
#endif
#define ALL_LANES 0xffffffffu

// Defines a kernel for kernels/cuda.py that runs `body` on the struct `a`. It uses few enough registers for `blocks`
// blocks per multiprocessor.
#define KERNEL(name, blocks, Args, body) \
    __global__ void __launch_bounds__(THREADS, blocks) name(const Args a) { body; }

#ifndef LONGHORN_SHIM
#define SHARED_MEMORY dynamic_shared_memory
extern __shared__ __align__(16) float dynamic_shared_memory[];
MATH uint16_t round_to_bf16(float v) { uint16_t u; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(u) : "f"(v)); return u; }
MATH uint16_t round_to_fp16(float v) { uint16_t u; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(u) : "f"(v)); return u; }
MATH float widen_fp16(uint16_t u) { float v; asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(u)); return v; }
MATH float exp2_fast(float v) { float e; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v)); return e; }    // 2 ulp
// 1 ulp, no slow path
MATH float reciprocal(float v) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
// A predicated store. For `if (active)` nvcc may make two copies of a loop, one for lanes that write and one for the
// other lanes. A warp would run them one after the other.
MATH void store_32(int active, void *p, float v) {
    asm volatile("{ .reg .pred w; setp.ne.s32 w, %0, 0; @w st.global.f32 [%1], %2; }" :: "r"(active), "l"(p),
                 "f"(v) : "memory");
}
MATH void store_16(int active, void *p, uint16_t v) {
    asm volatile("{ .reg .pred w; setp.ne.s32 w, %0, 0; @w st.global.u16 [%1], %2; }" :: "r"(active), "l"(p),
                 "h"(v) : "memory");
}
MATH void store_two(float *shared, float a, float b) {                   // nvcc would make two stores
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"((uint32_t)__cvta_generic_to_shared(shared)), "f"(a),
                 "f"(b) : "memory");
}
MATH uint32_t read_16(const void *p) { uint32_t u; asm("ld.global.nc.u16 %0, [%1];" : "=r"(u) : "l"(p)); return u; }
MATH uint32_t read_32(const void *p) { uint32_t u; asm("ld.global.nc.u32 %0, [%1];" : "=r"(u) : "l"(p)); return u; }
MATH int64_t wide_product(int a, int b) {
    int64_t p;
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(p) : "r"(a), "r"(b));  // test: address
    return p;
}
// Hides a number's origin from nvcc, which otherwise computes dependent values early and keeps them in registers.
MATH int opaque(int n) { asm volatile("" : "+r"(n)); return n; }
// Asynchronous copies from global to shared memory. copy_begin starts a copy, copy_group closes a group of all copies
// since the last group, and copy_wait waits for the lane's own groups. Other lanes see the data after a barrier.
template <int BYTES> MATH void copy_begin(void *shared, const void *global) {
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(global) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(to), "l"(global), "n"(BYTES) : "memory");
}
MATH void copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// waits for all groups except the last LEFT
template <int LEFT> MATH void copy_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
// A select that stays a select. nvcc may turn `if_ ? a : b` into branches, and then guards every shuffle against
// divergence.
MATH float pick(int if_, float a, float b) {
    float v;
    asm("{ .reg .pred p; setp.ne.s32 p, %1, 0; selp.f32 %0, %2, %3, p; }" : "=f"(v) : "r"(if_), "f"(a), "f"(b));
    return v;
}
MATH float maximum(float v, float low) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(v), "f"(low));
    return m;
}
MATH float minimum(float v, float high) {
    float m;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(v), "f"(high));
    return m;
}
#endif

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

MATH float to_float(float v) { return v; }
MATH float to_float(bf16 v) { return __uint_as_float((uint32_t)v.bits << 16); }
MATH float to_float(fp16 v) { return widen_fp16(v.bits); }

// A number read ahead of its use, kept as bits in a whole register: moving half a register costs an instruction.
template <class E> struct Ahead { uint32_t bits; };
MATH Ahead<float> read(const float *p) { return {read_32(p)}; }
MATH Ahead<bf16> read(const bf16 *p) { return {read_16(p)}; }
MATH Ahead<fp16> read(const fp16 *p) { return {read_16(p)}; }
MATH float to_float(Ahead<float> v) { return __uint_as_float(v.bits); }
MATH float to_float(Ahead<bf16> v) { return __uint_as_float(v.bits << 16); }
MATH float to_float(Ahead<fp16> v) { return widen_fp16((uint16_t)v.bits); }

// the bits of v, rounded to the second argument's type
MATH uint32_t rounded(float v, float) { return __float_as_uint(v); }
MATH uint32_t rounded(float v, bf16) { return round_to_bf16(v); }
MATH uint32_t rounded(float v, fp16) { return round_to_fp16(v); }
MATH void set(float *p, float v) { *p = v; }
MATH void set(bf16 *p, float v) { p->bits = round_to_bf16(v); }
MATH void set(fp16 *p, float v) { p->bits = round_to_fp16(v); }
MATH void set_if(int active, float *p, float v) { store_32(active, p, v); }
MATH void set_if(int active, bf16 *p, float v) { store_16(active, p, round_to_bf16(v)); }
MATH void set_if(int active, fp16 *p, float v) { store_16(active, p, round_to_fp16(v)); }
template <bool SOME, class E> MATH void write(bool active, E *p, float v) {     // SOME: `active` depends on the lane
    if constexpr (SOME) set_if(active, p, v);
    else if (active) set(p, v);
}

// 2 a - b, which nvcc would compute with two additions
MATH float twice_less(float a, float b) { return __fmaf_rn(2.0f, a, -b); }
MATH float exp_clamped(float v) { return exp2_fast(minimum(v, 88.0f) * LOG2E); }
MATH float exp_or_inf(float v) { return exp2_fast(v * LOG2E); }          // for uses where 1 / (1 + inf) = 0 is right
// e^-(v + bias), or inf. It takes one fma, so if v and bias cancel, their sum is off by 2^-24 of the bias.
MATH float exp_minus(float v, float bias) { return exp2_fast(__fmaf_rn(v, -LOG2E, -LOG2E * bias)); }
MATH float exp2_clamped(float v) { return exp2_fast(v); }                // 0 below 2^-126
MATH float select_positive(float v, float a, float b) { return v > 0.0f ? a : b; }

// Step t of a row. The stride is in bytes and fits 32 bits, as kernels/launch.py ensures.
template <class E> MATH const E *step_at(const E *row, int t, int stride) {
    return (const E *)((const char *)row + wide_product(t, stride));
}
template <class E> MATH E *step_at(E *row, int t, int stride) { return (E *)((char *)row + wide_product(t, stride)); }

#else

// ------------------------------------------------------------------------------------------------------ CPU vectors
// One lane is one channel: in the scan, only the sums over channels for dk and dq cross lanes.

#include <stdlib.h>
#include <initializer_list>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__) || defined(__aarch64__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2)));
struct bf16 { uint16_t bits; };

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")               // unrolls early enough to keep arrays of vectors in registers
#endif

MATH vec splat(float a) { return a - (vec){}; }
MATH int tail(int64_t D, int64_t c) { return D - c < LANES ? (int)(D - c) : LANES; }     // channels in the group at c

MATH vec widen(hvec h) { return (vec)(__builtin_convertvector(h, uvec) << 16); }
MATH hvec narrow(vec v) {                                              // round to nearest even, NaN stays NaN
    uvec u = (uvec)v;
    uvec rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    uvec nan = (uvec)(v != v);
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), hvec);
}

// v, rounded to the second argument's type
MATH vec rounded(vec v, float) { return v; }
MATH vec rounded(vec v, bf16) { return widen(narrow(v)); }

// At the tail of D, n < LANES: the other lanes are read as 0 and never written.
MATH vec load(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
MATH vec load(const bf16 *p) { hvec v; memcpy(&v, p, sizeof v); return widen(v); }
MATH void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
MATH void store(bf16 *p, vec v) { hvec h = narrow(v); memcpy((void *)p, &h, sizeof h); }
template <class E> MATH vec load(const E *p, int n) {
    if (n == LANES) return load(p);
    E padded[LANES] = {};
    memcpy((void *)padded, p, n * sizeof(E));
    return load(padded);
}
template <class E> MATH void store(E *p, vec v, int n) {
    if (n == LANES) return store(p, v);
    E padded[LANES];
    store(padded, v);
    memcpy((void *)p, padded, n * sizeof(E));
}
// Fetches the cache line at p before it is read or written: rows are too far apart for the CPU's own prefetcher. p may
// lie outside the tensor.
MATH void prefetch(const void *p) { __builtin_prefetch(p); }
MATH float to_float(float a) { return a; }
MATH float to_float(bf16 a) { uint32_t u = (uint32_t)a.bits << 16; float f; memcpy(&f, &u, 4); return f; }

MATH vec maximum(vec v, float low) { return v < low ? splat(low) : v; }       // NaN stays NaN
MATH vec minimum(vec v, float high) { return v > high ? splat(high) : v; }

// e^v to 1 ulp, clamped to [e^-87, e^88] so that neither 0 * inf nor a denormal can arise; NaN stays NaN.
MATH vec exp_clamped(vec v) {
    v = minimum(maximum(v, -87.0f), 88.0f);
    const float magic = 12582912.0f;                                     // 1.5 * 2^23: adding it rounds to an integer
    vec shifted = v * LOG2E + magic;
    vec n = shifted - magic;
    vec r = v - n * 0.693359375f + n * 2.12194440e-4f;                   // ln 2 in two parts: r in [-0.35, 0.35]
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;                     // minimax polynomial of Cephes' expf
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec scale = ((ivec)shifted << 23) + (127 << 23);                    // the low bits of `shifted` hold n
    return p * (vec)scale;
}
MATH vec exp_or_inf(vec v) { return exp_clamped(v); }
MATH vec exp_minus(vec v, vec bias) { return exp_clamped(-(v + bias)); }
MATH vec reciprocal(vec v) { return 1.0f / v; }
MATH vec twice_less(vec a, vec b) { return 2.0f * a - b; }
MATH vec select_positive(vec v, vec a, vec b) { return v > 0.0f ? a : b; }

// 2^v to 1 ulp within [2^-126, 2^127], exactly 1 at 0: Mamba's decay for a step that changes nothing.
MATH vec exp2_clamped(vec v) {
    v = minimum(maximum(v, -126.0f), 127.0f);
    vec shifted = v + 12582912.0f, r = v - (shifted - 12582912.0f);      // as above; r in [-0.5, 0.5], exactly
    vec p = r * 1.5353362e-4f + 1.3398875e-3f;                           // minimax for (2^r - 1) / r: 2e-9 of 2^r
    p = p * r + 9.6184374e-3f;
    p = p * r + 5.5503325e-2f;
    p = p * r + 2.4022648e-1f;
    p = p * r + 6.9314720e-1f;
    p = p * r + 1.0f;
    return p * (vec)(((ivec)shifted << 23) + (127 << 23));
}

// Scratch memory of one task, for `floats` floats. `take` returns pieces that are aligned to 64 bytes.
struct Scratch {
    char *base; size_t used, size;
    Scratch(size_t floats) : used(0), size(floats * 4 + 64 * 16) {
        base = (char *)aligned_alloc(64, (size + 63) / 64 * 64);
    }
    ~Scratch() { free(base); }
    template <class V> V *take(size_t count) {
        V *p = (V *)(base + used);
        used += (count * sizeof(V) + 63) / 64 * 64;
        return p;
    }
};

// Each task owns its outputs, and shared sums are taken in a fixed order, so two runs agree to the bit.
// Calls run(batch row, split, first group, the group after the last).
template <class A, class F> static void for_tasks(const A &a, F run) {
    const int64_t groups = ceil_div(a.D, LANES), tasks = a.B * a.splits;
    #pragma omp parallel for schedule(dynamic, 1) num_threads((int)a.threads)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t split = task % a.splits;
        run(task / a.splits, split, groups * split / a.splits, groups * (split + 1) / a.splits);
    }
}

#endif

template <class V> MATH V sigmoid(V v) { return reciprocal(1.0f + exp_or_inf(-v)); }
