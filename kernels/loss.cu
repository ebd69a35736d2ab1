// Computes a language model's loss from its logits on a GPU, and overwrites the logits with their gradient.
//
//   log p = logits[target] - log sum_v exp(logits[v])      d logits[v] = exp(logits[v]) / sum - (v == target)
//
// A block handles a row. Its lanes read the row once, 16 bytes at a time, and keep it in shared memory until the sum is
// known. A row too long for shared memory is read twice. So a 16-bit logit costs four bytes of traffic, or six.
// The order of sums depends on V and THREADS alone, so two runs agree to the bit. To check a change:
// python -m pytest tests/test_cuda.py tests/test_ptx.py -k loss

#ifndef THREADS
#define THREADS 512
#endif
#include "lanes.h"

// Mirrored in kernels/build.py.
struct LossArgs {
    int64_t V, stride, train;                          // train: overwrite the logits with the gradient
    void *logits;                                      // (n, V) of LOSS_TYPE: row r begins at r * stride
    const int64_t *targets;                            // (n,)
    float *log_p;                                      // (n,): the target's logit; afterwards its log-probability
};

#ifndef LONGHORN_SHIM
MATH float log2_fast(float v) { float l; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(l) : "f"(v)); return l; }   // 2^-22
#endif

#define AT_ONCE 4                                      // pieces that a lane reads before it uses the first
#define SUMS 256                                       // bytes for the sums of up to 32 warps
#define LN2 0.693147181f

// N numbers at an aligned address, which a lane reads at once into whole registers, as in Ahead.
template <class E> struct alignas(16) Piece {
    static constexpr int N = 16 / sizeof(E);
    uint32_t words[4];
    __device__ __forceinline__ float operator[](int i) const {
        return to_float(Ahead<E>{N == 4 ? words[i] : words[i / 2] >> i % 2 * 16});
    }
    __device__ __forceinline__ void set(int i, float v) {
        if (N == 4) words[i] = rounded(v, E());
        else if (i % 2 == 0) words[i / 2] = rounded(v, E());
        else words[i / 2] |= rounded(v, E()) << 16;
    }
};

// A row as pieces. If the row begins or ends within a piece, that piece also holds numbers of a neighbouring row.
template <class E> struct LossRow {
    static constexpr int N = Piece<E>::N;
    E *logits;
    Piece<E> *pieces;
    int V, lead, first, end, last;                     // lead: the previous row's numbers; whole pieces: first .. end
    __device__ __forceinline__ LossRow(const LossArgs &a) {
        logits = (E *)a.logits + blockIdx.x * a.stride;
        V = (int)a.V;
        lead = (int)((uint64_t)logits % 16 / sizeof(E));
        pieces = (Piece<E> *)(logits - lead);
        first = lead ? 1 : 0;
        end = (lead + V) / N;
        last = (lead + V - 1) / N;
    }
    // The partial piece at an edge of the row if this lane handles it, else -1.
    __device__ __forceinline__ int edge() const {
        if (threadIdx.x == 0 && first) return 0;
        return threadIdx.x == 1 && last >= end && last >= first ? last : -1;
    }
    __device__ __forceinline__ Piece<E> read_edge(int p) const {
        Piece<E> piece;
        #pragma unroll
        for (int i = 0; i < N; i++) {
            const int v = p * N + i - lead;
            piece.set(i, v >= 0 && v < V ? to_float(logits[v]) : __uint_as_float(0xff800000u));   // -inf adds nothing
        }
        return piece;
    }
    __device__ __forceinline__ void write_edge(int p, const Piece<E> &piece) const {
        #pragma unroll
        for (int i = 0; i < N; i++) {
            const int v = p * N + i - lead;
            if (v >= 0 && v < V) set(logits + v, piece[i]);
        }
    }
    // Calls f(p, piece p of `from`) for the lane's whole pieces; it reads AT_ONCE pieces before it uses the first.
    template <class F> __device__ __forceinline__ void for_pieces(const Piece<E> *from, F f) const {
        #pragma unroll 1
        for (int p = first + threadIdx.x; p < end; p += AT_ONCE * THREADS) {
            Piece<E> ahead[AT_ONCE];
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (p + i * THREADS < end) ahead[i] = from[p + i * THREADS];
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (p + i * THREADS < end) f(p + i * THREADS, ahead[i]);
        }
    }
};

// top: the largest number so far, finite from the start, because -inf - -inf is NaN. sum: the sum of
// 2^(LOG2E (x - top)) over the numbers x so far.
struct LogSum {
    float top = -1e38f, sum = 0.0f;
    template <class E> __device__ __forceinline__ void add(const Piece<E> &piece) {
        const float before = top;
        #pragma unroll
        for (int i = 0; i < Piece<E>::N; i++) top = maximum(piece[i], top);
        sum *= exp2_fast((before - top) * LOG2E);
        #pragma unroll
        for (int i = 0; i < Piece<E>::N; i++) sum += exp2_fast((piece[i] - top) * LOG2E);
    }
    // Joins the lanes of a warp; all lanes get the same numbers.
    __device__ __forceinline__ void over_lanes() {
        const float before = top;
        #pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) top = maximum(__shfl_xor_sync(ALL_LANES, top, mask), top);
        sum *= exp2_fast((before - top) * LOG2E);
        #pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
    }
};

// Subtracting top first keeps all digits of a large logit.
template <class E> MATH Piece<E> gradient(const Piece<E> &logits, float top, float log2_sum) {
    Piece<E> piece;
    #pragma unroll
    for (int i = 0; i < Piece<E>::N; i++) piece.set(i, exp2_fast(__fmaf_rn(logits[i] - top, LOG2E, -log2_sum)));
    return piece;
}

// KEEP: the row stays in shared memory.
template <class E, bool KEEP> MATH void loss(const LossArgs &a) {
    constexpr int WARPS = THREADS / 32;
    float *const sums = SHARED_MEMORY;                 // per warp: tops, then sums
    Piece<E> *const kept = (Piece<E> *)(sums + SUMS / 4);
    const LossRow<E> row(a);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, edge = row.edge();
    const float target_logit = a.log_p[blockIdx.x];
    LogSum s;
    if (edge >= 0) s.add(row.read_edge(edge));
    row.for_pieces(row.pieces, [&](int p, const Piece<E> &piece) {
        if constexpr (KEEP) kept[p] = piece;
        s.add(piece);
    });
    s.over_lanes();
    if (lane == 0) { sums[warp] = s.top; sums[32 + warp] = s.sum; }
    __syncthreads();  // test: loss barrier
    s = LogSum();
    if (lane < WARPS) { s.top = sums[lane]; s.sum = sums[32 + lane]; }
    s.over_lanes();
    const float log2_sum = log2_fast(s.sum);
    const float log_p = target_logit - s.top - log2_sum * LN2;
    if (threadIdx.x == 0) a.log_p[blockIdx.x] = log_p;
    if (!a.train) return;
    if (edge >= 0) row.write_edge(edge, gradient(row.read_edge(edge), s.top, log2_sum));
    row.for_pieces(KEEP ? kept : row.pieces, [&](int p, const Piece<E> &piece) {
        row.pieces[p] = gradient(piece, s.top, log2_sum);
    });
    __syncthreads();                                   // the target's number was written by another lane
    if (threadIdx.x == 0) set(row.logits + a.targets[blockIdx.x], exp2_fast(log_p * LOG2E) - 1.0f);
}

// LOSS_ROOM: bytes of a row's whole pieces in shared memory, or 0
extern "C" {
KERNEL(loss_kernel, 2, LossArgs, (loss<LOSS_TYPE, (LOSS_ROOM > 0)>(a)))
__device__ int64_t facts[] = {0, sizeof(LossArgs), THREADS, 0, 0, LOSS_ROOM + SUMS};
}
