// Small native kernels around the scan: the short causal convolution before it, and RMSNorm (CPU only).
//
//   convolution   y_t = silu(bias + sum_i weight_i x_{t - W + 1 + i})      per channel; state or zeros before t = 0
//   RMSNorm       y = x / sqrt(mean(x^2) + eps) * weight                   per row
//
// Built like longhorn_scan.cu. Order: arguments, CUDA, CPU. To check a change:
// python -m pytest tests/test_conformance.py tests/test_cuda.py

#include "lanes.h"

#define MAX_WIDTH 8

// Mirrored in kernels/build.py. Strides count elements; the last dimension of every tensor is contiguous; absent
// tensors are null. As in longhorn_scan.cu, negative strides run time backwards.
struct ConvArgs {
    int64_t B, T, D, W, dtype, silu, splits, threads;
    const void *x;                                    // (B, T, D)
    int64_t x_b, x_t;
    const float *weight, *bias;                       // (D, W), (D,)
    const float *state;                               // (B, W - 1, D): the inputs before the first step; null for zeros
    void *y;                                          // (B, T, D): row (b, t) at (b T + t) out_t
    int64_t out_t;
    // backward only
    const void *dy, *dy_again;                        // the gradient of y is their sum; dy_again may be null
    int64_t dy_b, dy_t, dy_again_b, dy_again_t;
    void *dx;                                         // (B, T, D), as y
    float *dweight, *dbias;                           // (rows, W, D), (rows, D): one per batch row; CUDA: per tile
    float *dstate;                                    // (B, W - 1, D)
};

struct NormArgs {
    int64_t rows, D, tasks, threads, x_dtype, y_dtype;
    const void *x, *dy;                               // (rows, D) contiguous, of x_dtype and y_dtype
    const float *weight;                              // (D,)
    float *rstd;                                      // (rows,), written by the forward, read by the backward
    void *y, *dx;                                     // (rows, D), of y_dtype and x_dtype
    float *dweight;                                   // (tasks, D): the caller sums over tasks
    double eps;
};

#ifdef ON_GPU

// ----------------------------------------------------------------------------------------------- CUDA: the convolution
// A lane handles C neighbouring channels over CONV_TILE steps of a row. C is 2 for 16-bit channels if D is even: a lane
// reads and writes both as one word. kernels/launch.py copies rows that do not begin at a word. All tiles run at once,
// and each reads the W - 1 inputs before it again, from the cache. CONV_AHEAD rows are read before the first is used.

#define CONV_TILE 64
#define CONV_AHEAD 8

template <int C, class E> MATH uint32_t read_channels(const E *p) { return C == 2 ? read_32(p) : read(p).bits; }
template <int C, class E> MATH float channel(uint32_t word, int n) {
    return to_float(Ahead<E>{n ? word >> 16 : word});
}
template <int C, class E> MATH void set_channels(E *p, const float (&v)[C]) {
    if constexpr (C == 2) *(uint32_t *)p = rounded(v[0], E()) | rounded(v[1], E()) << 16;
    else set(p, v[0]);
}

template <class E, int W, int C> struct ConvPlace {
    int T, tile, t0, t1, c;                            // tile: index over all rows; it covers the steps t0 .. t1
    int64_t b;
    bool live;
    const E *x;
    int stride;
    float weight[C][W], bias[C];
    const float *state;
    __device__ __forceinline__ ConvPlace(const ConvArgs &a) {
        const unsigned blocks = (unsigned)ceil_div(a.D, THREADS * C), tiles = (unsigned)ceil_div(a.T, CONV_TILE);
        tile = blockIdx.x / blocks;
        T = (int)a.T; t0 = tile % tiles * CONV_TILE; t1 = T - t0 < CONV_TILE ? T : t0 + CONV_TILE;
        b = tile / tiles;
        c = ((int)(blockIdx.x % blocks) * THREADS + threadIdx.x) * C;
        live = c < a.D;
        if (!live) c = (int)a.D - C;
        x = (const E *)a.x + b * a.x_b + c;
        stride = (int)(a.x_t * sizeof(E));
        state = a.state ? a.state + b * (W - 1) * a.D + c : nullptr;
        #pragma unroll
        for (int n = 0; n < C; n++) {
            bias[n] = a.bias ? a.bias[c + n] : 0.0f;
            #pragma unroll
            for (int i = 0; i < W; i++) weight[n][i] = a.weight[(int64_t)(c + n) * W + i];
        }
    }
    // Fills window[1 ..] with the inputs of the W - 1 steps before t0; `slide` then makes room for the next input.
    __device__ __forceinline__ void before(const ConvArgs &a, float (&window)[C][W]) const {
        #pragma unroll
        for (int i = 1; i < W; i++) {
            const int t = t0 - W + i;
            const uint32_t word = t >= 0 ? read_channels<C>(step_at(x, t, stride)) : 0;
            #pragma unroll
            for (int n = 0; n < C; n++)
                window[n][i] = t >= 0 ? channel<C, E>(word, n) : state ? state[(t + W - 1) * a.D + n] : 0.0f;
        }
    }
    template <bool INSIDE>
    __device__ __forceinline__ void read_ahead(const E *from, int step, int t, uint32_t (&to)[CONV_AHEAD]) const {
        #pragma unroll
        for (int i = 0; i < CONV_AHEAD; i++)
            to[i] = read_channels<C>(step_at(from, INSIDE || t + i < T ? t + i : T - 1, step));
    }
    __device__ __forceinline__ float sum(const float (&window)[C][W], int n) const {
        float p = bias[n];
        #pragma unroll
        for (int i = 0; i < W; i++) p += weight[n][i] * window[n][i];
        return p;
    }
};

template <int W> MATH void slide(float (&window)[W], float next) {
    #pragma unroll
    for (int i = 0; i + 1 < W; i++) window[i] = window[i + 1];
    window[W - 1] = next;
}

// INSIDE: all CONV_AHEAD steps belong to the tile, so no step checks bounds.
template <bool INSIDE, class E, int W, int C>
MATH void conv_forward_steps(const ConvArgs &a, const ConvPlace<E, W, C> &at, int t, float (&window)[C][W], E *y) {
    uint32_t xs[CONV_AHEAD];
    float ys[CONV_AHEAD][C];
    at.template read_ahead<INSIDE>(at.x, at.stride, t, xs);
    #pragma unroll
    for (int i = 0; i < CONV_AHEAD; i++)
        #pragma unroll
        for (int n = 0; n < C; n++) {
            slide(window[n], channel<C, E>(xs[i], n));
            const float p = at.sum(window, n);
            ys[i][n] = a.silu ? p * sigmoid(p) : p;
        }
    if (!at.live) return;
    #pragma unroll
    for (int i = 0; i < CONV_AHEAD; i++)
        if (INSIDE || t + i < at.t1) set_channels<C>(step_at(y, t + i, (int)(a.out_t * sizeof(E))), ys[i]);
}

template <class E, int W, int C> MATH void conv_forward(const ConvArgs &a) {
    const ConvPlace<E, W, C> at(a);
    E *y = (E *)a.y + at.b * a.T * a.out_t + at.c;
    float window[C][W];
    at.before(a, window);
    #pragma unroll 1
    for (int t = at.t0; t < at.t1; t += CONV_AHEAD) {
        if (t + CONV_AHEAD <= at.t1) conv_forward_steps<true>(a, at, t, window, y);
        else conv_forward_steps<false>(a, at, t, window, y);
    }
}

// The backward also runs forwards in time. dx at t needs dp, the gradients of the sums at t .. t + W - 1, so a tile
// walks W - 1 steps beyond its end. Those steps count in the next tile's dweight and dbias. dx at steps before 0 is
// dstate.
template <int W, int C> struct ConvSums { float window[C][W], dp[C][W], dweight[C][W], dbias[C]; };

template <bool INSIDE, class E, int W, int C>
MATH void conv_backward_steps(const ConvArgs &a, const ConvPlace<E, W, C> &at, int t, ConvSums<W, C> &s) {
    const E *dy = (const E *)a.dy + at.b * a.dy_b + at.c;
    const E *dy_again = (const E *)a.dy_again + at.b * a.dy_again_b + at.c;
    E *dx = (E *)a.dx + at.b * a.T * a.out_t + at.c;
    uint32_t xs[CONV_AHEAD], dys[CONV_AHEAD], others[CONV_AHEAD] = {};
    float dxs[CONV_AHEAD][C];
    at.template read_ahead<INSIDE>(at.x, at.stride, t, xs);
    at.template read_ahead<INSIDE>(dy, (int)(a.dy_t * sizeof(E)), t, dys);
    if (a.dy_again) at.template read_ahead<INSIDE>(dy_again, (int)(a.dy_again_t * sizeof(E)), t, others);
    #pragma unroll
    for (int i = 0; i < CONV_AHEAD; i++)
        #pragma unroll
        for (int n = 0; n < C; n++) {
            slide(s.window[n], channel<C, E>(xs[i], n));
            const float p = at.sum(s.window, n), gate = sigmoid(p);
            const float slope = a.silu ? gate * (1.0f + p * (1.0f - gate)) : 1.0f;
            const float dy_t = channel<C, E>(dys[i], n) + channel<C, E>(others[i], n);
            slide(s.dp[n], INSIDE || t + i < at.T ? dy_t * slope : 0.0f);
            const float grad = INSIDE || t + i < at.t1 ? s.dp[n][W - 1] : 0.0f;
            dxs[i][n] = 0.0f;
            #pragma unroll
            for (int j = 0; j < W; j++) {
                dxs[i][n] += at.weight[n][j] * s.dp[n][W - 1 - j];
                s.dweight[n][j] += grad * s.window[n][j];
            }
            s.dbias[n] += grad;
        }
    if (!at.live) return;
    #pragma unroll
    for (int i = 0; i < CONV_AHEAD; i++) {
        const int to = t + i - W + 1;                                    // the step whose gradients are complete
        if (INSIDE || (to >= at.t0 && to < at.t1)) set_channels<C>(step_at(dx, to, (int)(a.out_t * sizeof(E))), dxs[i]);
        else if (to < 0 && a.dstate)
            #pragma unroll
            for (int n = 0; n < C; n++) a.dstate[(at.b * (W - 1) + to + W - 1) * a.D + at.c + n] = dxs[i][n];
    }
}

template <class E, int W, int C> MATH void conv_backward(const ConvArgs &a) {
    const ConvPlace<E, W, C> at(a);
    ConvSums<W, C> s = {};
    at.before(a, s.window);
    #pragma unroll 1
    for (int t = at.t0; t < at.t1 + W - 1; t += CONV_AHEAD) {
        if (t > at.t0 && t + CONV_AHEAD <= at.t1) conv_backward_steps<true>(a, at, t, s);
        else conv_backward_steps<false>(a, at, t, s);
    }
    if (!at.live) return;
    #pragma unroll
    for (int n = 0; n < C; n++) {
        #pragma unroll
        for (int i = 0; i < W; i++) a.dweight[((int64_t)at.tile * W + i) * a.D + at.c + n] = s.dweight[n][i];
        if (a.dbias) a.dbias[(int64_t)at.tile * a.D + at.c + n] = s.dbias[n];
    }
}

extern "C" {
#if CONV_CHANNELS == 2
#define FORWARD_BLOCKS 7
#define MOST_BLOCKS (CONV_WIDTH > 4 ? 4 : 5)
#else
#define FORWARD_BLOCKS 8
#define MOST_BLOCKS 7
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000    // more blocks would spill registers
#define BACKWARD_BLOCKS (MOST_BLOCKS - 1)
#else
#define BACKWARD_BLOCKS MOST_BLOCKS
#endif
KERNEL(conv_forward_kernel, FORWARD_BLOCKS, ConvArgs, (conv_forward<CONV_TYPE, CONV_WIDTH, CONV_CHANNELS>(a)))
KERNEL(conv_backward_kernel, BACKWARD_BLOCKS, ConvArgs, (conv_backward<CONV_TYPE, CONV_WIDTH, CONV_CHANNELS>(a)))
__device__ int64_t facts[] = {CONV_TILE, sizeof(ConvArgs), THREADS, THREADS * CONV_CHANNELS, 0, 0, 0};
}

#else

// ------------------------------------------------------------------------------------------------ CPU: the convolution
// WC is the width if known at compile time, or 0 to read it from the arguments.

enum { AHEAD = 8 };                                    // steps from prefetching a row to using it

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
        E *y = (E *)a.y + b * a.T * a.out_t + c;
        for (int64_t t = 0; t < a.T; t++) {
            for (int i = 0; i + 1 < W; i++) window[i] = window[i + 1];
            window[W - 1] = load(x + t * a.x_t, n);
            prefetch(x + (t + AHEAD) * a.x_t);
            prefetch(y + (t + AHEAD) * a.out_t);
            vec p = bias;
            for (int i = 0; i < W; i++) p += w[i] * window[i];
            store(y + t * a.out_t, a.silu ? p * sigmoid(p) : p, n);
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
        const E *dy_again = (const E *)a.dy_again + b * a.dy_again_b + c;
        E *dx = (E *)a.dx + b * a.T * a.out_t + c;
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
            prefetch(x + (t - W - AHEAD) * a.x_t);
            prefetch(dy + (t - AHEAD) * a.dy_t);
            prefetch(dx + (t - AHEAD) * a.out_t);
            for (int i = W - 1; i > 0; i--) dp[i] = dp[i - 1];
            vec p = bias, d = load(dy + t * a.dy_t, n);
            if (a.dy_again) d = rounded(d + load(dy_again + t * a.dy_again_t, n), E());  // as autograd would
            for (int i = 0; i < W; i++) p += w[i] * window[i];
            if (a.silu) { vec s = sigmoid(p); d *= s * (1.0f + p * (1.0f - s)); }
            dp[0] = d;
            dbias += d;
            vec sum = {};
            for (int i = 0; i < W; i++) { dw[i] += d * window[i]; sum += w[i] * dp[W - 1 - i]; }
            store(dx + t * a.out_t, sum, n);
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

// -------------------------------------------------------------------------------------------------------- CPU: RMSNorm
// A task is a range of rows. It passes over memory once; eager PyTorch makes five passes, and twelve in the backward.

MATH float lane_sum(vec v) { float s = 0; for (int l = 0; l < LANES; l++) s += v[l]; return s; }

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

template <class X, class Y> static void norm_backward_rows(const NormArgs &a, int64_t task, int64_t first,
                                                           int64_t last) {
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

// -------------------------------------------------------------------------------- CPU: functions for kernels/build.py

template <class X, class Y> static void norm_forward(const NormArgs &a) {
    #pragma omp parallel for num_threads((int)a.threads)
    for (int64_t t = 0; t < a.tasks; t++) norm_forward_rows<X, Y>(a, a.rows * t / a.tasks, a.rows * (t + 1) / a.tasks);
}
template <class X, class Y> static void norm_backward(const NormArgs &a) {
    #pragma omp parallel for num_threads((int)a.threads)
    for (int64_t t = 0; t < a.tasks; t++)
        norm_backward_rows<X, Y>(a, t, a.rows * t / a.tasks, a.rows * (t + 1) / a.tasks);
}
template <class E, int WC> static void conv_forward(const ConvArgs &a) {
    for_tasks(a, [&](int64_t b, int64_t, int64_t first, int64_t last) { conv_forward_task<E, WC>(a, b, first, last); });
}
template <class E, int WC> static void conv_backward(const ConvArgs &a) {
    for_tasks(a, [&](int64_t b, int64_t, int64_t first, int64_t last) {
        conv_backward_task<E, WC>(a, b, first, last);
    });
}

#define DISPATCH_CONV(f, W) do { if (a->dtype == BFLOAT16) f<bf16, W>(*a); else f<float, W>(*a); } while (0)
#define DISPATCH_NORM(f) do {                                                                                 \
    if (a->x_dtype == BFLOAT16) { if (a->y_dtype == BFLOAT16) f<bf16, bf16>(*a); else f<bf16, float>(*a); }    \
    else { if (a->y_dtype == BFLOAT16) f<float, bf16>(*a); else f<float, float>(*a); } } while (0)

extern "C" {
int64_t longhorn_max_width(void) { return MAX_WIDTH; }
int64_t conv_args_size(void) { return sizeof(ConvArgs); }
int64_t norm_args_size(void) { return sizeof(NormArgs); }
void causal_conv_forward_cpu(const ConvArgs *a) {
    if (a->W == 4) DISPATCH_CONV(conv_forward, 4);
    else DISPATCH_CONV(conv_forward, 0);
}
void causal_conv_backward_cpu(const ConvArgs *a) {
    if (a->W == 4) DISPATCH_CONV(conv_backward, 4);
    else DISPATCH_CONV(conv_backward, 0);
}
void rms_norm_forward_cpu(const NormArgs *a) { DISPATCH_NORM(norm_forward); }
void rms_norm_backward_cpu(const NormArgs *a) { DISPATCH_NORM(norm_backward); }
}

#endif  // ON_GPU
