// The scan kernels, for GPU and CPU: Longhorn, its exact form, and Mamba.
//
//   Longhorn   eps_i = 1 / (1 + exp(-(dt_i + bias_i)) + |k|^2)         = beta / (1 + beta |k|^2), Eq. 6
//              S_ij += (eps_i k_j) (x_i - k_j S_ij)                    Eq. 7
//   Exact      S_ij += (eps_i k_j) (x_i - sum_l k_l S_il)              Eq. 6 without the diagonal approximation
//   Mamba      S_ij  = exp(delta_i A_ij) S_ij + delta_i x_i k_j        delta = softplus(dt + bias); k, q: its B, C
//   all three  y_i   = (sum_j S_ij q_j + D_i x_i) * silu(z_i)          Algorithm 1, Mamba's skip and gate
//
// One file, two compilers: a C++ compiler builds the CPU kernels (`c++ -x c++`), nvcc or NVRTC the CUDA kernels. The
// three updates are written once, for a float (one GPU lane) and for a vector of channels (the CPU); lanes.h defines
// both. kernels/build.py compiles this file on first use; docs/kernels.md explains the design.
//
// Glossary
//   paper    here   shape        meaning
//   -        B, T, D, N          batch, steps, channels, states per channel
//   x_t      x      (B, T, D)    value to remember
//   W_b x_t  dt     (B, T, D)    logit of the step size beta
//   k_t, q_t k, q   (B, T, N)    key and query, shared by all channels; Mamba's B and C
//   -        z      (B, T, D)    gate
//   -        skip, bias (D,)     Mamba's D; the bias added to dt
//   S_t      S      N per channel, float32
//   eps_t    size   (B, T, D)    step size: eps, or Mamba's delta
//   dL/dS_t  G      like S       gradient from later steps
//   |k|^2    kk     (B, T)
//   -        row, chunk, segment a batch row or a packed sequence; CHUNK steps of it; a part of T (GPU only)
//
// Order: arguments, updates, CUDA, CPU. To check a change:
// python -m pytest tests/test_conformance.py tests/test_cuda.py

#include "kernels/lanes.h"

// The forward keeps the state every CHUNK steps, which takes 4 / 32 = 1/8 byte per token, channel and state. The
// backward recomputes the states in between. Dividing by the forget gate instead would lose the gradient at large keys.
#define CHUNK 32

enum { LONGHORN = 0, EXACT = 1, MAMBA = 2 };

// Mirrored in kernels/build.py. Strides count elements; the last dimension of every tensor is contiguous; absent
// tensors are null. To run from the last step to the first, strides are negative and pointers are at the very last row:
// the kernels need no extra code.
struct ScanArgs {
    int64_t B, T, D, N;                               // with cu: B sequences, packed into one row of T tokens
    int64_t update, softplus;                         // Mamba: delta = softplus(dt + bias), or dt + bias
    int64_t dtype;                                    // of x, dt, k, q, z, y and their gradients
    int64_t splits, threads;                          // splits: of the channels, so that every thread has work
    int64_t segments, segment_T, reverse;             // CUDA: T may be split, see combine; then rows = B x segments
    const int64_t *cu;                                // (B + 1,): sequence b is the tokens cu[b] .. cu[b + 1]
    const void *x, *dt, *k, *q, *z;                   // (B, T, D | N)
    int64_t x_b, x_t, dt_b, dt_t, k_b, k_t, q_b, q_t, z_b, z_t;
    const float *A, *skip, *bias, *h0;                // (D, N) Mamba's, (D,), (D,), (B, D, N)
    void *y;                                          // (B, T, D): row (b, t) at (b T + t) out_t
    int64_t out_t;
    float *hT, *chunks;                               // (rows, D, N); (all chunks, N rounded up to fours, D), see Row
    float *decay;                                     // (rows, D, N), with segments: products of forget gates
    // backward only
    const void *dy;                                   // (B, T, D)
    int64_t dy_b, dy_t;
    const float *dhT;                                 // (B, D, N)
    void *dx, *ddt;                                   // (B, T, D), as y
    void *dz;                                         // (B, T, D), as y but with dz_t: half of a wider row
    int64_t dz_t;
    float *dk, *dq;                                   // (splits, B, T, N): the caller sums over splits
    float *dA, *dskip, *dbias;                        // (B, D, N), (B, D), (B, D): the caller sums over rows
    float *dh0;                                       // (B, D, N)
};

// A batch row, a segment of a row, or a packed sequence. start: its first token in the contiguous order of (B, T).
// T: its length. chunk: the index of its first chunk state. b, t: its place in the input tensors. Packed sequences
// leave gaps between their chunks, so no prefix sum is needed: cu[b] / CHUNK + b is at least the number of chunks of
// the sequences before b.
struct Row { int64_t start, T, chunk, b, t; };

MATH Row row_of(const ScanArgs &a, int64_t r) {
    if (a.cu) return {a.cu[r], a.cu[r + 1] - a.cu[r], a.cu[r] / CHUNK + r, 0, a.cu[r]};
    // 64-bit division is a function call on a GPU
    const uint32_t segments = (uint32_t)a.segments, b = (uint32_t)r / segments;
    const int64_t t = ((uint32_t)r - b * segments) * a.segment_T, left = a.T - t;
    return {b * a.T + t, left < a.segment_T ? left : a.segment_T, b * ceil_div(a.T, CHUNK) + t / CHUNK, (int64_t)b, t};
}
MATH int64_t offset(const Row &row, int64_t stride_b, int64_t stride_t) { return row.b * stride_b + row.t * stride_t; }
MATH int64_t tokens(const ScanArgs &a) { return a.cu ? a.T : a.B * a.T; }

// --------------------------------------------------------------------------------------------------------- the updates
// V is a float or a vector of channels. An update defines
//   step    the values of a channel's step that do not depend on the state
//   decay   exp(delta A), for Mamba; forget: the forget gate of any update
//   next    S_t from S_{t-1}
//   keep    the function of S_{t-1} that `back` needs, which `next` computes anyway
//   back    dL/dS_{t-1} from G = dL/dS_t, and sums over j
//   finish  the gradients of the step's inputs from those sums
// and flags for the kernels: rates (it has A), norm (it needs |k|^2), whole (it needs a sum over j before it updates a
// state).

template <class V> struct Step { V x, size, slope, residual; };   // slope: d size / d dt up to factors of size
template <class V> struct Sums { V dx, dsize; };               // over a channel's states
template <class V> struct StepGrads { V dx, ddt, dkk; };       // dkk: minus |k|^2's gradient; dk_j -= 2 k_j sum_i dkk_i

template <class V> MATH Step<V> longhorn_step(V x, V dt, V bias, float kk) {
    const V e = exp_minus(dt, bias);
    return {x, reciprocal(1.0f + e + kk), minimum(e, 1.7e38f), x};       // clamped: size * slope is 0 where e is inf
}
// de = eps deps: eps^2 alone would underflow
template <class V> MATH StepGrads<V> longhorn_grads(const Step<V> &s, V dx, V de) {
    return {dx, de * (s.size * s.slope), de * s.size};  // test: step gradients
}

struct Longhorn {
    static const bool rates = false, norm = true, whole = false;
    template <class V> MATH Step<V> step(V x, V dt, V bias, float kk, int64_t) {
        return longhorn_step(x, dt, bias, kk);  // test: step
    }
    template <class V> MATH V decay(const Step<V> &, V) { return V{}; }
    template <class V> MATH V forget(const Step<V> &s, float k, V) { return 1.0f - (s.size * k) * k; }
    template <class V> MATH V next(const Step<V> &s, V S, float k, V) { return S + (s.size * k) * (s.x - k * S); }
    // a value that `next` computes too
    template <class V> MATH V keep(const Step<V> &s, V S, float k) { return s.x - k * S; }
    template <class V> MATH V back(const Step<V> &s, V error, float k, V, V, V g, V, Sums<V> &sums, V &dk, V &) {
        const V ge = g * s.size, gek = ge * k;
        sums.dx += gek;
        sums.dsize += gek * error;
        dk += ge * twice_less(error, s.x);                     // x - 2 k S
        return g - k * gek;
    }
    template <class V> MATH StepGrads<V> finish(const Step<V> &s, const Sums<V> &sums, V) {
        return longhorn_grads(s, sums.dx, sums.dsize);
    }
};

struct Exact {                                                 // residual: x - sum_j k_j S_j; Gk: sum_j G_j k_j
    static const bool rates = false, norm = true, whole = true;
    template <class V> MATH Step<V> step(V x, V dt, V bias, float kk, int64_t) {
        return longhorn_step(x, dt, bias, kk);
    }
    template <class V> MATH V decay(const Step<V> &, V) { return V{}; }
    template <class V> MATH V forget(const Step<V> &, float, V) { return V{}; }        // a matrix, so no segments
    template <class V> MATH V next(const Step<V> &s, V S, float k, V) { return S + (s.size * k) * s.residual; }
    template <class V> MATH V keep(const Step<V> &, V S, float) { return S; }
    template <class V> MATH V back(const Step<V> &s, V S, float k, V, V, V g, V Gk, Sums<V> &, V &dk, V &) {
        dk += s.size * (g * s.residual - Gk * S);
        return g - (s.size * Gk) * k;
    }
    template <class V> MATH StepGrads<V> finish(const Step<V> &s, const Sums<V> &, V Gk) {
        return longhorn_grads(s, s.size * Gk, s.size * Gk * s.residual);
    }
};

// log(1 + t) = 2 artanh(t / (2 + t)) for t in [0, 1]. After 8 terms the series is exact to a bit, also near 0.
template <class V> MATH V log1p_series(V t) {
    const V s = t * reciprocal(2.0f + t), w = s * s;
    V p = w * (1.0f / 15.0f) + 1.0f / 13.0f;
    p = p * w + 1.0f / 11.0f;
    p = p * w + 1.0f / 9.0f;
    p = p * w + 1.0f / 7.0f;
    p = p * w + 1.0f / 5.0f;
    p = p * w + 1.0f / 3.0f;
    return (s + s) * (p * w + 1.0f);
}

struct Mamba {                                                 // rates are A / ln 2: a power of 2 is cheaper
    static const bool rates = true, norm = false, whole = false;
    template <class V> MATH Step<V> step(V x, V logit, V bias, float, int64_t softplus) {
        const V dt = logit + bias;
        if (!softplus) return {x, dt, V{} + 1.0f, V{}};
        const V e = exp_clamped(select_positive(dt, -dt, dt)), r = reciprocal(1.0f + e);
        const V delta = maximum(dt, 0.0f) + log1p_series(e);
        return {x, delta, select_positive(dt, r, e * r), V{}};
    }
    template <class V> MATH V decay(const Step<V> &s, V rate) { return exp2_clamped(s.size * rate); }
    template <class V> MATH V forget(const Step<V> &, float, V decay) { return decay; }
    template <class V> MATH V next(const Step<V> &s, V S, float k, V decay) { return decay * S + (s.size * s.x) * k; }
    template <class V> MATH V keep(const Step<V> &, V S, float) { return S; }
    template <class V> MATH V back(const Step<V> &s, V S, float k, V rate, V decay, V g, V, Sums<V> &sums, V &dk,
                                   V &drate) {
        const V ga = g * decay, gaS = ga * S;
        sums.dx += g * k;
        sums.dsize += rate * gaS;
        drate += s.size * gaS;
        dk += g * (s.size * s.x);
        return ga;
    }
    template <class V> MATH StepGrads<V> finish(const Step<V> &s, const Sums<V> &sums, V) {
        return {s.size * sums.dx, (0.693147181f * sums.dsize + s.x * sums.dx) * s.slope, V{}};
    }
};

#ifdef ON_GPU

// ------------------------------------------------------------------------------------------------------ CUDA: the scan
// One lane holds P states of C = 2 channels in registers; L lanes (a power of two, at least 2) share these channels. At
// N = 16 two lanes hold 8 states of two channels each: compared with 16 states of one channel, a lane reads half as
// much of k and q, and half as many sums over channels remain. A channel's owner lane computes the values that do not
// depend on the state. More lanes share two channels if N is larger, or if B x D is too small to fill the GPU. A block
// of THREADS lanes handles THREADS / L * C channels of one row and walks over all of T. k and q go through shared
// memory as float32, zero beyond N (where states stay zero). If T, D, N and the addresses allow it, x, dt, z and dy are
// fetched ahead by asynchronous copies (WarpRows). Otherwise lanes read them from their rows, coalesced because
// channels are contiguous.
//
// Instructions and bytes were counted (no hardware counters were read): these kernels are bound by instructions, not
// memory. Therefore steps and byte strides have 32 bits, so an address is one multiply-add. And the order of states in
// registers depends on the lane (ChannelSums).

#ifndef TILE
#define TILE 4                                         // steps whose rows the forward reads ahead; divides KEYS
#endif
#ifndef KEYS
#define KEYS 16                                        // steps whose keys are staged at once; divides CHUNK
#endif
#ifndef LONGER
#define LONGER 2                                       // factor for both if the forward fetches ahead (no registers)
#endif
#define LONGER_ROW 128                                 // largest row of keys, in bytes, for LONGER * KEYS steps
#ifndef SUB
#define SUB 4                                          // steps whose states the backward keeps in registers
#endif
enum { C = 2 };                                        // channels per lane
static_assert(CHUNK % KEYS == 0 && KEYS % TILE == 0 && CHUNK % SUB == 0);

// Each of the L lanes that share two channels holds a part of both channels' sums, and gets the whole sum of its own
// channel. Index 0 is its own channel, index 1 the neighbour's.
template <int L> MATH float sum_states(const float (&v)[C]) {
    float sum = v[0] + __shfl_xor_sync(ALL_LANES, v[1], 1);
    #pragma unroll
    for (int m = L / 2; m >= C; m /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, m);
    return sum;
}
MATH void share(float value, float (&all)[C]) {                          // all: a lane's own value, and the neighbour's
    all[0] = value;
    all[1] = __shfl_xor_sync(ALL_LANES, value, 1);
}

// Sums P values over the lanes of a warp that are L apart, which hold the same states of different channels. It is a
// butterfly that halves the values while it adds: a lane sends half of its values to the lane m away and adds the
// values that come back to the other half. 16 values over 32 lanes take 16 shuffles instead of 80. In the end
// v[0 .. kept) are the sums of states first .. first + kept. The half that a lane sends depends on the lane, and
// choosing it would cost two selects per value. So lanes hold their states in different orders, in groups of four:
// register i is state i ^ order, and every lane sends its upper half.
template <int P, int L> struct ChannelSums {
    static const int kept = P > 32 / L ? P * L / 32 : 1;
    int first, order;
    bool writer;                                                         // true for one of the lanes with the same sums
    __device__ __forceinline__ ChannelSums(int lane) {
        first = order = 0;
        writer = true;
        int count = P;
        #pragma unroll
        for (int m = 16; m >= L; m /= 2) {
            if (count == 1) { writer = writer && !(lane & m); continue; }
            count /= 2;
            first += lane & m ? count : 0;
            if (count >= 4) order += lane & m ? count : 0;
        }
    }
    __device__ __forceinline__ void operator()(float (&v)[P], int lane) const { run<P, 16>(v, lane); }
    template <int COUNT, int M> __device__ __forceinline__ void run(float (&v)[P], int lane) const {
        if constexpr (M >= L && COUNT > 1) {
            const int upper = COUNT / 2 < 4 ? lane & M : 0;
            #pragma unroll
            for (int i = 0; i < COUNT / 2; i++) {
                const float give = pick(upper, v[i], v[i + COUNT / 2]), keep = pick(upper, v[i + COUNT / 2], v[i]);
                v[i] = keep + __shfl_xor_sync(ALL_LANES, give, M);
            }
            run<COUNT / 2, M / 2>(v, lane);
        } else if constexpr (M >= L) {
            v[0] += __shfl_xor_sync(ALL_LANES, v[0], M);
            run<1, M / 2>(v, lane);
        }
    }
};

// The place of a channel's state j in a row of shared memory. A lane reads its P states four at a time, eight lanes at
// once: if each lane's states were contiguous, every fourth lane would read from the same banks.
template <int P, int L> MATH int place(int j) { return j % P / 4 * (4 * L) + j / P * 4 + j % 4; }
template <int P, int L> MATH int state_at(int place) { return place / 4 % L * P + place / (4 * L) * 4 + place % 4; }

// Reads a lane's P numbers from such a row, in the lane's order.
struct alignas(16) Four { float v[4]; };
template <int L, int P> MATH void read_four(const float *row, int part, int order, float (&to)[P]) {
    #pragma unroll
    for (int g = 0; g < P; g += 4) {
        const Four four = *(const Four *)(row + (g ^ order) * L + part * 4);
        #pragma unroll
        for (int i = 0; i < 4; i++) to[g + i] = four.v[i];
    }
}

// Writes a lane's `kept` sums, from its state `first` on, to a row of shared memory, contiguous ones in one store.
template <int P, int L, int KEPT> MATH void put_sums(float *row, int part, int first, const float (&v)[P]) {
    if (KEPT == 1) row[place<P, L>(part * P + first)] = v[0];
    if (KEPT == 2) store_two(row + place<P, L>(part * P + first), v[0], v[1]);
    #pragma unroll
    for (int j = 0; j + 4 <= KEPT; j += 4)
        *(Four *)(row + place<P, L>(part * P + first + j)) = {{v[j], v[j + 1], v[j + 2], v[j + 3]}};
}

// A lane's private numbers in shared memory, four at a time: `all` is [P / 4][THREADS].
template <int P> MATH void put_own(Four (*all)[THREADS], int tid, const float (&from)[P]) {
    #pragma unroll
    for (int g = 0; g < P; g += 4) all[g / 4][tid] = {{from[g], from[g + 1], from[g + 2], from[g + 3]}};
}
template <int P> MATH void get_own(const Four (*all)[THREADS], int tid, float (&to)[P]) {
    #pragma unroll
    for (int g = 0; g < P; g += 4) {
        const Four four = all[g / 4][tid];
        #pragma unroll
        for (int i = 0; i < 4; i++) to[g + i] = four.v[i];
    }
}

// ROWS rows of k and q: `load` starts reading them, `store` writes them and |k|^2 to shared memory. An item is four
// numbers of a row, or GROUPS times four; W items make a row. All items of k come first, then all of q.
template <class U, class E, int P, int L, int ROWS> struct KeyRows {
    // STEP: columns from one group to the next
    static const int NP = P * L, STEP = 128 / L;
    static const int W = NP < 128 ? NP / 4 : 32, GROUPS = NP / (4 * W), ITEMS = ROWS * W;
    static const int PASSES = (2 * ITEMS + THREADS - 1) / THREADS;
    struct Raw { struct alignas(4 * sizeof(E)) { E v[4]; } item[PASSES][GROUPS][THREADS]; };
    // this lane's column of k at step 0; in a single pass, upper lanes have q's
    const E *from;
    int stride, row, left;                                               // left: columns from this lane's to the end
    const E *from_q;                                                     // for passes that read either k or q, not both
    int stride_q;
    E v[PASSES][GROUPS][4];
    __device__ __forceinline__ KeyRows(const ScanArgs &a, const Row &r) {
        const int lane = opaque(threadIdx.x);
        const int column = state_at<P, L>(lane % W * 4);                 // so that lanes store to neighbouring places
        const bool of_k = PASSES > 1 || lane < ITEMS;
        from_q = (const E *)a.q + offset(r, a.q_b, a.q_t) + column;
        stride_q = (int)(a.q_t * sizeof(E));
        from = of_k ? (const E *)a.k + offset(r, a.k_b, a.k_t) + column : from_q;
        stride = of_k ? (int)(a.k_t * sizeof(E)) : stride_q;
        row = lane % ITEMS / W;
        left = lane < 2 * ITEMS ? (int)a.N - column : 0;
    }
    __device__ __forceinline__ const E *at_step(int t, int p) const {
        return PASSES > 1 && p * THREADS >= ITEMS ? step_at(from_q, t, stride_q) : step_at(from, t, stride);
    }
    __device__ __forceinline__ void load(int t0, int T) {
        #pragma unroll
        for (int p = 0; p < PASSES; p++) {
            const int t = t0 + row + p * THREADS % ITEMS / W, valid = t < T ? left : 0;
            const E *at = at_step(t, p);
            #pragma unroll
            for (int g = 0; g < GROUPS; g++)
                #pragma unroll
                for (int i = 0; i < 4; i++) v[p][g][i] = g * STEP + i < valid ? at[g * STEP + i] : E{};
        }
    }
    // The same by asynchronous copies through shared memory, for full ROWS and columns: `begin` starts the copies,
    // `take` reads the rows once they have arrived.
    __device__ __forceinline__ void begin(Raw &raw, int t0) const {
        #pragma unroll
        for (int p = 0; p < PASSES; p++)
            #pragma unroll
            for (int g = 0; g < GROUPS; g++)
                if (2 * ITEMS >= THREADS || threadIdx.x < 2 * ITEMS)
                    copy_begin<4 * sizeof(E)>(&raw.item[p][g][threadIdx.x],
                                              at_step(t0 + row + p * THREADS % ITEMS / W, p) + g * STEP);
    }
    __device__ __forceinline__ void take(const Raw &raw) {
        #pragma unroll
        for (int p = 0; p < PASSES; p++)
            #pragma unroll
            for (int g = 0; g < GROUPS; g++)
                #pragma unroll
                for (int i = 0; i < 4; i++) v[p][g][i] = raw.item[p][g][threadIdx.x].v[i];
    }
    __device__ __forceinline__ void store(float (*to_k)[NP], float (*to_q)[NP], float *kk) const {
        #pragma unroll
        for (int p = 0; p < PASSES; p++) {
            const int item = threadIdx.x + p * THREADS, row = item / W % ROWS;
            float sum = 0.0f;
            #pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                Four four;
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    four.v[i] = to_float(v[p][g][i]);
                    sum += four.v[i] * four.v[i];
                }
                if (item < 2 * ITEMS) *(Four *)((item < ITEMS ? to_k : to_q)[row] + (g * W + item % W) * 4) = four;
            }
            if (!U::norm || p * THREADS >= ITEMS) continue;
            #pragma unroll
            for (int m = W / 2; m > 0; m /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, m);
            if (item < ITEMS && item % W == 0) kk[row] = sum;
        }
    }
};

// A lane's place in the work. Channels beyond D are computed as copies of the last one and not written.
template <int L> struct Place {
    int tid, lane, warp, part;                         // part: index among the L lanes that share two channels
    int block, b;                                      // block within the row; row
    int channel[C];                                    // own, neighbour's
    bool live[C], owner;                               // owner: of the lanes with this channel, the one that writes
    Row row;
    __device__ __forceinline__ Place(const ScanArgs &a) {
        tid = threadIdx.x; lane = tid & 31; warp = tid >> 5; part = tid % L;
        const unsigned blocks = (unsigned)ceil_div(a.D, THREADS / L * C);
        block = blockIdx.x % blocks; b = blockIdx.x / blocks;
        owner = part < C;
        #pragma unroll
        for (int n = 0; n < C; n++) {
            channel[n] = block * (THREADS / L * C) + tid / L * C + (part % C ^ n);
            live[n] = channel[n] < a.D;
            if (!live[n]) channel[n] = (int)a.D - 1;
        }
        row = row_of(a, b);
    }
};

// Reads a tensor (B, T, D) at a lane's channel, step t.
template <class E> struct Channel {
    const E *row;
    int stride;
    __device__ __forceinline__ Channel(const Row &r, int c, const void *p, int64_t stride_b, int64_t stride_t) {
        row = (const E *)p + offset(r, stride_b, stride_t) + c;
        stride = (int)(stride_t * sizeof(E));
    }
    __device__ __forceinline__ Ahead<E> operator()(int t) const { return read(step_at(row, t, stride)); }
};

// Fetches rows of TENSORS (B, T, D) tensors for a warp, ROWS steps of its channels per stage, by asynchronous copies of
// 16 bytes per lane. The copies need no registers on the way. A warp has only six scoreboards, which reads into
// registers would share with all other slow instructions: one that waits for a shuffle would also wait for memory.
struct Source { const void *p; int64_t stride_b, stride_t; };
template <class E, int L, int TENSORS, int ROWS> struct WarpRows {
    static const int CHANNELS = 32 / L * C, BYTES = CHANNELS * sizeof(E), PIECES = BYTES < 16 ? 1 : BYTES / 16;
    static const int PER_TENSOR = ROWS * PIECES;                         // pieces per tensor and stage
    static const int PASSES = PER_TENSOR > 32 ? PER_TENSOR / 32 : 1;     // passes per tensor, of 32 / PIECES rows each
    static const int TOGETHER = PER_TENSOR > 32 ? 1 : 32 / PER_TENSOR;   // tensors per pass
    static const int SETS = (TENSORS + TOGETHER - 1) / TOGETHER;         // sets of tensors that are fetched together
    static_assert(PER_TENSOR <= 32 || PER_TENSOR % 32 == 0);
    static const bool fits = BYTES >= 16;
    struct alignas(16) Stage { E row[TENSORS][ROWS][CHANNELS]; };
    const char *from[SETS];                                              // this lane's piece of its row, at step 0
    int stride[SETS], lane;
    __device__ __forceinline__ WarpRows(int lane, const Row &r, int channel, const Source (&all)[TENSORS])
        : lane(lane) {
        #pragma unroll
        for (int s = 0; s < SETS; s++) {
            #pragma unroll
            for (int n = 0; n < TOGETHER && s * TOGETHER + n < TENSORS; n++) {
                if (n && lane / PER_TENSOR != n) continue;
                const Source &one = all[s * TOGETHER + n];
                from[s] = (const char *)((const E *)one.p + offset(r, one.stride_b, one.stride_t) + channel);
                stride[s] = (int)(one.stride_t * sizeof(E));
            }
            from[s] = step_at(from[s], lane / PIECES % ROWS, stride[s]) + lane % PIECES * 16;
        }
    }
    // starts the copies of the first FIRST tensors
    template <int FIRST = TENSORS> __device__ __forceinline__ void begin(Stage &stage, int t) const {
        #pragma unroll
        for (int s = 0; s * TOGETHER < FIRST; s++)
            #pragma unroll
            for (int n = 0; n < PASSES; n++)
                if ((s + 1) * TOGETHER <= FIRST || lane / PER_TENSOR < FIRST - s * TOGETHER)
                    copy_begin<16>((char *)&stage + ((s * PASSES + n) * 32 + lane) * 16,
                                   step_at(from[s], t + n * (32 / PIECES), stride[s]));
    }
};

// The place where the forward stores four states of a channel before a chunk, for the backward. All of them are
// (chunks, N / 4, D) fours.
template <int P> MATH Four *kept_states(const ScanArgs &a, int64_t chunk, int part, int g, int channel) {
    return (Four *)a.chunks + (chunk * ceil_div(a.N, 4) + (part * P + g) / 4) * a.D + channel;
}

// S_t from S_{t-1}. S[n P .. n P + P) are the states of channel n. Of the neighbour's step only x and size are known
// beforehand.
template <class U, int L, int P, class R>
MATH void next_states(Step<float> (&s)[C], float (&S)[C * P], const float (&k)[P], R rate) {
    if (U::whole) {
        float sum[C] = {}, residual[C];
        #pragma unroll
        for (int i = 0; i < C * P; i++) sum[i / P] += k[i % P] * S[i];
        share(s[0].x - sum_states<L>(sum), residual);
        #pragma unroll
        for (int n = 0; n < C; n++) s[n].residual = residual[n];
    }
    #pragma unroll
    for (int i = 0; i < C * P; i++) S[i] = U::next(s[i / P], S[i], k[i % P], U::decay(s[i / P], rate(i)));
}
MATH void share_step(Step<float> step, Step<float> (&all)[C]) {
    float x[C], size[C];
    share(step.x, x);
    share(step.size, size);
    #pragma unroll
    for (int n = 0; n < C; n++) all[n] = n ? Step<float>{x[n], size[n], 0.0f, 0.0f} : step;
}

// WHOLE, for the kernels below: the steps of every row fill whole chunks, its channels whole blocks, and there is a
// gate. Then no step checks bounds. Nearly every call is like this, and the checks are a tenth of the backward's
// instructions.

#ifndef STAGES
#define STAGES 2                                       // stages of the forward's rows; divides KEYS / TILE
#endif
// two buffers
template <int P, int L, int BATCH> struct ForwardShared { float k[2][BATCH][P * L], q[2][BATCH][P * L], kk[2][BATCH]; };
template <class E, int P, int L> constexpr int fetched_keys = P * L * sizeof(E) > LONGER_ROW ? KEYS : LONGER * KEYS;
template <class U, class E, int P, int L> struct AsyncForwardShared
    : ForwardShared<P, L, fetched_keys<E, P, L>> {
    static const int STEPS = LONGER * TILE, BATCH = fetched_keys<E, P, L>;
    static_assert(CHUNK % BATCH == 0 && BATCH % STEPS == 0);             // a chunk is a whole number of batches
    static_assert(BATCH / STEPS >= STAGES && BATCH / STEPS % STAGES == 0);  // the next keys arrive before a batch ends
    typedef WarpRows<E, L, 3, STEPS> Rows;                            // of x, dt, z
    typename Rows::Stage rows[THREADS / 32][STAGES];
    typename KeyRows<U, E, P, L, BATCH>::Raw raw;
};

// If rows are too few to fill the GPU, T is split into segments (only if WHOLE and fetched ahead). With SEGMENT_STATE
// the forward computes, for each segment, its final state from a zero start and the product of its forget gates.
// `combine` turns these into the state before each segment, and the forward then runs over all segments at once. The
// backward joins its G in the same way (`scan_segment_grad`). The last segment's state and the first segment's G are
// not needed: their blocks return at once.
MATH bool is_segment(const ScanArgs &a, int row, int64_t which) {
    return (uint32_t)row % (uint32_t)a.segments == (uint32_t)which;
}

template <class U, class E, int P, int L, bool SEGMENT_STATE, bool WHOLE>
MATH void scan_forward(const ScanArgs &a) {
    typedef AsyncForwardShared<U, E, P, L> Shared;
    constexpr bool ASYNC = WHOLE && Shared::Rows::fits;
    constexpr int NP = P * L, STEPS = ASYNC ? Shared::STEPS : TILE, BATCH = ASYNC ? Shared::BATCH : KEYS;
    typedef ForwardShared<P, L, BATCH> Buffers;
    Buffers &s = *(Buffers *)SHARED_MEMORY;
    Shared &async = *(Shared *)SHARED_MEMORY;                            // if ASYNC
    static_assert(WHOLE || !SEGMENT_STATE);
    const Place<L> at(a);
    if (SEGMENT_STATE && is_segment(a, at.b, a.segments - 1)) return;
    const int T = (int)at.row.T, N = (int)a.N, out_t = (int)(a.out_t * sizeof(E));
    const int b = at.b, c = at.channel[0];
    const bool gated = !SEGMENT_STATE && (WHOLE || a.z), writer = !SEGMENT_STATE && (WHOLE || at.live[0]) && at.owner;
    auto within = [&](int t) { return WHOLE || t < T; };
    const Channel<E> x(at.row, c, a.x, a.x_b, a.x_t), dt(at.row, c, a.dt, a.dt_b, a.dt_t);
    const Channel<E> z = gated ? Channel<E>(at.row, c, a.z, a.z_b, a.z_t) : x;
    E *y = (E *)((char *)a.y + at.row.start * out_t) + c;
    const float bias = a.bias ? a.bias[c] : 0.0f, skip = a.skip ? a.skip[c] : 0.0f;
    float S[C * P], rates[C * P], gates[C * P];
    #pragma unroll
    for (int i = 0; i < C * P; i++) {
        const int j = at.part * P + i % P;
        const int64_t channel = at.channel[i / P];
        S[i] = !SEGMENT_STATE && a.h0 && j < N ? a.h0[(b * a.D + channel) * N + j] : 0.0f;
        rates[i] = U::rates && j < N ? LOG2E * a.A[channel * N + j] : 0.0f;
        gates[i] = 1.0f;
    }
    Ahead<E> xs[STEPS], dts[STEPS], zs[STEPS];
    auto read_rows = [&](int t0) {                                       // beyond T: the last row again
        const int first = t0 < T - STEPS ? t0 : T - STEPS;
        #pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int t = WHOLE ? first + i : t0 + i < T ? t0 + i : T - 1;
            xs[i] = x(t);
            dts[i] = dt(t);
            if (!SEGMENT_STATE) zs[i] = z(t);
        }
    };
    KeyRows<U, E, P, L, BATCH> keys(a, at.row);
    const int col = at.channel[0] % Shared::Rows::CHANNELS;              // among the warp's channels
    const typename Shared::Rows rows(at.lane, at.row, c - col,
                                     {{a.x, a.x_b, a.x_t}, {a.dt, a.dt_b, a.dt_t}, {a.z, a.z_b, a.z_t}});
    auto begin_rows = [&](int t) {
        rows.template begin<SEGMENT_STATE ? 2 : 3>(async.rows[at.warp][t / STEPS % STAGES], t < T ? t : T - STEPS);
        copy_group();
    };
    if constexpr (ASYNC) {
        keys.begin(async.raw, 0);
        #pragma unroll
        for (int n = 0; n < STAGES - 1; n++) begin_rows(n * STEPS);
        copy_wait<STAGES - 2>();
        keys.take(async.raw);
    } else {
        keys.load(0, T);
        if (T > 0) read_rows(0);                                         // a packed sequence may be empty
    }
    keys.store(s.k[0], s.q[0], s.kk[0]);
    __syncthreads();
    int buffer = 0;
    for (int batch = 0; batch < T; batch += BATCH, buffer ^= 1) {
        if (!SEGMENT_STATE && a.chunks && batch % CHUNK == 0)
            #pragma unroll
            for (int n = 0; n < C; n++)
                #pragma unroll
                for (int g = 0; g < P; g += 4)
                    if (WHOLE || (at.live[n] && at.part * P + g < N))
                        *kept_states<P>(a, at.row.chunk + batch / CHUNK, at.part, g, at.channel[n]) =
                            {{S[n * P + g], S[n * P + g + 1], S[n * P + g + 2], S[n * P + g + 3]}};
        if constexpr (ASYNC) keys.begin(async.raw, batch + BATCH < T ? batch + BATCH : batch);
        else keys.load(batch + BATCH, T);                                // in flight while this batch is computed
        #pragma unroll 1
        for (int t0 = batch; t0 < batch + BATCH && within(t0); t0 += STEPS) {
            float xf[STEPS], dtf[STEPS], gate[STEPS];
            if constexpr (ASYNC) {
                copy_wait<STAGES - 2>();  // test: forward waits
                __syncwarp();                                            // all lanes' copies have arrived
                begin_rows(t0 + (STAGES - 1) * STEPS);
            }
            #pragma unroll
            for (int i = 0; i < STEPS; i++) {
                auto &now = async.rows[at.warp][t0 / STEPS % STAGES].row;
                xf[i] = ASYNC ? to_float(now[0][i][col]) : to_float(xs[i]);
                dtf[i] = ASYNC ? to_float(now[1][i][col]) : to_float(dts[i]);
                gate[i] = SEGMENT_STATE ? 0.0f : ASYNC ? to_float(now[2][i][col]) : to_float(zs[i]);
            }
            if (!ASYNC) read_rows(t0 + STEPS);
            const float *key = s.k[buffer][t0 - batch], *query = s.q[buffer][t0 - batch];
            #pragma unroll
            for (int i = 0; i < STEPS; i++) {
                float k[P], q[P], sum[C] = {};
                read_four<L>(key + i * NP, at.part, 0, k);
                if (!SEGMENT_STATE) read_four<L>(query + i * NP, at.part, 0, q);
                const float kk = U::norm ? s.kk[buffer][t0 - batch + i] : 0.0f;
                Step<float> step = U::step(xf[i], dtf[i], bias, kk, a.softplus), steps[C];
                if (U::rates && !within(t0 + i)) step.size = 0.0f;       // beyond T; without rates k is 0 there
                share_step(step, steps);
                next_states<U, L>(steps, S, k, [&](int i) { return rates[i]; });
                if (SEGMENT_STATE) {
                    #pragma unroll
                    for (int j = 0; j < C * P; j++)
                        gates[j] *= U::forget(steps[j / P], k[j % P], U::decay(steps[j / P], rates[j]));
                    continue;
                }
                #pragma unroll
                for (int j = 0; j < C * P; j++) sum[j / P] += S[j] * q[j % P];
                float out = sum_states<L>(sum) + skip * xf[i];
                if (gated) out *= gate[i] * sigmoid(gate[i]);
                write<(L > C)>(writer && within(t0 + i), step_at(y, t0 + i, out_t), out);
            }
        }
        if constexpr (ASYNC) keys.take(async.raw);                       // arrived: requested before the last rows
        keys.store(s.k[buffer ^ 1], s.q[buffer ^ 1], s.kk[buffer ^ 1]);
        __syncthreads();  // the other buffer is full, this one is free; test: forward barrier
    }
    if (ASYNC) copy_wait<0>();                                           // none may arrive after the block has ended
    #pragma unroll
    for (int i = 0; i < C * P; i++) {
        const int j = at.part * P + i % P;
        const int64_t to = (b * a.D + at.channel[i / P]) * N + j;
        if (j >= N || !(WHOLE || at.live[i / P])) continue;
        a.hT[to] = S[i];
        if (SEGMENT_STATE) a.decay[to] = gates[i];
    }
}

// The shared memory of a backward block. It holds a chunk's keys and queries, its states every SUB steps, and the
// block's contributions to dk and dq over SUB steps. These have a row per warp, and are summed over warps in a fixed
// order.
template <class U, int P, int L, int STATES> struct BackwardShared {
    float k[CHUNK][P * L], q[CHUNK][P * L], kk[CHUNK];
    Four states[STATES][C * P / 4][THREADS];
    // private to a lane; in registers they would spill
    float gated[SUB][THREADS], rates[U::rates ? C * P : 1][THREADS];
    float dk[THREADS / 32][SUB][P * L], dq[THREADS / 32][SUB][P * L], dkk[THREADS / 32][SUB];
};
template <class U, class E, int P, int L, int STATES> struct AsyncBackwardShared
    : BackwardShared<U, P, L, STATES> {
    typedef WarpRows<E, L, 4, SUB> Rows;                              // of x, dt, z, dy
    typename Rows::Stage rows[THREADS / 32][2];
    typename KeyRows<U, E, P, L, KEYS>::Raw raw[CHUNK / KEYS];
};

template <class U, class E, int P, int L, bool WHOLE> MATH void scan_backward(const ScanArgs &a) {
    typedef WarpRows<E, L, 4, SUB> Rows;
    constexpr bool ASYNC = WHOLE && Rows::fits;
    constexpr int NP = P * L, WARPS = THREADS / 32, SUBS = CHUNK / SUB, STATES = ASYNC ? SUBS - 1 : SUBS;
    typedef AsyncBackwardShared<U, E, P, L, STATES> Shared;
    BackwardShared<U, P, L, STATES> &s = *(BackwardShared<U, P, L, STATES> *)SHARED_MEMORY;
    Shared &async = *(Shared *)SHARED_MEMORY;                            // if ASYNC
    const Place<L> at(a);
    const int T = (int)at.row.T, N = (int)a.N, out_t = (int)(a.out_t * sizeof(E));
    const int b = at.b, c = at.channel[0];
    const bool gate = WHOLE || a.z, live = WHOLE || at.live[0];
    auto within = [&](int t) { return WHOLE || t < T; };
    const Channel<E> x(at.row, c, a.x, a.x_b, a.x_t), dt(at.row, c, a.dt, a.dt_b, a.dt_t);
    const Channel<E> dy(at.row, c, a.dy, a.dy_b, a.dy_t);
    const Channel<E> z = gate ? Channel<E>(at.row, c, a.z, a.z_b, a.z_t) : x;
    const float bias = a.bias ? a.bias[c] : 0.0f, skip = a.skip ? a.skip[c] : 0.0f;
    const int64_t all = WHOLE ? a.B * a.T : tokens(a);
    const ChannelSums<P, L> channel_sums(at.lane);
    const int order = channel_sums.order;
    float G[C * P], drates[C * P], dskip = 0.0f, dbias = 0.0f;
    #pragma unroll
    for (int i = 0; i < C * P; i++) {
        const int j = at.part * P + (i % P ^ order);
        const int64_t channel = at.channel[i / P];
        G[i] = a.dhT && (WHOLE || at.live[i / P]) && j < N ? a.dhT[(b * a.D + channel) * N + j] : 0.0f;
        if (U::rates) s.rates[i][at.tid] = j < N ? LOG2E * a.A[channel * N + j] : 0.0f;
        drates[i] = 0.0f;
    }
    auto rate = [&](int i) { return U::rates ? s.rates[i][at.tid] : 0.0f; };
    auto step_of = [&](float xt, float dtt, int r, bool inside, Step<float> (&all)[C]) {
        Step<float> step = U::step(xt, dtt, bias, U::norm ? s.kk[r] : 0.0f, a.softplus);
        if (U::rates && !inside) step.size = 0.0f;                       // as in the forward
        share_step(step, all);
    };
    // Stages of rows follow the walk below. First come a chunk's sub-chunks forwards, except the last, with x and dt
    // only; then all sub-chunks backwards. While one stage is in use, the next is on its way, also across chunks.
    const int col = c % Rows::CHANNELS;                                  // among the warp's channels
    const Rows rows(at.lane, at.row, c - col, {{a.x, a.x_b, a.x_t}, {a.dt, a.dt_b, a.dt_t}, {a.z, a.z_b, a.z_t},
                                               {a.dy, a.dy_b, a.dy_t}});
    int stage = 0;
    auto begin_keys = [&](int t0) {
        const KeyRows<U, E, P, L, KEYS> keys(a, at.row);
        #pragma unroll
        for (int r = 0; r < CHUNK; r += KEYS) keys.begin(async.raw[r / KEYS], t0 + r);
    };
    auto arrived = [&]() {                                               // the stage requested last, for the whole warp
        copy_wait<0>();  // test: backward waits
        __syncwarp();
        stage ^= 1;
    };
    auto begin_states = [&](Four (*to)[THREADS], int t0) {
        t0 = opaque(t0);
        #pragma unroll
        for (int i = 0; i < C * P; i += 4)
            copy_begin<16>(&to[i / 4][at.tid],
                           kept_states<P>(a, at.row.chunk + t0 / CHUNK, at.part, i % P ^ order, at.channel[i / P]));
    };
    // The place in s.states of the states before sub-chunk `sub`. If ASYNC there is no room for the first sub-chunk's
    // states: they are fetched again, for this chunk and the next, into places of later sub-chunks that have been read.
    constexpr int CURRENT = SUBS - 2, NEXT = SUBS - 3;
    static_assert(!ASYNC || SUBS >= 4);
    auto place_of = [](int sub) { return !ASYNC ? sub : sub ? sub - 1 : CURRENT; };
    const int last = ((int)ceil_div(T, CHUNK) - 1) * CHUNK;
    if constexpr (ASYNC) {
        begin_keys(last);
        begin_states(s.states[NEXT], last);
        rows.template begin<2>(async.rows[at.warp][1], last);
        copy_group();
    }
    for (int t0 = last; t0 >= 0; t0 -= CHUNK) {
        float S[C * P];
        KeyRows<U, E, P, L, KEYS> keys(a, at.row);                         // recomputed, which saves registers
        if constexpr (ASYNC) {
            copy_wait<0>();
            get_own(s.states[NEXT], at.tid, S);
        } else {
            #pragma unroll
            for (int i = 0; i < C * P; i += 4) {
                const bool there = at.part * P + (i % P ^ order) < N;
                const Four *kept = kept_states<P>(a, at.row.chunk + t0 / CHUNK, at.part, i % P ^ order,
                                                  at.channel[i / P]);
                s.states[0][i / 4][at.tid] = there ? *kept : Four{};
            }
            get_own(s.states[0], at.tid, S);
        }
        #pragma unroll 1
        for (int r = 0; r < CHUNK; r += KEYS) {
            if constexpr (ASYNC) keys.take(async.raw[r / KEYS]);
            else keys.load(t0 + r, T);
            keys.store(s.k + r, s.q + r, s.kk + r);
        }
        if (ASYNC && t0) begin_keys(t0 - CHUNK);
        __syncthreads();
        #pragma unroll 1
        // forward once, keeping a state every SUB steps
        for (int sub = 0; sub + 1 < SUBS; sub++) {
            if constexpr (ASYNC) {
                arrived();
                if (sub + 2 < SUBS) rows.template begin<2>(async.rows[at.warp][stage ^ 1], t0 + (sub + 1) * SUB);
                else rows.begin(async.rows[at.warp][stage ^ 1], t0 + (sub + 1) * SUB);
                copy_group();
            }
            auto &now = async.rows[at.warp][stage].row;
            #pragma unroll
            for (int i = 0; i < SUB; i++) {
                const int r = sub * SUB + i, t = within(t0 + r) ? t0 + r : T - 1;
                float k[P];
                read_four<L>(s.k[r], at.part, order, k);
                Step<float> step[C];
                if constexpr (ASYNC) step_of(to_float(now[0][i][col]), to_float(now[1][i][col]), r, true, step);
                else step_of(to_float(x(t)), to_float(dt(t)), r, within(t0 + r), step);
                next_states<U, L>(step, S, k, rate);
            }
            put_own(s.states[place_of(sub + 1)], at.tid, S);
        }
        #pragma unroll 1
        for (int sub = SUBS - 1; sub >= 0; sub--) {
            const int64_t first = at.row.start + t0 + sub * SUB;
            const int64_t out_at = (first * a.out_t + c) * (int64_t)sizeof(E);          // in dx and ddt
            E *const dz = (E *)a.dz + first * a.dz_t + c;
            float kept[SUB][C * P], dkk[SUB];
            Step<float> steps[SUB][C];
            Ahead<E> xs[SUB], dts[SUB], zs[SUB], dys[SUB];
            if constexpr (ASYNC) {
                arrived();
                // the states of later sub-chunks have been read
                if (sub == 1) {
                    begin_states(s.states[CURRENT], t0);
                    if (t0) begin_states(s.states[NEXT], t0 - CHUNK);
                }
                if (sub) rows.begin(async.rows[at.warp][stage ^ 1], t0 + (sub - 1) * SUB);
                else rows.template begin<2>(async.rows[at.warp][stage ^ 1], t0 ? t0 - CHUNK : 0);
                copy_group();
            } else {
                #pragma unroll
                for (int i = 0; i < SUB; i++) {                          // all at once, ahead of their use
                    const int r = t0 + sub * SUB + i, t = within(r) ? r : T - 1;
                    xs[i] = x(t);
                    dts[i] = dt(t);
                    dys[i] = dy(t);
                    zs[i] = z(t);
                }
            }
            auto &now = async.rows[at.warp][stage].row;
            get_own(s.states[place_of(sub)], at.tid, S);
            #pragma unroll
            // forward again, keeping every state and computing dq and dz
            for (int i = 0; i < SUB; i++) {
                const int r = sub * SUB + i;
                const bool in = within(t0 + r) && live;
                // otherwise the compiler interleaves steps until registers spill
                __syncwarp();
                const float zt = ASYNC ? to_float(now[2][i][col]) : to_float(zs[i]), sig = sigmoid(zt);
                const float dyt = !in ? 0.0f : ASYNC ? to_float(now[3][i][col]) : to_float(dys[i]);
                float k[P], q[P], gated[C], sum[C] = {}, dq[P] = {};
                read_four<L>(s.k[r], at.part, order, k);
                read_four<L>(s.q[r], at.part, order, q);
                if constexpr (ASYNC) step_of(to_float(now[0][i][col]), to_float(now[1][i][col]), r, true, steps[i]);
                else step_of(to_float(xs[i]), to_float(dts[i]), r, within(t0 + r), steps[i]);
                share(gate ? dyt * (zt * sig) : dyt, gated);
                s.gated[i][at.tid] = gated[0];
                #pragma unroll
                for (int j = 0; j < C * P; j++) kept[i][j] = U::keep(steps[i][j / P], S[j], k[j % P]);
                next_states<U, L>(steps[i], S, k, rate);
                #pragma unroll
                for (int j = 0; j < C * P; j++) {
                    sum[j / P] += S[j] * q[j % P];
                    dq[j % P] += gated[j / P] * S[j];
                }
                if (gate) {
                    const float out = sum_states<L>(sum) + skip * steps[i][0].x;
                    write<(L > C)>(in && at.owner, step_at(dz, i, (int)(a.dz_t * sizeof(E))),
                                   dyt * out * sig * (1.0f + zt * (1.0f - sig)));
                }
                channel_sums(dq, at.lane);
                if (channel_sums.writer)
                    put_sums<P, L, channel_sums.kept>(s.dq[at.warp][i], at.part, channel_sums.first, dq);
            }
            #pragma unroll
            for (int i = SUB - 1; i >= 0; i--) {                         // beyond D lanes add zeros: dy and G are 0
                const int r = sub * SUB + i;
                const bool in = within(t0 + r) && live;
                __syncwarp();  // as above; the neighbour's s.gated is there; test: neighbour
                float k[P], q[P], gated[C], dk[P] = {}, Gk[C] = {};
                #pragma unroll
                for (int n = 0; n < C; n++) gated[n] = s.gated[i][at.tid ^ n];
                read_four<L>(s.k[r], at.part, order, k);
                read_four<L>(s.q[r], at.part, order, q);
                #pragma unroll
                for (int j = 0; j < C * P; j++) {
                    G[j] += gated[j / P] * q[j % P];
                    if (U::whole) Gk[j / P] += G[j] * k[j % P];
                }
                if (U::whole) share(sum_states<L>(Gk), Gk);
                if (i == 0) {                                            // recomputed, which saves registers
                    get_own(s.states[place_of(sub)], at.tid, kept[0]);
                    #pragma unroll
                    for (int j = 0; j < C * P; j++) kept[0][j] = U::keep(steps[0][j / P], kept[0][j], k[j % P]);
                }
                Sums<float> over_states[C] = {};
                #pragma unroll
                for (int j = 0; j < C * P; j++) {
                    const int n = j / P;
                    G[j] = U::back(steps[i][n], kept[i][j], k[j % P], rate(j), U::decay(steps[i][n], rate(j)), G[j],
                                   Gk[n], over_states[n], dk[j % P], drates[j]);
                }
                channel_sums(dk, at.lane);
                if (channel_sums.writer)
                    put_sums<P, L, channel_sums.kept>(s.dk[at.warp][i], at.part, channel_sums.first, dk);
                float dx[C], dsize[C];
                #pragma unroll
                for (int n = 0; n < C; n++) { dx[n] = over_states[n].dx; dsize[n] = over_states[n].dsize; }
                const Sums<float> sums = {sum_states<L>(dx), sum_states<L>(dsize)};
                const StepGrads<float> d = U::finish(steps[i][0], sums, Gk[0]);
                dkk[i] = L == C || at.owner ? d.dkk : 0.0f;
                E *dx_at = step_at((E *)((char *)a.dx + out_at), i, out_t);
                E *ddt_at = step_at((E *)((char *)a.ddt + out_at), i, out_t);
                if constexpr (L > C) {
                    set_if(in && at.owner, dx_at, d.dx + skip * gated[0]);
                    set_if(in && at.owner, ddt_at, d.ddt);
                } else if (in) {
                    set(dx_at, d.dx + skip * gated[0]);
                    set(ddt_at, d.ddt);
                }
                dbias += in ? d.ddt : 0.0f;
                dskip += gated[0] * steps[i][0].x;
            }
            if (U::norm) {                                               // 4 values per channel: order is 0
                const ChannelSums<SUB, 1> step_sums(at.lane);
                step_sums(dkk, at.lane);
                if (step_sums.writer)
                    #pragma unroll
                    for (int j = 0; j < step_sums.kept; j++) s.dkk[at.warp][step_sums.first + j] = dkk[j];
            }
            __syncthreads();
            #pragma unroll
            // this block's rows of dk and dq, summed over warps in order
            for (int n = 0; n < (2 * SUB * NP + THREADS - 1) / THREADS; n++) {
                const int i = at.tid + n * THREADS, step = i / NP % SUB, from = i % NP, j = state_at<P, L>(from);
                const int r = sub * SUB + step;
                const bool of_k = i < SUB * NP;
                if (i >= 2 * SUB * NP || j >= N || !within(t0 + r)) continue;
                const float *rows = (of_k ? s.dk[0][step] : s.dq[0][step]) + from;
                float sum = 0.0f, sum_kk = 0.0f;
                #pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    sum += rows[w * SUB * NP];
                    if (U::norm) sum_kk += s.dkk[w][step];
                }
                if (U::norm) sum -= pick(of_k, 2.0f * s.k[r][from] * sum_kk, 0.0f);
                (of_k ? a.dk : a.dq)[(at.block * all + at.row.start + t0 + r) * N + j] = sum;
            }
            // before the next steps overwrite the values read here
            __syncthreads();
        }
    }
    if (ASYNC) copy_wait<0>();                                           // none may arrive after the block has ended
    #pragma unroll
    for (int i = 0; i < C * P; i++) {
        const int j = at.part * P + (i % P ^ order);
        const int64_t to = (b * a.D + at.channel[i / P]) * N + j;
        if (j >= N || !(WHOLE || at.live[i / P])) continue;
        if (a.dh0) a.dh0[to] = G[i];
        if (U::rates) a.dA[to] = drates[i];
    }
    if (live && at.owner && a.dskip) a.dskip[b * a.D + c] = dskip;
    if (live && at.owner && a.dbias) a.dbias[b * a.D + c] = dbias;
}

// Computes a segment's contribution to G = dL/dS before its first step, and the product of its forget gates.
template <class U, class E, int P, int L> MATH void scan_segment_grad(const ScanArgs &a) {
    typedef AsyncForwardShared<U, E, P, L> Shared;
    constexpr int STEPS = Shared::STEPS, BATCH = Shared::BATCH;
    Shared &s = *(Shared *)SHARED_MEMORY;                                // uses one of its two key buffers
    const Place<L> at(a);
    if (is_segment(a, at.b, 0)) return;
    const int T = (int)at.row.T, N = (int)a.N;
    const int b = at.b, c = at.channel[0];
    const float bias = a.bias ? a.bias[c] : 0.0f;
    float G[C * P], rates[C * P], gates[C * P];
    #pragma unroll
    for (int i = 0; i < C * P; i++) {
        const int j = at.part * P + i % P;
        rates[i] = U::rates && j < N ? LOG2E * a.A[(int64_t)at.channel[i / P] * N + j] : 0.0f;
        G[i] = 0.0f;
        gates[i] = 1.0f;
    }
    auto step_back = [&](int r, float dtt, float zt, float dyt) {        // row r of the batch of keys
        float k[P], q[P], gated[C];
        share(dyt * (zt * sigmoid(zt)), gated);
        Step<float> steps[C];
        share_step(U::step(0.0f, dtt, bias, U::norm ? s.kk[0][r] : 0.0f, a.softplus), steps);
        read_four<L>(s.k[0][r], at.part, 0, k);
        read_four<L>(s.q[0][r], at.part, 0, q);
        #pragma unroll
        for (int j = 0; j < C * P; j++) {
            const float kept = U::forget(steps[j / P], k[j % P], U::decay(steps[j / P], rates[j]));
            G[j] = (G[j] + gated[j / P] * q[j % P]) * kept;
            gates[j] *= kept;
        }
    };
    KeyRows<U, E, P, L, BATCH> keys(a, at.row);
    const int col = c % Shared::Rows::CHANNELS;                          // among the warp's channels
    const typename Shared::Rows rows(at.lane, at.row, c - col,
                                     {{a.dt, a.dt_b, a.dt_t}, {a.z, a.z_b, a.z_t}, {a.dy, a.dy_b, a.dy_t}});
    auto begin_rows = [&](int t) {
        rows.begin(s.rows[at.warp][(t / STEPS + STAGES) % STAGES], t < 0 ? 0 : t);
        copy_group();
    };
    keys.begin(s.raw, T - BATCH);
    #pragma unroll
    for (int n = 1; n < STAGES; n++) begin_rows(T - n * STEPS);
    copy_wait<STAGES - 2>();
    for (int batch = T - BATCH; batch >= 0; batch -= BATCH) {
        keys.take(s.raw);                                                // arrived: requested before the last rows
        __syncthreads();                                                 // the previous batch has been read
        keys.store(s.k[0], s.q[0], s.kk[0]);
        __syncthreads();
        keys.begin(s.raw, batch ? batch - BATCH : 0);
        #pragma unroll 1
        for (int t = batch + BATCH - STEPS; t >= batch; t -= STEPS) {
            copy_wait<STAGES - 2>();
            __syncwarp();                                                // as in the forward
            begin_rows(t - (STAGES - 1) * STEPS);
            auto &now = s.rows[at.warp][t / STEPS % STAGES].row;
            #pragma unroll
            for (int i = STEPS - 1; i >= 0; i--)
                step_back(t - batch + i, to_float(now[0][i][col]), to_float(now[1][i][col]), to_float(now[2][i][col]));
        }
    }
    copy_wait<0>();
    #pragma unroll
    for (int i = 0; i < C * P; i++) {
        const int j = at.part * P + i % P;
        const int64_t to = (b * a.D + at.channel[i / P]) * N + j;
        if (j < N) { a.hT[to] = G[i]; a.decay[to] = gates[i]; }
    }
}

// Joins segments. hT[s], segment s's final state from zero, becomes the state before segment s. The row's initial state
// is h0, or dhT in reverse. A thread handles one number of the state.
MATH void combine(const ScanArgs &a) {
    const int64_t blocks = ceil_div(a.D * a.N, THREADS);
    const int64_t i = blockIdx.x % blocks * THREADS + threadIdx.x, b = blockIdx.x / blocks;
    if (i >= a.D * a.N) return;
    const float *initial = a.reverse ? a.dhT : a.h0;
    float h = initial ? initial[b * a.D * a.N + i] : 0.0f;
    for (int64_t n = 0; n < a.segments; n++) {
        const int64_t at = (b * a.segments + (a.reverse ? a.segments - 1 - n : n)) * a.D * a.N + i;
        const bool last = n == a.segments - 1;
        const float segment = last ? 0.0f : a.hT[at], kept = last ? 0.0f : a.decay[at];
        a.hT[at] = h;
        h = kept * h + segment;
    }
}

// ------------------------------------------------------------------------------- CUDA: functions for kernels/build.py
// One cubin per update, dtype, P and L: a few kernels compile in seconds, all combinations would take minutes.
// kernels/cuda.py reads `facts`: CHUNK, the size of ScanArgs, threads and channels per block, states per channel, and
// each kernel's shared memory.

typedef SCAN_UPDATE U;
typedef SCAN_TYPE E;

// Blocks per multiprocessor for which the registers must suffice. An H100's shared memory holds three blocks of the
// backward; BACKWARD_BLOCKS is two where the compiler would otherwise spill registers.
#ifndef FORWARD_BLOCKS
#define FORWARD_BLOCKS (U::rates || SCAN_L > C ? 3 : 4)
#endif
#if !defined(BACKWARD_BLOCKS) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define BACKWARD_BLOCKS (U::rates || U::whole || SCAN_L > C || sizeof(E) == 4 ? 2 : 3)
#elif !defined(BACKWARD_BLOCKS)
#define BACKWARD_BLOCKS 2
#endif

extern "C" {
KERNEL(forward_kernel, FORWARD_BLOCKS, ScanArgs, (scan_forward<U, E, SCAN_P, SCAN_L, false, false>(a)))
KERNEL(forward_whole_kernel, FORWARD_BLOCKS, ScanArgs, (scan_forward<U, E, SCAN_P, SCAN_L, false, true>(a)))
KERNEL(backward_kernel, BACKWARD_BLOCKS, ScanArgs, (scan_backward<U, E, SCAN_P, SCAN_L, false>(a)))
KERNEL(backward_whole_kernel, BACKWARD_BLOCKS, ScanArgs, (scan_backward<U, E, SCAN_P, SCAN_L, true>(a)))
KERNEL(segment_state_kernel, 3, ScanArgs, (scan_forward<U, E, SCAN_P, SCAN_L, true, true>(a)))
KERNEL(segment_grad_kernel, 3, ScanArgs, (scan_segment_grad<U, E, SCAN_P, SCAN_L>(a)))
KERNEL(combine_kernel, 1, ScanArgs, (combine(a)))
#define FORWARD_BYTES sizeof(ForwardShared<SCAN_P, SCAN_L, KEYS>)
typedef AsyncForwardShared<U, E, SCAN_P, SCAN_L> AsyncForward;
#define FITS AsyncForward::Rows::fits                                       // otherwise nothing is fetched ahead
#define WHOLE_BYTES (FITS ? sizeof(AsyncForward) : FORWARD_BYTES)
#define BACKWARD_BYTES sizeof(BackwardShared<U, SCAN_P, SCAN_L, CHUNK / SUB>)
typedef AsyncBackwardShared<U, E, SCAN_P, SCAN_L, CHUNK / SUB - 1> AsyncBackward;
#define WHOLE_BACKWARD_BYTES (FITS ? sizeof(AsyncBackward) : BACKWARD_BYTES)
__device__ int64_t facts[] = {CHUNK, sizeof(ScanArgs), THREADS, THREADS / SCAN_L * C, SCAN_P * SCAN_L,
                              FORWARD_BYTES, WHOLE_BYTES, BACKWARD_BYTES, WHOLE_BACKWARD_BYTES, sizeof(AsyncForward),
                              sizeof(AsyncForward), 0};
}

#else

// ----------------------------------------------------------------------------------------------- CPU: the scan
// NC is the state size if known at compile time, or 0 to read it from the arguments. A task is one batch row and a
// range of channel groups. It goes through time chunk by chunk, and all its groups go through a chunk one after
// another. So k and q are converted, and dk and dq summed over lanes, once per chunk and not once per group.

// Sums LANES rows over their LANES lanes. Each stage adds the halves of two rows into one row, so 15 additions replace
// 16 horizontal sums of 4 additions each.
template <int L> MATH vec pair_sum(vec a, vec b) {                     // segments of L lanes become segments of L / 2
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
    MATH vec of(const vec *rows, int count) {
        return pair_sum<2 * LANES / L>(RowSum<L / 2>::of(rows, count / 2),
                                       RowSum<L / 2>::of(rows + count / 2, count / 2));
    }
};
template <> struct RowSum<1> { MATH vec of(const vec *rows, int) { return rows[0]; } };
static void row_sums(const vec *rows, int64_t count, float *out) {       // both buffers padded to a multiple of LANES
    for (int64_t r = 0; r < count; r += LANES) {
        vec sums = RowSum<LANES>::of(rows + r, LANES);
        memcpy(out + r, &sums, sizeof sums);
    }
}

struct Keys { float *k, *q, *kk; };                    // a chunk's k, q and |k|^2

template <class E> static void load_keys(const ScanArgs &a, const Row &row, int64_t t0, int steps, const E *ks,
                                         const E *qs, Keys to) {
    ks += offset(row, a.k_b, a.k_t) + t0 * a.k_t;
    qs += offset(row, a.q_b, a.q_t) + t0 * a.q_t;
    for (int t = 0; t < steps; t++, ks += a.k_t, qs += a.q_t) {
        float sum = 0;
        for (int64_t j = 0; j < a.N; j++) {
            float kj = to_float(ks[j]);
            to.k[t * a.N + j] = kj;
            to.q[t * a.N + j] = to_float(qs[j]);
            sum += kj * kj;
        }
        to.kk[t] = sum;
    }
}

// The rows of one group of channels over one chunk. The hot loops handle only full vectors; the group at the tail of D
// is first copied into padded rows, and its results are copied out afterwards.
template <class E> struct Tile {
    const E *x, *dt, *z, *dy;
    int64_t x_t, dt_t, z_t, dy_t, out_t, dz_t;
    E *y, *dx, *ddt, *dz;
    vec bias, skip;

    // Prefetches step t of the next group of channels, which follows in this chunk.
    inline __attribute__((always_inline)) void prefetch_next(int t) const {
        prefetch(x + t * x_t + LANES);
        prefetch(dt + t * dt_t + LANES);
        if (z) prefetch(z + t * z_t + LANES);
        if (y) prefetch(y + t * out_t + LANES);
        if (!dy) return;
        prefetch(dy + t * dy_t + LANES);
        prefetch(dx + t * out_t + LANES);
        prefetch(ddt + t * out_t + LANES);
        if (z) prefetch(dz + t * dz_t + LANES);
    }
};

template <class E> static E *stage(const E *from, int64_t stride, int steps, int n, E *&room) {
    if (!from) return nullptr;
    E *to = room;
    room += CHUNK * LANES;
    memset((void *)to, 0, CHUNK * LANES * sizeof(E));
    for (int t = 0; t < steps; t++) memcpy((void *)(to + t * LANES), from + t * stride, n * sizeof(E));
    return to;
}

template <class E> static Tile<E> tile_of(const ScanArgs &a, const Row &row, int64_t t0, int steps, int64_t c, int n,
                                          E *room) {
    auto rows = [&](const void *p, int64_t s_b, int64_t s_t) {
        return p ? (const E *)p + offset(row, s_b, s_t) + t0 * s_t + c : nullptr;
    };
    auto out = [&](void *p, int64_t s_t) { return p ? (E *)p + (row.start + t0) * s_t + c : nullptr; };
    Tile<E> tile = {rows(a.x, a.x_b, a.x_t), rows(a.dt, a.dt_b, a.dt_t), rows(a.z, a.z_b, a.z_t),
                    rows(a.dy, a.dy_b, a.dy_t),
                    a.x_t, a.dt_t, a.z_t, a.dy_t, a.out_t, a.dz_t,
                    out(a.y, a.out_t), out(a.dx, a.out_t), out(a.ddt, a.out_t), out(a.dz, a.dz_t),
                    a.bias ? load(a.bias + c, n) : vec{}, a.skip ? load(a.skip + c, n) : vec{}};
    if (n == LANES) return tile;
    tile.x = stage(tile.x, tile.x_t, steps, n, room);
    tile.dt = stage(tile.dt, tile.dt_t, steps, n, room);
    tile.z = stage(tile.z, tile.z_t, steps, n, room);
    tile.dy = stage(tile.dy, tile.dy_t, steps, n, room);
    for (E **p : {&tile.y, &tile.dx, &tile.ddt, &tile.dz})
        if (*p) { *p = room; room += CHUNK * LANES; }
    tile.x_t = tile.dt_t = tile.z_t = tile.dy_t = tile.out_t = tile.dz_t = LANES;
    return tile;
}

template <class E> static void unstage(const ScanArgs &a, const Tile<E> &tile, const Row &row, int64_t t0, int steps,
                                       int64_t c, int n) {
    if (n == LANES) return;
    const E *from[] = {tile.y, tile.dx, tile.ddt, tile.dz};
    void *to[] = {a.y, a.dx, a.ddt, a.dz};
    const int64_t strides[] = {a.out_t, a.out_t, a.out_t, a.dz_t};
    for (int i = 0; i < 4; i++)
        for (int t = 0; to[i] && t < steps; t++)
            memcpy((E *)to[i] + (row.start + t0 + t) * strides[i] + c, from[i] + t * LANES, n * sizeof(E));
}

// (B, D, N) in memory <-> N vectors of channels
MATH void load_state(const float *h, int64_t N, int n, vec *S) {
    for (int64_t j = 0; j < N; j++) {
        vec v = {};
        if (h) for (int l = 0; l < n; l++) v[l] = h[l * N + j];
        S[j] = v;
    }
}
MATH void load_rates(const float *A, int64_t N, int n, vec *rates) {
    load_state(A, N, n, rates);
    for (int64_t j = 0; j < N; j++) rates[j] *= LOG2E;
}
MATH void store_state(float *h, int64_t N, int n, const vec *S) {
    for (int64_t j = 0; j < N; j++)
        for (int l = 0; l < n; l++) h[l * N + j] = S[j][l];
}

template <class U, class E, int NC> static void forward_chunk(const Tile<E> &in, int64_t n_state, int64_t softplus,
                                                              int steps, Keys keys,
                                                              const vec *rates, vec *state) {
    const int64_t N = NC ? NC : n_state;
    vec registers[NC ? NC : 1], *S = NC ? registers : state;
    if (NC) for (int64_t j = 0; j < N; j++) S[j] = state[j];
    for (int t = 0; t < steps; t++) {
        const float *k = keys.k + t * N, *q = keys.q + t * N;
        in.prefetch_next(t);
        Step<vec> s = U::step(load(in.x + t * in.x_t), load(in.dt + t * in.dt_t), in.bias, keys.kk[t], softplus);
        vec out[2] = {in.skip * s.x, vec{}};                             // two chains hide the latency of the FMA
        if (U::whole) {
            vec sum[2] = {};
            UNROLL for (int64_t j = 0; j < N; j++) sum[j & 1] += k[j] * S[j];
            s.residual = s.x - (sum[0] + sum[1]);
        }
        UNROLL for (int64_t j = 0; j < N; j++) {
            S[j] = U::next(s, S[j], k[j], U::rates ? U::decay(s, rates[j]) : vec{});
            out[j & 1] += S[j] * q[j];
        }
        vec o = out[0] + out[1];
        if (in.z) { vec z = load(in.z + t * in.z_t); o *= z * sigmoid(z); }
        store(in.y + t * in.out_t, o);
    }
    if (NC) for (int64_t j = 0; j < N; j++) state[j] = S[j];
}

template <class U, class E, int NC> static void forward_task(const ScanArgs &a, int64_t b, int64_t first,
                                                             int64_t last) {
    const int64_t N = a.N;
    const Row row = row_of(a, b);
    Scratch scratch(2 * (last - first) * N * LANES + CHUNK * (2 * N + 1) + 4 * CHUNK * LANES);
    vec *state = scratch.take<vec>((last - first) * N), *rates = scratch.take<vec>((last - first) * N);
    Keys keys = {scratch.take<float>(CHUNK * N), scratch.take<float>(CHUNK * N), scratch.take<float>(CHUNK)};
    E *room = scratch.take<E>(4 * CHUNK * LANES);
    for (int64_t g = first; g < last; g++) {
        int64_t c = g * LANES;
        load_state(a.h0 ? a.h0 + (b * a.D + c) * N : nullptr, N, tail(a.D, c), state + (g - first) * N);
        if (U::rates) load_rates(a.A + c * N, N, tail(a.D, c), rates + (g - first) * N);
    }
    for (int64_t t0 = 0; t0 < row.T; t0 += CHUNK) {
        int steps = row.T - t0 < CHUNK ? (int)(row.T - t0) : CHUNK;
        load_keys(a, row, t0, steps, (const E *)a.k, (const E *)a.q, keys);
        for (int64_t g = first; g < last; g++) {
            int64_t c = g * LANES;
            int n = tail(a.D, c);
            vec *S = state + (g - first) * N;
            if (a.chunks) {
                float *saved = a.chunks + (row.chunk + t0 / CHUNK) * N * a.D + c;
                for (int64_t j = 0; j < N; j++) store(saved + j * a.D, S[j], n);
            }
            Tile<E> tile = tile_of<E>(a, row, t0, steps, c, n, room);
            forward_chunk<U, E, NC>(tile, N, a.softplus, steps, keys, rates + (g - first) * N, S);
            unstage(a, tile, row, t0, steps, c, n);
        }
    }
    for (int64_t g = first; g < last; g++)
        store_state(a.hT + (b * a.D + g * LANES) * N, N, tail(a.D, g * LANES), state + (g - first) * N);
}

// A group's sums so far, walking backwards: N vectors of G = dL/dS_t and of dA; dD and ddt_bias.
struct Backward { vec *G, *drates, *dskip, *dbias; };
// A chunk's sums over all groups: vectors, summed over lanes after the last group.
struct KeyGrads { vec *dk, *dq, *dkk; };
// A recomputed chunk: the states before each step and after the last, Mamba's decays, and the steps' values.
struct Kept { vec *S, *decays; Step<vec> *steps; vec *dy; };

// Recomputes a chunk's states and walks it backwards. With S' the state before t and G = dL/dS_t + dy q:
//   dq = sum dy S;  Longhorn:  dx = eps sum G k;  deps = sum G k (x - k S')
//   dk = sum G eps (x - 2 k S') - 2 k sum deps eps^2
//   ddt = deps eps^2 exp(-(dt + bias));  G *= 1 - eps k^2;  the other updates are similar, see their `back`.
template <class U, class E, int NC> static void backward_chunk(const Tile<E> &in, int64_t n_state, int64_t softplus,
                                                               int steps, Keys keys,
                                                               const vec *rates, Kept kept, KeyGrads sum, Backward out) {
    const int64_t N = NC ? NC : n_state;
    {
        vec registers[NC ? NC : 1];
        if (NC) for (int64_t j = 0; j < N; j++) registers[j] = kept.S[j];
        for (int t = 0; t < steps; t++) {
            const float *k = keys.k + t * N, *q = keys.q + t * N;
            in.prefetch_next(t);
            Step<vec> s = U::step(load(in.x + t * in.x_t), load(in.dt + t * in.dt_t), in.bias, keys.kk[t], softplus);
            vec dy = load(in.dy + t * in.dy_t), z = {}, sig = {}, gated = dy;
            if (in.z) { z = load(in.z + t * in.z_t); sig = sigmoid(z); gated *= z * sig; }
            vec y[2] = {in.skip * s.x, vec{}};
            vec *before = NC ? registers : kept.S + t * N, *after = kept.S + (t + 1) * N, *dq = sum.dq + t * N;
            if (U::whole) {
                vec of_k[2] = {};
                UNROLL for (int64_t j = 0; j < N; j++) of_k[j & 1] += k[j] * before[j];
                s.residual = s.x - (of_k[0] + of_k[1]);
            }
            UNROLL for (int64_t j = 0; j < N; j++) {
                vec decay = {};
                if (U::rates) { decay = U::decay(s, rates[j]); kept.decays[t * N + j] = decay; }
                vec S = U::next(s, before[j], k[j], decay);
                if (NC) registers[j] = S;
                after[j] = S;
                dq[j] += gated * S;
                y[j & 1] += S * q[j];
            }
            if (in.z) store(in.dz + t * in.dz_t, dy * (y[0] + y[1]) * sig * (1.0f + z * (1.0f - sig)));
            kept.steps[t] = s; kept.dy[t] = gated;
        }
    }
    vec registers[NC ? NC : 1], *G = NC ? registers : out.G;
    if (NC) for (int64_t j = 0; j < N; j++) G[j] = out.G[j];
    for (int t = steps - 1; t >= 0; t--) {
        const float *k = keys.k + t * N, *q = keys.q + t * N;
        const vec *before = kept.S + t * N, *decays = kept.decays + t * N, dy = kept.dy[t];
        const Step<vec> s = kept.steps[t];
        vec *dk = sum.dk + t * N, Gk = {};
        Sums<vec> over_states[2] = {};
        if (U::whole) {
            vec of_k[2] = {};
            UNROLL for (int64_t j = 0; j < N; j++) { G[j] += dy * q[j]; of_k[j & 1] += G[j] * k[j]; }
            Gk = of_k[0] + of_k[1];
        }
        UNROLL for (int64_t j = 0; j < N; j++) {
            vec g = U::whole ? G[j] : G[j] + dy * q[j];
            G[j] = U::back(s, U::keep(s, before[j], k[j]), k[j], U::rates ? rates[j] : vec{},
                           U::rates ? decays[j] : vec{}, g, Gk, over_states[j & 1],
                           dk[j], out.drates[U::rates ? j : 0]);
        }
        const Sums<vec> both = {over_states[0].dx + over_states[1].dx, over_states[0].dsize + over_states[1].dsize};
        const StepGrads<vec> d = U::finish(s, both, Gk);
        if (U::norm) sum.dkk[t] += d.dkk;
        store(in.dx + t * in.out_t, d.dx + in.skip * dy);
        store(in.ddt + t * in.out_t, d.ddt);
        *out.dbias += d.ddt;
        *out.dskip += dy * s.x;
    }
    if (NC) for (int64_t j = 0; j < N; j++) out.G[j] = G[j];
}

template <class U, class E, int NC> static void backward_task(const ScanArgs &a, int64_t b, int64_t split, int64_t first,
                                                              int64_t last) {
    const int64_t N = a.N, groups = last - first;
    const Row row = row_of(a, b);
    const int64_t padded = ceil_div(CHUNK * N, LANES) * LANES, with_rates = U::rates ? N : 0;
    Scratch scratch((groups * (N + 2 * with_rates + 3) + (CHUNK + 1) * N + CHUNK * with_rates + 6 * CHUNK
                     + 2 * padded) * LANES
                    + 2 * CHUNK * N + 2 * CHUNK + padded + 8 * CHUNK * LANES);
    vec *G = scratch.take<vec>(groups * N), *rates = scratch.take<vec>(groups * with_rates);
    vec *drates = scratch.take<vec>(groups * with_rates + 1);
    vec *dskip = scratch.take<vec>(groups), *dbias = scratch.take<vec>(groups);
    Kept kept = {scratch.take<vec>((CHUNK + 1) * N), scratch.take<vec>(CHUNK * with_rates),
                 scratch.take<Step<vec>>(CHUNK), scratch.take<vec>(CHUNK)};
    KeyGrads sum = {scratch.take<vec>(padded), scratch.take<vec>(padded), scratch.take<vec>(CHUNK)};
    Keys keys = {scratch.take<float>(CHUNK * N), scratch.take<float>(CHUNK * N), scratch.take<float>(CHUNK)};
    float *sums = scratch.take<float>(padded), *sums_kk = scratch.take<float>(CHUNK);
    E *room = scratch.take<E>(8 * CHUNK * LANES);
    for (int64_t g = first; g < last; g++) {
        int64_t c = g * LANES, i = g - first;
        load_state(a.dhT ? a.dhT + (b * a.D + c) * N : nullptr, N, tail(a.D, c), G + i * N);
        if (U::rates) load_rates(a.A + c * N, N, tail(a.D, c), rates + i * N);
        for (int64_t j = 0; j < with_rates; j++) drates[i * N + j] = vec{};
        dskip[i] = dbias[i] = vec{};
    }
    for (int64_t chunk = ceil_div(row.T, CHUNK) - 1; chunk >= 0; chunk--) {
        int64_t t0 = chunk * CHUNK;
        int steps = row.T - t0 < CHUNK ? (int)(row.T - t0) : CHUNK;
        load_keys(a, row, t0, steps, (const E *)a.k, (const E *)a.q, keys);
        memset((void *)sum.dk, 0, padded * sizeof(vec));
        memset((void *)sum.dq, 0, padded * sizeof(vec));
        memset((void *)sum.dkk, 0, CHUNK * sizeof(vec));
        for (int64_t g = first; g < last; g++) {
            int64_t c = g * LANES, i = g - first;
            int n = tail(a.D, c);
            const float *saved = a.chunks + (row.chunk + chunk) * N * a.D + c;
            for (int64_t j = 0; j < N; j++) kept.S[j] = load(saved + j * a.D, n);
            Tile<E> tile = tile_of<E>(a, row, t0, steps, c, n, room);
            backward_chunk<U, E, NC>(tile, N, a.softplus, steps, keys, rates + i * with_rates, kept, sum,
                                     {G + i * N, drates + i * with_rates, dskip + i, dbias + i});
            unstage(a, tile, row, t0, steps, c, n);
        }
        int64_t to = (split * tokens(a) + row.start + t0) * N;
        row_sums(sum.dkk, CHUNK, sums_kk);
        row_sums(sum.dk, padded, sums);
        for (int t = 0; t < steps; t++)
            for (int64_t j = 0; j < N; j++)
                a.dk[to + t * N + j] = sums[t * N + j] - 2.0f * keys.k[t * N + j] * sums_kk[t];
        row_sums(sum.dq, padded, sums);
        memcpy(a.dq + to, sums, steps * N * sizeof(float));
    }
    for (int64_t g = first; g < last; g++) {
        int64_t c = g * LANES, i = g - first;
        int n = tail(a.D, c);
        if (a.dh0) store_state(a.dh0 + (b * a.D + c) * N, N, n, G + i * N);
        if (U::rates) store_state(a.dA + (b * a.D + c) * N, N, n, drates + i * N);
        if (a.dskip) store(a.dskip + b * a.D + c, dskip[i], n);
        if (a.dbias) store(a.dbias + b * a.D + c, dbias[i], n);
    }
}

// -------------------------------------------------------------------------------- CPU: functions for kernels/build.py

template <class U, class E, int NC> static void scan_forward(const ScanArgs &a) {
    for_tasks(a, [&](int64_t b, int64_t, int64_t first, int64_t last) { forward_task<U, E, NC>(a, b, first, last); });
}
template <class U, class E, int NC> static void scan_backward(const ScanArgs &a) {
    for_tasks(a, [&](int64_t b, int64_t split, int64_t first, int64_t last) {
        backward_task<U, E, NC>(a, b, split, first, last);
    });
}

// Picks the instance for the dtype and the state size. The most common sizes are known at compile time.
#define DISPATCH_STATE(f, U, NC) do { if (a->dtype == BFLOAT16) f<U, bf16, NC>(*a); else f<U, float, NC>(*a); } while (0)
#define DISPATCH_SCAN(f) do {                                                                                 \
    if (a->update == EXACT) DISPATCH_STATE(f, Exact, 0);                                                      \
    else if (a->update == MAMBA) { if (a->N == 16) DISPATCH_STATE(f, Mamba, 16); else DISPATCH_STATE(f, Mamba, 0); } \
    else if (a->N == 16) DISPATCH_STATE(f, Longhorn, 16);                                                     \
    else if (a->N == 8) DISPATCH_STATE(f, Longhorn, 8);                                                       \
    else DISPATCH_STATE(f, Longhorn, 0); } while (0)

extern "C" {
int64_t longhorn_chunk(void) { return CHUNK; }
int64_t longhorn_lanes(void) { return LANES; }
int64_t scan_args_size(void) { return sizeof(ScanArgs); }
int longhorn_has_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
void longhorn_scan_forward_cpu(const ScanArgs *a) { DISPATCH_SCAN(scan_forward); }
void longhorn_scan_backward_cpu(const ScanArgs *a) { DISPATCH_SCAN(scan_backward); }
}

#endif  // ON_GPU
