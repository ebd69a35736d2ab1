// The native source: the Longhorn scan, and on the CPU the short causal convolution that feeds it and RMSNorm.
//
//   eps_i = 1 / (1 + exp(-(dt_i + bias_i)) + |k|^2)          = beta / (1 + beta |k|^2), Eq. 6
//   S_ij += (eps_i k_j) (x_i - k_j S_ij)                       Eq. 7: decay 1 - eps_i k_j^2, input eps_i x_i k_j
//   y_i   = (sum_j S_ij q_j + D_i x_i) * silu(z_i)             Algorithm 1, Mamba's skip and gate
//
// The surprise: one file, two compilers. A C++ compiler builds the CPU kernels from it (`c++ -x c++`), nvcc builds
// the CUDA kernels from it; native.py does so on first use and calls the plain C interface at the bottom through ctypes.
// No PyTorch header is included, so a build takes seconds and no release of PyTorch breaks it.
//
// Glossary (paper symbol, our name, shape)
//   x_t     x   (B, T, D)   value to remember              S_t      S   N vectors of LANES channels, float32
//   W_b x_t dt  (B, T, D)   logit of the step size beta    eps_t    eps step size of the closed form
//   k_t     k   (B, T, N)   key, shared by all channels    dL/dS_t  G   gradient flowing in from the future
//   q_t     q   (B, T, N)   query, shared by all channels  z        z   (B, T, D) gate
//
// Order: constants, vectors, kernels, C interface. To check a change: python -m pytest tests/test_scan.py

#include <stdint.h>
#include <string.h>

// ---------------------------------------------------------------------------------------------- shared with native.py

// The state is kept every CHUNK steps for the backward, which recomputes what lies between: 4 / 32 = 1/8 byte per
// (token, channel, state element). Dividing by the forget gate instead would lose the gradient at large keys.
#define CHUNK 32

enum { FLOAT32 = 0, BFLOAT16 = 1 };

// Strides count elements; the last dimension of every tensor is contiguous. Absent tensors are null.
struct ScanArgs {
    int64_t B, T, D, N;
    int64_t dtype;                                    // of x, dt, k, q, z, y and their gradients
    int64_t splits, threads;                          // channel groups are split so that every thread has work
    const void *x, *dt, *k, *q, *z;                   // (B, T, D | N)
    int64_t x_b, x_t, dt_b, dt_t, k_b, k_t, q_b, q_t, z_b, z_t;
    const float *skip, *bias, *h0;                    // (D,), (D,), (B, D, N)
    void *y;                                          // (B, T, D) contiguous
    float *hT, *chunks;                               // (B, D, N); (B, ceil(T / CHUNK), N, D)
    // backward only
    const void *dy;                                   // (B, T, D)
    int64_t dy_b, dy_t;
    const float *dhT;                                 // (B, D, N)
    void *dx, *ddt, *dz;                              // (B, T, D) contiguous
    float *dk, *dq;                                   // (splits, B, T, N), to be summed over splits
    float *dskip, *dbias;                             // (B, D), to be summed over the batch
    float *dh0;                                       // (B, D, N)
};

struct ConvArgs {                                     // y_t = silu(bias + sum_i weight_i x_{t - W + 1 + i})
    int64_t B, T, D, W, dtype, silu, splits, threads;
    const void *x;                                    // (B, T, D)
    int64_t x_b, x_t;
    const float *weight, *bias;                       // (D, W), (D,)
    const float *state;                               // (B, W - 1, D): the inputs before the first; null for zeros
    void *y;                                          // (B, T, D) contiguous
    // backward only
    const void *dy;
    int64_t dy_b, dy_t;
    void *dx;                                         // (B, T, D) contiguous
    float *dweight, *dbias;                           // (B, W, D), (B, D), to be summed over the batch
    float *dstate;                                    // (B, W - 1, D)
};

struct NormArgs {                                     // y = x / sqrt(mean(x^2) + eps) * weight, row by row
    int64_t rows, D, tasks, threads, x_dtype, y_dtype;
    const void *x, *dy;                               // (rows, D) contiguous, of x_dtype and y_dtype
    const float *weight;                              // (D,)
    float *rstd;                                      // (rows,), written by the forward, read by the backward
    void *y, *dx;                                     // (rows, D), of y_dtype and x_dtype
    float *dweight;                                   // (tasks, D), to be summed over tasks
    double eps;
};

#if defined(__CUDACC__) || defined(LONGHORN_SHIM)

#ifndef LONGHORN_SHIM                                  // the tests run these kernels on a CPU, see tests/cuda_shim.h
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdio.h>
#define SHARED_MEMORY dynamic_shared_memory
#define LAUNCH(kernel, grid, bytes, stream, ...) do {                                                          \
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes));                  \
    kernel<<<grid, THREADS, bytes, (cudaStream_t)(stream)>>>(__VA_ARGS__); } while (0)
extern __shared__ __align__(16) float dynamic_shared_memory[];
#endif

// -------------------------------------------------------------------------------------------------- CUDA: the scan
// One lane holds P states of one channel in registers; L lanes (a power of two) share a channel when N > P, or when B x D
// is too small to fill the GPU. A block is THREADS lanes, THREADS / L channels of one batch row, and walks all of T.
// k and q go through shared memory as float32, zero beyond N (a zero key leaves a state as it is); x, dt, z, dy are read
// straight from their rows, coalesced since channels are contiguous, a tile of steps ahead of their use.

#ifndef THREADS
#define THREADS 128
#endif
#define TILE 4                                         // steps that the forward reads ahead; divides CHUNK
#define SUB 4                                          // steps whose states the backward keeps in registers; divides CHUNK
#define ALL_LANES 0xffffffffu

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(bf16 v) { return __uint_as_float((uint32_t)v.bits << 16); }
__device__ inline float to_float(fp16 v) { return __half2float(__ushort_as_half(v.bits)); }
__device__ inline void set(float *p, float v) { *p = v; }
__device__ inline void set(bf16 *p, float v) { p->bits = __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
__device__ inline void set(fp16 *p, float v) { p->bits = __half_as_ushort(__float2half_rn(v)); }

__device__ inline float exp_clamped(float v) { return exp2f((v > 88.0f ? 88.0f : v) * 1.44269504f); }   // fminf loses NaN
__device__ inline float reciprocal(float v) { return __fdividef(1.0f, v); }   // 2 ulp, and no slow path to call
__device__ inline float sigmoid(float v) { return reciprocal(1.0f + exp_clamped(-v)); }

template <int L> __device__ inline float sum_lanes(float v) {            // over the L lanes of a channel, in all of them
    #pragma unroll
    for (int m = L / 2; m > 0; m /= 2) v += __shfl_xor_sync(ALL_LANES, v, m);
    return v;
}

// Sums of P values over the channels of a warp, which are L lanes apart. A butterfly that halves the values while it adds:
// a lane sends one half of its values to the lane m away and adds what comes back to the other. 16 values over 32 lanes
// take 16 shuffles instead of 80. Then v[0 .. kept) are the sums of states first .. first + kept, the same in `copies` lanes.
template <int P, int L> struct ChannelSums {
    static const int channels = 32 / L;
    static const int kept = P > channels ? P / channels : 1;
    int first = 0;
    bool writer = true;                                                  // one lane among those that hold the same sums
    __device__ inline ChannelSums(int lane) {
        int count = P;
        #pragma unroll
        for (int m = 16; m >= L; m /= 2) {
            if (count > 1) { count /= 2; first += lane & m ? count : 0; } else writer = writer && !(lane & m);
        }
    }
    __device__ inline void operator()(float (&v)[P], int lane) const { run<P, 16>(v, lane); }
    template <int COUNT, int M> __device__ inline void run(float (&v)[P], int lane) const {
        if constexpr (M >= L && COUNT > 1) {
            const bool upper = lane & M;
            #pragma unroll
            for (int i = 0; i < COUNT / 2; i++) {
                const float give = upper ? v[i] : v[i + COUNT / 2], keep = upper ? v[i + COUNT / 2] : v[i];
                v[i] = keep + __shfl_xor_sync(ALL_LANES, give, M);
            }
            run<COUNT / 2, M / 2>(v, lane);
        } else if constexpr (M >= L) {
            v[0] += __shfl_xor_sync(ALL_LANES, v[0], M);
            run<1, M / 2>(v, lane);
        }
    }
};

// Row t of k and q into shared memory by one warp, and |k|^2.
template <class E, int NP> __device__ inline void stage_keys(const ScanArgs &a, int64_t b, int64_t t, int lane, float *k, float *q, float *kk) {
    const E *from_k = (const E *)a.k + b * a.k_b + t * a.k_t, *from_q = (const E *)a.q + b * a.q_b + t * a.q_t;
    float sum = 0;
    for (int j = lane; j < NP; j += 32) {
        const bool in = j < a.N && t < a.T;
        const float kj = in ? to_float(from_k[j]) : 0.0f;
        k[j] = kj;
        q[j] = in ? to_float(from_q[j]) : 0.0f;
        sum += kj * kj;
    }
    #pragma unroll
    for (int m = 16; m > 0; m /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, m);
    if (lane == 0) *kk = sum;
}

template <int P, int L> struct ForwardShared { float k[2][TILE][P * L], q[2][TILE][P * L], kk[2][TILE]; };   // two tiles

template <class E, int P, int L> __global__ void __launch_bounds__(THREADS) scan_forward_kernel(const ScanArgs a) {
    constexpr int NP = P * L, WARPS = THREADS / 32;
    ForwardShared<P, L> &s = *(ForwardShared<P, L> *)SHARED_MEMORY;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, part = tid % L;
    const int64_t blocks = (a.D + THREADS / L - 1) / (THREADS / L), block = blockIdx.x % blocks, b = blockIdx.x / blocks;
    const int64_t c = block * (THREADS / L) + tid / L;
    const bool live = c < a.D;
    const int64_t cc = live ? c : a.D - 1;                               // lanes beyond D compute on a copy, and write nothing
    const E *x = (const E *)a.x + b * a.x_b + cc, *dt = (const E *)a.dt + b * a.dt_b + cc;
    const E *z = a.z ? (const E *)a.z + b * a.z_b + cc : nullptr;
    E *y = (E *)a.y + b * a.T * a.D + cc;
    const float bias = a.bias ? a.bias[cc] : 0.0f, skip = a.skip ? a.skip[cc] : 0.0f;
    float S[P];
    #pragma unroll
    for (int i = 0; i < P; i++) {
        const int64_t j = part * P + i;
        S[i] = a.h0 && j < a.N ? a.h0[(b * a.D + cc) * a.N + j] : 0.0f;
    }
    E xs[TILE], dts[TILE], zs[TILE];
    auto read_rows = [&](int64_t t0) {
        #pragma unroll
        for (int i = 0; i < TILE; i++) {
            const int64_t t = t0 + i < a.T ? t0 + i : a.T - 1;
            xs[i] = x[t * a.x_t];
            dts[i] = dt[t * a.dt_t];
            if (z) zs[i] = z[t * a.z_t];
        }
    };
    auto read_keys = [&](int64_t t0, int buffer) {
        for (int i = warp; i < TILE; i += WARPS)
            stage_keys<E, NP>(a, b, t0 + i, lane, s.k[buffer][i], s.q[buffer][i], &s.kk[buffer][i]);
    };
    read_rows(0);
    read_keys(0, 0);
    __syncthreads();
    int buffer = 0;
    for (int64_t t0 = 0; t0 < a.T; t0 += TILE, buffer ^= 1) {
        if (a.chunks && t0 % CHUNK == 0 && live) {
            float *saved = a.chunks + (b * ((a.T + CHUNK - 1) / CHUNK) + t0 / CHUNK) * a.N * a.D + c;
            #pragma unroll
            for (int i = 0; i < P; i++)
                if (part * P + i < a.N) saved[(part * P + i) * a.D] = S[i];
        }
        float xf[TILE], eps_arg[TILE], gate[TILE];
        #pragma unroll
        for (int i = 0; i < TILE; i++) {
            xf[i] = to_float(xs[i]);
            eps_arg[i] = to_float(dts[i]) + bias;
            gate[i] = z ? to_float(zs[i]) : 0.0f;
        }
        if (t0 + TILE < a.T) {                                           // in flight while this tile is computed
            read_rows(t0 + TILE);
            read_keys(t0 + TILE, buffer ^ 1);
        }
        #pragma unroll
        for (int i = 0; i < TILE; i++) {
            if (t0 + i >= a.T) break;
            const float *k = s.k[buffer][i] + part * P, *q = s.q[buffer][i] + part * P;
            const float eps = reciprocal(1.0f + exp_clamped(-eps_arg[i]) + s.kk[buffer][i]);
            float out = 0.0f;
            #pragma unroll
            for (int j = 0; j < P; j++) {
                S[j] += (eps * k[j]) * (xf[i] - k[j] * S[j]);
                out += S[j] * q[j];
            }
            out = sum_lanes<L>(out) + skip * xf[i];
            if (z) out *= gate[i] * sigmoid(gate[i]);
            if (live && part == 0) set(y + (t0 + i) * a.D, out);
        }
        __syncthreads();                                                 // the other buffer is full, this one is free
    }
    if (live) {
        #pragma unroll
        for (int i = 0; i < P; i++)
            if (part * P + i < a.N) a.hT[(b * a.D + c) * a.N + part * P + i] = S[i];
    }
}

// Shared memory of a block of the backward: keys and queries of a chunk, the states at every SUB steps of it, and what the
// block's channels add to dk and dq over SUB steps, a row a warp, summed over warps in a fixed order.
template <int P, int L> struct BackwardShared {
    float k[CHUNK][P * L], q[CHUNK][P * L], kk[CHUNK];
    float states[CHUNK / SUB][P][THREADS];
    float dk[THREADS / 32][SUB][P * L], dq[THREADS / 32][SUB][P * L], dkk[THREADS / 32][SUB];
};

template <class E, int P, int L> __global__ void __launch_bounds__(THREADS) scan_backward_kernel(const ScanArgs a) {
    constexpr int NP = P * L, WARPS = THREADS / 32, SUBS = CHUNK / SUB;
    BackwardShared<P, L> &s = *(BackwardShared<P, L> *)SHARED_MEMORY;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, part = tid % L;
    const int64_t blocks = (a.D + THREADS / L - 1) / (THREADS / L), block = blockIdx.x % blocks, b = blockIdx.x / blocks;
    const int64_t c = block * (THREADS / L) + tid / L, n_chunks = (a.T + CHUNK - 1) / CHUNK;
    const bool live = c < a.D;
    const int64_t cc = live ? c : a.D - 1;
    const E *x = (const E *)a.x + b * a.x_b + cc, *dt = (const E *)a.dt + b * a.dt_b + cc, *dy = (const E *)a.dy + b * a.dy_b + cc;
    const E *z = a.z ? (const E *)a.z + b * a.z_b + cc : nullptr;
    const int64_t row = b * a.T * a.D + cc;                              // of dx, ddt and dz: one offset, not three pointers
    const float bias = a.bias ? a.bias[cc] : 0.0f, skip = a.skip ? a.skip[cc] : 0.0f;
    const ChannelSums<P, L> channel_sums(lane);
    float G[P], dskip = 0.0f, dbias = 0.0f;
    #pragma unroll
    for (int i = 0; i < P; i++) {
        const int64_t j = part * P + i;
        G[i] = a.dhT && live && j < a.N ? a.dhT[(b * a.D + c) * a.N + j] : 0.0f;
    }
    for (int64_t chunk = n_chunks - 1; chunk >= 0; chunk--) {
        const int64_t t0 = chunk * CHUNK;
        for (int i = warp; i < CHUNK; i += WARPS) stage_keys<E, NP>(a, b, t0 + i, lane, s.k[i], s.q[i], &s.kk[i]);
        __syncthreads();
        float S[P];
        #pragma unroll
        for (int i = 0; i < P; i++) {
            const int64_t j = part * P + i;
            S[i] = j < a.N ? a.chunks[((b * n_chunks + chunk) * a.N + j) * a.D + cc] : 0.0f;
        }
        for (int sub = 0; sub < SUBS; sub++) {                           // forward once, keeping a state every SUB steps
            #pragma unroll
            for (int i = 0; i < P; i++) s.states[sub][i][tid] = S[i];
            if (sub + 1 == SUBS) break;
            #pragma unroll
            for (int i = 0; i < SUB; i++) {
                const int r = sub * SUB + i;
                const int64_t t = t0 + r < a.T ? t0 + r : a.T - 1;       // beyond T the keys are zero and nothing changes
                const float xt = to_float(x[t * a.x_t]);
                const float eps = reciprocal(1.0f + exp_clamped(-(to_float(dt[t * a.dt_t]) + bias)) + s.kk[r]);
                const float *k = s.k[r] + part * P;
                #pragma unroll
                for (int j = 0; j < P; j++) S[j] += (eps * k[j]) * (xt - k[j] * S[j]);
            }
        }
        for (int sub = SUBS - 1; sub >= 0; sub--) {
            float before[SUB][P], xt[SUB], e[SUB], eps[SUB], gated[SUB], sums[P];
            #pragma unroll
            for (int j = 0; j < P; j++) S[j] = s.states[sub][j][tid];
            #pragma unroll
            for (int i = 0; i < SUB; i++) {                              // forward again, keeping every state; dq and dz
                const int r = sub * SUB + i;
                const int64_t t = t0 + r < a.T ? t0 + r : a.T - 1;
                const bool in = t0 + r < a.T && live;
                const float *k = s.k[r] + part * P, *q = s.q[r] + part * P;
                const float dyt = in ? to_float(dy[t * a.dy_t]) : 0.0f, zt = z ? to_float(z[t * a.z_t]) : 0.0f;
                const float sig = sigmoid(zt);
                xt[i] = to_float(x[t * a.x_t]);
                e[i] = exp_clamped(-(to_float(dt[t * a.dt_t]) + bias));
                eps[i] = reciprocal(1.0f + e[i] + s.kk[r]);
                gated[i] = z ? dyt * zt * sig : dyt;
                float out = 0.0f;
                #pragma unroll
                for (int j = 0; j < P; j++) {
                    before[i][j] = S[j];
                    S[j] += (eps[i] * k[j]) * (xt[i] - k[j] * S[j]);
                    out += S[j] * q[j];
                    sums[j] = gated[i] * S[j];
                }
                if (z) {
                    out = sum_lanes<L>(out) + skip * xt[i];
                    if (in && part == 0) set((E *)a.dz + row + t * a.D, dyt * out * sig * (1.0f + zt * (1.0f - sig)));
                }
                channel_sums(sums, lane);
                if (channel_sums.writer)
                    #pragma unroll
                    for (int j = 0; j < channel_sums.kept; j++) s.dq[warp][i][part * P + channel_sums.first + j] = sums[j];
            }
            #pragma unroll
            for (int i = SUB - 1; i >= 0; i--) {
                const int r = sub * SUB + i;
                const int64_t t = t0 + r;
                const bool in = t < a.T && live;
                const float *k = s.k[r] + part * P, *q = s.q[r] + part * P;
                float dxt = 0.0f, de = 0.0f;                             // de = eps deps: eps^2 alone would underflow
                #pragma unroll
                for (int j = 0; j < P; j++) {
                    const float g = G[j] + gated[i] * q[j], ge = g * eps[i], gek = ge * k[j];
                    const float kS = k[j] * before[i][j], error = xt[i] - kS;
                    dxt += gek;
                    de += gek * error;
                    sums[j] = live ? ge * (error - kS) : 0.0f;
                    G[j] = g - k[j] * gek;
                }
                channel_sums(sums, lane);
                if (channel_sums.writer)
                    #pragma unroll
                    for (int j = 0; j < channel_sums.kept; j++) s.dk[warp][i][part * P + channel_sums.first + j] = sums[j];
                dxt = sum_lanes<L>(dxt) + skip * gated[i];
                de = sum_lanes<L>(de);
                const float ddtt = in ? de * (eps[i] * e[i]) : 0.0f;
                float dkk = live && part == 0 ? de * eps[i] : 0.0f;
                #pragma unroll
                for (int m = 16; m > 0; m /= 2) dkk += __shfl_xor_sync(ALL_LANES, dkk, m);
                if (lane == 0) s.dkk[warp][i] = dkk;
                if (in && part == 0) {
                    set((E *)a.dx + row + t * a.D, dxt);
                    set((E *)a.ddt + row + t * a.D, ddtt);
                }
                dbias += ddtt;
                dskip += gated[i] * xt[i];
            }
            __syncthreads();
            for (int i = tid; i < SUB * NP; i += THREADS) {              // this block's row of dk and dq, over its warps in order
                const int step = i / NP, j = i % NP, r = sub * SUB + step;
                if (j >= a.N || t0 + r >= a.T) continue;
                float dk = 0.0f, dq = 0.0f, dkk = 0.0f;
                #pragma unroll
                for (int w = 0; w < WARPS; w++) { dk += s.dk[w][step][j]; dq += s.dq[w][step][j]; dkk += s.dkk[w][step]; }
                const int64_t at = ((block * a.B + b) * a.T + t0 + r) * a.N + j;
                a.dk[at] = dk - 2.0f * s.k[r][j] * dkk;
                a.dq[at] = dq;
            }
            __syncthreads();                                             // before the next steps overwrite what is read here
        }
    }
    if (live) {
        #pragma unroll
        for (int i = 0; i < P; i++)
            if (a.dh0 && part * P + i < a.N) a.dh0[(b * a.D + c) * a.N + part * P + i] = G[i];
        if (part == 0 && a.dskip) a.dskip[b * a.D + c] = dskip;
        if (part == 0 && a.dbias) a.dbias[b * a.D + c] = dbias;
    }
}

// ------------------------------------------------------------------------------------------------ CUDA: launch, C API
// native.py builds one library for a dtype, P and L (SCAN_TYPE, SCAN_P, SCAN_L): three kernels compile in seconds, all
// combinations would take minutes. Each call returns null, or the launch that failed and CUDA's words.

typedef SCAN_TYPE E;
static const int P = SCAN_P, L = SCAN_L;

static const char *failed(const char *launch) {
    static thread_local char words[256];
    const cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) return nullptr;
    snprintf(words, sizeof words, "%s: %s", launch, cudaGetErrorString(error));
    return words;
}

extern "C" {
int64_t longhorn_chunk(void) { return CHUNK; }
int64_t longhorn_channels_a_block(void) { return THREADS / L; }
int64_t longhorn_args_size(void) { return sizeof(ScanArgs); }
const char *longhorn_scan_forward_cuda(const ScanArgs *a, void *stream) {
    const dim3 grid((unsigned)(a->B * ((a->D + THREADS / L - 1) / (THREADS / L))));
    LAUNCH((scan_forward_kernel<E, P, L>), grid, sizeof(ForwardShared<P, L>), stream, *a);
    return failed("scan_forward_kernel");
}
const char *longhorn_scan_backward_cuda(const ScanArgs *a, void *stream) {
    const dim3 grid((unsigned)(a->B * ((a->D + THREADS / L - 1) / (THREADS / L))));
    LAUNCH((scan_backward_kernel<E, P, L>), grid, sizeof(BackwardShared<P, L>), stream, *a);
    return failed("scan_backward_kernel");
}
}

#else

// ------------------------------------------------------------------------------------------------------ CPU vectors
// One lane is one channel: nothing crosses lanes except the sums over channels for dk and dq.

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

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")               // early enough for arrays of vectors to live in registers
#endif

INLINE vec splat(float a) { return a - (vec){}; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int tail(int64_t D, int64_t c) { return D - c < LANES ? (int)(D - c) : LANES; }     // channels of the group at c

INLINE vec widen(hvec h) { return (vec)(__builtin_convertvector(h, uvec) << 16); }
INLINE hvec narrow(vec v) {                                              // round to nearest even, NaN stays NaN
    uvec u = (uvec)v;
    uvec rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    uvec nan = (uvec)(v != v);
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), hvec);
}

// n < LANES is the tail of D: the lanes beyond it are read as 0 and never written.
INLINE vec load(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
INLINE vec load(const bf16 *p) { hvec v; memcpy(&v, p, sizeof v); return widen(v); }
INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE void store(bf16 *p, vec v) { hvec h = narrow(v); memcpy((void *)p, &h, sizeof h); }
template <class E> INLINE vec load(const E *p, int n) {
    if (n == LANES) return load(p);
    E padded[LANES] = {};
    memcpy((void *)padded, p, n * sizeof(E));
    return load(padded);
}
template <class E> INLINE void store(E *p, vec v, int n) {
    if (n == LANES) return store(p, v);
    E padded[LANES];
    store(padded, v);
    memcpy((void *)p, padded, n * sizeof(E));
}
INLINE float to_float(float a) { return a; }
INLINE float to_float(bf16 a) { uint32_t u = (uint32_t)a.bits << 16; float f; memcpy(&f, &u, 4); return f; }

INLINE vec select(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

// e^v to 1 ulp, clamped to [e^-87, e^88] so that neither 0 * inf nor a denormal can arise; NaN stays NaN.
INLINE vec exp_clamped(vec v) {
    v = select(v < -87.0f, splat(-87.0f), v);
    v = select(v > 88.0f, splat(88.0f), v);
    const float magic = 12582912.0f;                                     // 1.5 * 2^23: adding it rounds to an integer
    vec shifted = v * 1.44269504089f + magic;
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
INLINE vec sigmoid(vec v) { return 1.0f / (1.0f + exp_clamped(-v)); }

// LANES rows of LANES lanes -> their LANES sums. Each stage adds the halves of two rows into one, so that 15 additions
// replace 16 horizontal sums of 4 additions each.
template <int L> INLINE vec pair_sum(vec a, vec b) {                     // segments of L lanes become segments of L / 2
    ivec low, high;
    for (int i = 0; i < LANES; i++) { low[i] = i / (L / 2) * L + i % (L / 2); high[i] = low[i] + L / 2; }
#if defined(__clang__)
    vec lo, hi;
    for (int i = 0; i < LANES; i++) {
        lo[i] = low[i] < LANES ? a[low[i]] : b[low[i] - LANES];
        hi[i] = high[i] < LANES ? a[high[i]] : b[high[i] - LANES];
    }
    return lo + hi;
#else
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
#endif
}
template <int L> struct RowSum {
    INLINE vec of(const vec *rows, int count) {
        return pair_sum<2 * LANES / L>(RowSum<L / 2>::of(rows, count / 2), RowSum<L / 2>::of(rows + count / 2, count / 2));
    }
};
template <> struct RowSum<1> { INLINE vec of(const vec *rows, int) { return rows[0]; } };
static void row_sums(const vec *rows, int64_t count, float *out) {       // both buffers padded to a multiple of LANES
    for (int64_t r = 0; r < count; r += LANES) {
        vec sums = RowSum<LANES>::of(rows + r, LANES);
        memcpy(out + r, &sums, sizeof sums);
    }
}

// 64-byte aligned scratch of one task; `need` floats each.
struct Scratch {
    char *base; size_t used, size;
    Scratch(size_t floats) : used(0), size(floats * 4 + 64 * 16) { base = (char *)aligned_alloc(64, (size + 63) / 64 * 64); }
    ~Scratch() { free(base); }
    template <class V> V *take(size_t count) {
        V *p = (V *)(base + used);
        used += (count * sizeof(V) + 63) / 64 * 64;
        return p;
    }
};

// --------------------------------------------------------------------------------------------- CPU kernels: the scan
// NC is the state size known at compile time, or 0: then it is read from the arguments. A task is one batch row and a
// range of channel groups; within it time goes chunk by chunk and the groups go through the chunk one after another,
// so that k and q are converted once a chunk, and dk and dq summed over lanes once a chunk instead of once a group.

template <class E> static void load_keys(const ScanArgs &a, int64_t b, int64_t t0, int steps, float *k, float *q, float *kk) {
    for (int t = 0; t < steps; t++) {
        const E *ks = (const E *)a.k + b * a.k_b + (t0 + t) * a.k_t, *qs = (const E *)a.q + b * a.q_b + (t0 + t) * a.q_t;
        float sum = 0;
        for (int64_t j = 0; j < a.N; j++) {
            float kj = to_float(ks[j]);
            k[t * a.N + j] = kj;
            q[t * a.N + j] = to_float(qs[j]);
            sum += kj * kj;
        }
        kk[t] = sum;
    }
}

// One group of channels over one chunk: where its rows are. The hot loops know only full vectors; the group at the
// tail of D is copied into padded rows first and its results are copied out after.
template <class E> struct Tile {
    const E *x, *dt, *z, *dy;
    int64_t x_t, dt_t, z_t, dy_t, out_t;
    E *y, *dx, *ddt, *dz;
    vec bias, skip;
};

template <class E> static E *stage(const E *from, int64_t stride, int steps, int n, E *&room) {
    if (!from) return nullptr;
    E *to = room;
    room += CHUNK * LANES;
    memset((void *)to, 0, CHUNK * LANES * sizeof(E));
    for (int t = 0; t < steps; t++) memcpy((void *)(to + t * LANES), from + t * stride, n * sizeof(E));
    return to;
}

template <class E> static Tile<E> tile_of(const ScanArgs &a, int64_t b, int64_t t0, int steps, int64_t c, int n, E *room) {
    auto rows = [&](const void *p, int64_t s_b, int64_t s_t) { return p ? (const E *)p + b * s_b + t0 * s_t + c : nullptr; };
    auto out = [&](void *p) { return p ? (E *)p + (b * a.T + t0) * a.D + c : nullptr; };
    Tile<E> tile = {rows(a.x, a.x_b, a.x_t), rows(a.dt, a.dt_b, a.dt_t), rows(a.z, a.z_b, a.z_t), rows(a.dy, a.dy_b, a.dy_t),
                    a.x_t, a.dt_t, a.z_t, a.dy_t, a.D, out(a.y), out(a.dx), out(a.ddt), out(a.dz),
                    a.bias ? load(a.bias + c, n) : vec{}, a.skip ? load(a.skip + c, n) : vec{}};
    if (n == LANES) return tile;
    tile.x = stage(tile.x, tile.x_t, steps, n, room);
    tile.dt = stage(tile.dt, tile.dt_t, steps, n, room);
    tile.z = stage(tile.z, tile.z_t, steps, n, room);
    tile.dy = stage(tile.dy, tile.dy_t, steps, n, room);
    for (E **p : {&tile.y, &tile.dx, &tile.ddt, &tile.dz})
        if (*p) { *p = room; room += CHUNK * LANES; }
    tile.x_t = tile.dt_t = tile.z_t = tile.dy_t = tile.out_t = LANES;
    return tile;
}

template <class E> static void unstage(const ScanArgs &a, const Tile<E> &tile, int64_t b, int64_t t0, int steps, int64_t c, int n) {
    if (n == LANES) return;
    const E *from[] = {tile.y, tile.dx, tile.ddt, tile.dz};
    void *to[] = {a.y, a.dx, a.ddt, a.dz};
    for (int i = 0; i < 4; i++)
        for (int t = 0; to[i] && t < steps; t++)
            memcpy((E *)to[i] + (b * a.T + t0 + t) * a.D + c, from[i] + t * LANES, n * sizeof(E));
}

// (B, D, N) in memory <-> N vectors of channels
INLINE void load_state(const float *h, int64_t N, int n, vec *S) {
    for (int64_t j = 0; j < N; j++) {
        vec v = {};
        if (h) for (int l = 0; l < n; l++) v[l] = h[l * N + j];
        S[j] = v;
    }
}
INLINE void store_state(float *h, int64_t N, int n, const vec *S) {
    for (int64_t j = 0; j < N; j++)
        for (int l = 0; l < n; l++) h[l * N + j] = S[j][l];
}

template <class E, int NC> static void forward_chunk(const Tile<E> &in, int64_t n_state, int steps, const float *k,
                                                     const float *q, const float *kk, vec *state) {
    const int64_t N = NC ? NC : n_state;
    vec registers[NC ? NC : 1], *S = NC ? registers : state;
    if (NC) for (int64_t j = 0; j < N; j++) S[j] = state[j];
    for (int t = 0; t < steps; t++, k += N, q += N) {
        vec x = load(in.x + t * in.x_t);
        vec eps = 1.0f / (1.0f + exp_clamped(-(load(in.dt + t * in.dt_t) + in.bias)) + kk[t]);
        vec out[2] = {in.skip * x, vec{}};                               // two chains hide the latency of the FMA
        UNROLL for (int64_t j = 0; j < N; j++) {
            S[j] += (eps * k[j]) * (x - k[j] * S[j]);
            out[j & 1] += S[j] * q[j];
        }
        vec o = out[0] + out[1];
        if (in.z) { vec z = load(in.z + t * in.z_t); o *= z * sigmoid(z); }
        store(in.y + t * in.out_t, o);
    }
    if (NC) for (int64_t j = 0; j < N; j++) state[j] = S[j];
}

template <class E, int NC> static void forward_task(const ScanArgs &a, int64_t b, int64_t first, int64_t last) {
    const int64_t N = a.N;
    Scratch scratch((last - first) * N * LANES + CHUNK * (2 * N + 1) + 4 * CHUNK * LANES);
    vec *state = scratch.take<vec>((last - first) * N);
    float *k = scratch.take<float>(CHUNK * N), *q = scratch.take<float>(CHUNK * N), *kk = scratch.take<float>(CHUNK);
    E *room = scratch.take<E>(4 * CHUNK * LANES);
    for (int64_t t0 = 0; t0 < a.T; t0 += CHUNK) {
        int steps = a.T - t0 < CHUNK ? (int)(a.T - t0) : CHUNK;
        load_keys<E>(a, b, t0, steps, k, q, kk);
        for (int64_t g = first; g < last; g++) {
            int64_t c = g * LANES;
            int n = tail(a.D, c);
            vec *S = state + (g - first) * N;
            if (t0 == 0) load_state(a.h0 ? a.h0 + (b * a.D + c) * N : nullptr, N, n, S);
            if (a.chunks) {
                float *saved = a.chunks + (b * ceil_div(a.T, CHUNK) + t0 / CHUNK) * N * a.D + c;
                for (int64_t j = 0; j < N; j++) store(saved + j * a.D, S[j], n);
            }
            Tile<E> tile = tile_of<E>(a, b, t0, steps, c, n, room);
            forward_chunk<E, NC>(tile, N, steps, k, q, kk, S);
            unstage(a, tile, b, t0, steps, c, n);
            if (t0 + steps == a.T) store_state(a.hT + (b * a.D + c) * N, N, n, S);
        }
    }
}

// Recomputes the states of a chunk into S[0..steps] and walks it backwards. With G = dL/dS_t and S' the state before t:
//   G += dy q;  dx = eps sum G k;  deps = sum G k (x - k S');  dk = sum G eps (x - 2 k S') - 2 k sum deps eps^2
//   dq = sum dy S;  ddt = deps eps^2 exp(-(dt + bias));  G *= 1 - eps k^2
// What is summed over channels (dk, dq, and dkk = deps eps^2) is added up as vectors here.
template <class E, int NC> static void backward_chunk(const Tile<E> &in, int64_t n_state, int steps, const float *k,
                                                      const float *q, const float *kk, vec *S, vec *kept, vec *G_state,
                                                      vec *dk, vec *dq, vec *dkk, vec *dskip, vec *dbias) {
    const int64_t N = NC ? NC : n_state;
    vec *eps_of = kept, *e_of = kept + CHUNK, *dy_of = kept + 2 * CHUNK;
    {
        vec registers[NC ? NC : 1];
        if (NC) for (int64_t j = 0; j < N; j++) registers[j] = S[j];
        for (int t = 0; t < steps; t++) {
            const float *kt = k + t * N, *qt = q + t * N;
            vec x = load(in.x + t * in.x_t), dy = load(in.dy + t * in.dy_t), z = {}, sig = {}, gated = dy;
            vec e = exp_clamped(-(load(in.dt + t * in.dt_t) + in.bias));
            vec eps = 1.0f / (1.0f + e + kk[t]);
            if (in.z) { z = load(in.z + t * in.z_t); sig = sigmoid(z); gated *= z * sig; }
            vec out[2] = {in.skip * x, vec{}};
            vec *before = NC ? registers : S + t * N, *after = S + (t + 1) * N, *dqt = dq + t * N;
            UNROLL for (int64_t j = 0; j < N; j++) {
                vec s = before[j];
                s += (eps * kt[j]) * (x - kt[j] * s);
                if (NC) registers[j] = s;
                after[j] = s;
                dqt[j] += gated * s;
                out[j & 1] += s * qt[j];
            }
            if (in.z) store(in.dz + t * in.out_t, dy * (out[0] + out[1]) * sig * (1.0f + z * (1.0f - sig)));
            eps_of[t] = eps; e_of[t] = e; dy_of[t] = gated;
        }
    }
    vec registers[NC ? NC : 1], *G = NC ? registers : G_state;
    if (NC) for (int64_t j = 0; j < N; j++) G[j] = G_state[j];
    for (int t = steps - 1; t >= 0; t--) {
        const float *kt = k + t * N, *qt = q + t * N;
        const vec *before = S + t * N;
        vec *dkt = dk + t * N;
        vec x = load(in.x + t * in.x_t), eps = eps_of[t], dy = dy_of[t];
        vec dx[2] = {in.skip * dy, vec{}}, de[2] = {};                   // de = eps deps: eps^2 alone would underflow
        UNROLL for (int64_t j = 0; j < N; j++) {
            vec g = G[j] + dy * qt[j], ge = g * eps, gek = ge * kt[j];
            vec kS = kt[j] * before[j], error = x - kS;
            dx[j & 1] += gek;
            de[j & 1] += gek * error;
            dkt[j] += ge * (error - kS);
            G[j] = g - kt[j] * gek;
        }
        vec ddt = (de[0] + de[1]) * (eps * e_of[t]);
        dkk[t] += (de[0] + de[1]) * eps;
        store(in.dx + t * in.out_t, dx[0] + dx[1]);
        store(in.ddt + t * in.out_t, ddt);
        *dbias += ddt;
        *dskip += dy * x;
    }
    if (NC) for (int64_t j = 0; j < N; j++) G_state[j] = G[j];
}

template <class E, int NC> static void backward_task(const ScanArgs &a, int64_t b, int64_t split, int64_t first, int64_t last) {
    const int64_t N = a.N, groups = last - first, n_chunks = ceil_div(a.T, CHUNK);
    const int64_t padded = ceil_div(CHUNK * N, LANES) * LANES;
    Scratch scratch((groups * (N + 2) + (CHUNK + 1) * N + 4 * CHUNK + 2 * padded) * LANES + 2 * CHUNK * N + 2 * CHUNK + padded
                    + 8 * CHUNK * LANES);
    vec *G = scratch.take<vec>(groups * N), *S = scratch.take<vec>((CHUNK + 1) * N), *kept = scratch.take<vec>(3 * CHUNK);
    vec *dskip = scratch.take<vec>(groups), *dbias = scratch.take<vec>(groups);
    vec *dk = scratch.take<vec>(padded), *dq = scratch.take<vec>(padded), *dkk = scratch.take<vec>(CHUNK);
    float *k = scratch.take<float>(CHUNK * N), *q = scratch.take<float>(CHUNK * N), *kk = scratch.take<float>(CHUNK);
    float *sums = scratch.take<float>(padded), *sums_kk = scratch.take<float>(CHUNK);
    E *room = scratch.take<E>(8 * CHUNK * LANES);
    for (int64_t g = first; g < last; g++) {
        int64_t c = g * LANES;
        load_state(a.dhT ? a.dhT + (b * a.D + c) * N : nullptr, N, tail(a.D, c), G + (g - first) * N);
        dskip[g - first] = dbias[g - first] = vec{};
    }
    for (int64_t chunk = n_chunks - 1; chunk >= 0; chunk--) {
        int64_t t0 = chunk * CHUNK;
        int steps = a.T - t0 < CHUNK ? (int)(a.T - t0) : CHUNK;
        load_keys<E>(a, b, t0, steps, k, q, kk);
        memset((void *)dk, 0, padded * sizeof(vec));
        memset((void *)dq, 0, padded * sizeof(vec));
        memset((void *)dkk, 0, CHUNK * sizeof(vec));
        for (int64_t g = first; g < last; g++) {
            int64_t c = g * LANES, i = g - first;
            int n = tail(a.D, c);
            const float *saved = a.chunks + (b * n_chunks + chunk) * N * a.D + c;
            for (int64_t j = 0; j < N; j++) S[j] = load(saved + j * a.D, n);
            Tile<E> tile = tile_of<E>(a, b, t0, steps, c, n, room);
            backward_chunk<E, NC>(tile, N, steps, k, q, kk, S, kept, G + i * N, dk, dq, dkk, dskip + i, dbias + i);
            unstage(a, tile, b, t0, steps, c, n);
        }
        int64_t out = ((split * a.B + b) * a.T + t0) * N;
        row_sums(dkk, CHUNK, sums_kk);
        row_sums(dk, padded, sums);
        for (int t = 0; t < steps; t++)
            for (int64_t j = 0; j < N; j++) a.dk[out + t * N + j] = sums[t * N + j] - 2.0f * k[t * N + j] * sums_kk[t];
        row_sums(dq, padded, sums);
        memcpy(a.dq + out, sums, steps * N * sizeof(float));
    }
    for (int64_t g = first; g < last; g++) {
        int64_t c = g * LANES, i = g - first;
        int n = tail(a.D, c);
        if (a.dh0) store_state(a.dh0 + (b * a.D + c) * N, N, n, G + i * N);
        if (a.dskip) store(a.dskip + b * a.D + c, dskip[i], n);
        if (a.dbias) store(a.dbias + b * a.D + c, dbias[i], n);
    }
}

// --------------------------------------------------------------------------- CPU kernels: the short causal convolution

#define MAX_WIDTH 8                                    // WC is the width known at compile time, or 0, as NC above

template <class E, int WC> static void conv_forward_task(const ConvArgs &a, int64_t b, int64_t first, int64_t last) {
    for (int64_t g = first; g < last; g++) {
        int64_t c = g * LANES;
        int n = tail(a.D, c);
        const int W = WC ? WC : (int)a.W;
        vec w[MAX_WIDTH], window[MAX_WIDTH], bias = a.bias ? load(a.bias + c, n) : vec{};
        for (int i = 0; i < W; i++) {
            w[i] = vec{};
            for (int l = 0; l < n; l++) w[i][l] = a.weight[(c + l) * W + i];
            window[i] = i > 0 && a.state ? load(a.state + (b * (W - 1) + i - 1) * a.D + c, n) : vec{};
        }
        const E *x = (const E *)a.x + b * a.x_b + c;
        E *y = (E *)a.y + b * a.T * a.D + c;
        for (int64_t t = 0; t < a.T; t++) {
            for (int i = 0; i + 1 < W; i++) window[i] = window[i + 1];
            window[W - 1] = load(x + t * a.x_t, n);
            vec p = bias;
            for (int i = 0; i < W; i++) p += w[i] * window[i];
            store(y + t * a.D, a.silu ? p * sigmoid(p) : p, n);
        }
    }
}

// One pass backwards in time. `window` holds the inputs x_{t-W+1..t}, `dp` the gradients of the sums at t..t+W-1.
template <class E, int WC> static void conv_backward_task(const ConvArgs &a, int64_t b, int64_t first, int64_t last) {
    for (int64_t g = first; g < last; g++) {
        int64_t c = g * LANES;
        int n = tail(a.D, c);
        const int W = WC ? WC : (int)a.W;
        vec w[MAX_WIDTH], dw[MAX_WIDTH], window[MAX_WIDTH], dp[MAX_WIDTH];
        vec bias = a.bias ? load(a.bias + c, n) : vec{}, dbias = {};
        const E *x = (const E *)a.x + b * a.x_b + c, *dy = (const E *)a.dy + b * a.dy_b + c;
        E *dx = (E *)a.dx + b * a.T * a.D + c;
        auto input = [&](int64_t t) {
            if (t >= 0) return load(x + t * a.x_t, n);
            return a.state && t >= 1 - W ? load(a.state + (b * (W - 1) + t + W - 1) * a.D + c, n) : vec{};
        };
        for (int i = 0; i < W; i++) {
            w[i] = vec{};
            for (int l = 0; l < n; l++) w[i][l] = a.weight[(c + l) * W + i];
            dw[i] = dp[i] = vec{};
            window[i] = input(a.T - W + i);
        }
        for (int64_t t = a.T - 1; t >= 0; t--) {
            for (int i = W - 1; i > 0; i--) dp[i] = dp[i - 1];
            vec p = bias, d = load(dy + t * a.dy_t, n);
            for (int i = 0; i < W; i++) p += w[i] * window[i];
            if (a.silu) { vec s = sigmoid(p); d *= s * (1.0f + p * (1.0f - s)); }
            dp[0] = d;
            dbias += d;
            vec sum = {};
            for (int i = 0; i < W; i++) { dw[i] += d * window[i]; sum += w[i] * dp[W - 1 - i]; }
            store(dx + t * a.D, sum, n);
            for (int i = W - 1; i > 0; i--) window[i] = window[i - 1];
            window[0] = input(t - W);
        }
        for (int i = 0; i < W; i++) store(a.dweight + (b * W + i) * a.D + c, dw[i], n);
        if (a.dbias) store(a.dbias + b * a.D + c, dbias, n);
        if (a.dstate)                                                    // the state's row r is the input at r - W + 1
            for (int r = 0; r < W - 1; r++) {
                vec sum = {};
                for (int i = 0; i <= r; i++) sum += w[i] * dp[r - i];    // dp[s] belongs to t = s here
                store(a.dstate + (b * (W - 1) + r) * a.D + c, sum, n);
            }
    }
}

// --------------------------------------------------------------------------------------------- CPU kernels: RMSNorm
// A task is a range of rows; in one pass over a row, what PyTorch's eager form does in five and its backward in twelve.

INLINE float lane_sum(vec v) { float s = 0; for (int l = 0; l < LANES; l++) s += v[l]; return s; }

template <class X, class Y> static void norm_forward_rows(const NormArgs &a, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
        const X *x = (const X *)a.x + r * a.D;
        Y *y = (Y *)a.y + r * a.D;
        vec squares = {};
        for (int64_t c = 0; c < a.D; c += LANES) { vec v = load(x + c, tail(a.D, c)); squares += v * v; }
        float rstd = 1.0f / __builtin_sqrtf(lane_sum(squares) / (float)a.D + (float)a.eps);
        a.rstd[r] = rstd;
        for (int64_t c = 0; c < a.D; c += LANES) {
            int n = tail(a.D, c);
            store(y + c, load(x + c, n) * rstd * load(a.weight + c, n), n);
        }
    }
}

template <class X, class Y> static void norm_backward_rows(const NormArgs &a, int64_t task, int64_t first, int64_t last) {
    Scratch scratch(ceil_div(a.D, LANES) * LANES);
    vec *dweight = scratch.take<vec>(ceil_div(a.D, LANES));
    for (int64_t i = 0; i < ceil_div(a.D, LANES); i++) dweight[i] = vec{};
    for (int64_t r = first; r < last; r++) {
        const X *x = (const X *)a.x + r * a.D;
        const Y *dy = (const Y *)a.dy + r * a.D;
        X *dx = (X *)a.dx + r * a.D;
        float rstd = a.rstd[r];
        vec product = {};
        for (int64_t c = 0; c < a.D; c += LANES) {
            int n = tail(a.D, c);
            vec v = load(x + c, n) * rstd, g = load(dy + c, n);
            dweight[c / LANES] += g * v;
            product += g * load(a.weight + c, n) * v;
        }
        float mean = lane_sum(product) / (float)a.D;
        for (int64_t c = 0; c < a.D; c += LANES) {
            int n = tail(a.D, c);
            store(dx + c, (load(dy + c, n) * load(a.weight + c, n) - load(x + c, n) * (rstd * mean)) * rstd, n);
        }
    }
    for (int64_t c = 0; c < a.D; c += LANES) store(a.dweight + task * a.D + c, dweight[c / LANES], tail(a.D, c));
}

// ------------------------------------------------------------------------------------------------- CPU: launch, C API
// Each task owns its outputs, and what tasks share is summed in a fixed order: two runs agree to the bit.

template <class A, class F> static void for_tasks(const A &a, F run) {     // run(batch row, split, first group, last group)
    const int64_t groups = ceil_div(a.D, LANES), tasks = a.B * a.splits;
    #pragma omp parallel for schedule(dynamic, 1) num_threads((int)a.threads)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t split = task % a.splits;
        run(task / a.splits, split, groups * split / a.splits, groups * (split + 1) / a.splits);
    }
}
template <class X, class Y> static void norm_forward(const NormArgs &a) {
    #pragma omp parallel for num_threads((int)a.threads)
    for (int64_t t = 0; t < a.tasks; t++) norm_forward_rows<X, Y>(a, a.rows * t / a.tasks, a.rows * (t + 1) / a.tasks);
}
template <class X, class Y> static void norm_backward(const NormArgs &a) {
    #pragma omp parallel for num_threads((int)a.threads)
    for (int64_t t = 0; t < a.tasks; t++) norm_backward_rows<X, Y>(a, t, a.rows * t / a.tasks, a.rows * (t + 1) / a.tasks);
}
template <class E, int NC> static void scan_forward(const ScanArgs &a) {
    for_tasks(a, [&](int64_t b, int64_t, int64_t first, int64_t last) { forward_task<E, NC>(a, b, first, last); });
}
template <class E, int NC> static void scan_backward(const ScanArgs &a) {
    for_tasks(a, [&](int64_t b, int64_t split, int64_t first, int64_t last) { backward_task<E, NC>(a, b, split, first, last); });
}
template <class E, int WC> static void conv_forward(const ConvArgs &a) {
    for_tasks(a, [&](int64_t b, int64_t, int64_t first, int64_t last) { conv_forward_task<E, WC>(a, b, first, last); });
}
template <class E, int WC> static void conv_backward(const ConvArgs &a) {
    for_tasks(a, [&](int64_t b, int64_t, int64_t first, int64_t last) { conv_backward_task<E, WC>(a, b, first, last); });
}

// Picks the instance for the dtype, and for a size known at compile time where it is one that models use.
#define DISPATCH(f, size) do { if (a->dtype == BFLOAT16) f<bf16, size>(*a); else f<float, size>(*a); } while (0)
#define DISPATCH_SCAN(f) do { if (a->N == 16) DISPATCH(f, 16); else if (a->N == 8) DISPATCH(f, 8); else DISPATCH(f, 0); } while (0)
#define DISPATCH_CONV(f) do { if (a->W == 4) DISPATCH(f, 4); else DISPATCH(f, 0); } while (0)
#define DISPATCH_NORM(f) do {                                                                                 \
    if (a->x_dtype == BFLOAT16) { if (a->y_dtype == BFLOAT16) f<bf16, bf16>(*a); else f<bf16, float>(*a); }    \
    else                        { if (a->y_dtype == BFLOAT16) f<float, bf16>(*a); else f<float, float>(*a); } } while (0)

extern "C" {
int64_t longhorn_chunk(void) { return CHUNK; }
int64_t longhorn_lanes(void) { return LANES; }
int64_t longhorn_max_width(void) { return MAX_WIDTH; }
int64_t longhorn_args_size(void) { return (sizeof(ScanArgs) * 1000 + sizeof(ConvArgs)) * 1000 + sizeof(NormArgs); }
int longhorn_has_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
void longhorn_scan_forward_cpu(const ScanArgs *a) { DISPATCH_SCAN(scan_forward); }
void longhorn_scan_backward_cpu(const ScanArgs *a) { DISPATCH_SCAN(scan_backward); }
void causal_conv_forward_cpu(const ConvArgs *a) { DISPATCH_CONV(conv_forward); }
void causal_conv_backward_cpu(const ConvArgs *a) { DISPATCH_CONV(conv_backward); }
void rms_norm_forward_cpu(const NormArgs *a) { DISPATCH_NORM(norm_forward); }
void rms_norm_backward_cpu(const NormArgs *a) { DISPATCH_NORM(norm_backward); }
}

#endif  // __CUDACC__
