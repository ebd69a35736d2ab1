"""Calls the native kernels: chooses their shapes on a GPU, fills in their arguments and launches them."""

import ctypes
import functools

import torch

from common.torch_private import raw_stream
from kernels import build, cuda

SUB = 4  # steps whose states the CUDA backward keeps in registers; SUB in longhorn_scan.cu
SEGMENT = 128  # the shortest segment that T is split into on a GPU, in steps
SPLIT_BELOW = 0.6, 1.0  # T is split if a GPU has at most this many blocks per multiprocessor: forward, backward
SUM_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # the enums of lanes.h and sums.cu
UPDATES = ("longhorn", "exact", "mamba")  # the enum of longhorn_scan.cu
# (P, L) that `cuda_shape` chooses from: L lanes share two channels, and each lane holds P states of both
CUDA_SHAPES = [(P, L) for L in (2, 4, 8, 16, 32) for P in (4, 8)]
# Kernels with a variant for whole chunks and blocks: the rows that the variant fetches ahead.
FETCHED = {"forward_kernel": ("x", "dt", "z"), "backward_kernel": ("x", "dt", "z", "dy")}
FETCHED_BYTES = 2048  # the most bytes that fetched rows add to a 16-bit backward's shared memory, if P is 8


def backward_bytes(update, P, L):
    """Bytes of shared memory of a backward block that fetches no rows ahead (BackwardShared in longhorn_scan.cu)."""
    keys = 2 * build.CHUNK * P * L + build.CHUNK  # k, q, |k|^2
    per_lane = build.CHUNK // SUB * 2 * P + SUB + (2 * P if update == "mamba" else 1)  # states, gated, rates
    sums = build.CUDA_THREADS // 32 * SUB * (2 * P * L + 1)  # dk, dq, d|k|^2
    return 4 * (keys + build.CUDA_THREADS * per_lane + sums)


def blocks_at_once(update, shape, shared):
    """How many backward blocks fit a multiprocessor with `shared` bytes of shared memory; 0: none can be launched."""
    return shared // (backward_bytes(update, *shape) + cuda.RESERVED)


@functools.cache
def cuda_shape(update, B, T, D, N, multiprocessors, shared, may_split=True, backward=True):
    """Choose (P, L) from CUDA_SHAPES: L lanes share two channels, and each lane holds P states of both. P * L is N,
    padded to a power of two >= 8.

    shared: bytes of shared memory per multiprocessor. Eight states per lane take the least work. Four are chosen in
    three cases:

    - Only with four do two blocks, or one block that fetches rows ahead, fit a multiprocessor.
    - With eight, multiprocessors would be idle even with T split into segments.
    - A forward that does not split T (`cuda_segments`) would have at most one block per multiprocessor with eight. With
      four, a warp's step is predicted to take 62 instructions instead of 100. The states kept for the backward are the
      same.

    No GPU has confirmed the third rule, nor that two blocks per multiprocessor are enough. Raises ValueError if no
    block fits.
    """
    states = max(8, 1 << (N - 1).bit_length())
    launched = [shape for shape in CUDA_SHAPES if blocks_at_once(update, shape, shared)]
    fitting = [(P, L) for P, L in launched if P * L == states]
    if not fitting:
        most = max(P * L for P, L in launched)
        raise ValueError(f"scan: on this GPU, with {shared >> 10} KB of shared memory per multiprocessor, the CUDA "
                         f"kernels of {update} take up to {most} states per channel, got {N}: use backend='torch'")
    four, eight = min(fitting), max(fitting)
    lanes = D * states // (2 * eight[0])
    most = max(1, T // SEGMENT) if may_split and T % build.CHUNK == 0 else 1
    blocks = B * -(-lanes // build.CUDA_THREADS)
    idle = most * blocks < 2 * multiprocessors
    crowded = blocks_at_once(update, eight, shared) < 2 <= blocks_at_once(update, four, shared)
    tight = not blocks_at_once(update, eight, shared - FETCHED_BYTES)
    split_below = cuda.tuning("SPLIT_BELOW", SPLIT_BELOW[False])
    waits = not backward and split_below * multiprocessors < blocks <= multiprocessors
    P = cuda.tuning("P", 4 if idle or crowded or tight or waits else 8)
    return four if P == 4 else eight


def cuda_segments(update, dtype, shape, blocks, T, multiprocessors, shared, backward=True):
    """Return how many segments, of at least SEGMENT steps, to split T into. blocks: a kernel's blocks per segment.

    With more than SPLIT_BELOW blocks per multiprocessor T stays whole. Otherwise blocks would wait for memory, so T is
    split into as many blocks as the backward can run at once. Registers suffice for three blocks in 16 bits, else for
    two. Joining the segments costs the forward about as much again, and the backward a quarter of that, for any number
    of segments. So the forward has the lower limit. An H200 was timed with 8 x 4096 tokens of 1536 channels, 0.73
    blocks per multiprocessor. The forward took 0.38 ms whole and 0.45 split; the backward took 2.06 and 1.22.
    """
    if blocks > cuda.tuning("SPLIT_BELOW", SPLIT_BELOW[backward]) * multiprocessors:
        return 1
    at_once = min(3 if dtype.itemsize == 2 else 2, blocks_at_once(update, shape, shared))
    fill = cuda.tuning("FILL", max(2, at_once))
    return max(1, min(T // SEGMENT, fill * multiprocessors // blocks))


def segment_sizes(T, segments):
    """Split T into segments of whole chunks; the last may be shorter. Rounding may leave fewer segments."""
    segment_T = -(-T // (segments * build.CHUNK)) * build.CHUNK
    return {"segments": -(-T // segment_T), "segment_T": segment_T}


class Kernels:
    """The library and argument struct for one call on x (B, T, D); the kernels read and write `dtype`.

    update: the scan's update, one of UPDATES; None: the convolution. rows: the number of packed sequences; None: x's B.
    gated: the scan has z; without z, T is not split. backward: the call is the scan's backward.
    With `reversed` set, the kernels walk rows and steps from last to first. This holds for all tensors (B, T, ...) that
    are read by strides, and for OUT. Tensors without T, or (.., B, T, N), stay in the order in which the kernels run.
    """

    OUT = ("y", "dx", "ddt", "dz")  # (B, T, D): contiguous, or half of a contiguous tensor
    reversed = False

    def __init__(self, args_class, x, update=None, rows=None, gated=False, backward=False, **sizes):
        threads = torch.get_num_threads()
        self.__dict__ |= _prepare(args_class, x.shape, x.dtype, x.device, update, rows, gated, backward, threads,
                                  **sizes)
        self.args = args_class.from_buffer_copy(self.args)

    def __call__(self, function, rows, floats, **buffers):
        """Point the struct at tensors and call a library function; absent tensors (None) stay null.

        rows: tensors (B, T, C), read in `dtype` with their strides. They are copied only if the last dimension is not
        contiguous, a stride is too large or rows are not aligned. floats: read as contiguous float32. buffers: passed
        unchanged.
        """
        args, size = self.args, self.dtype.itemsize
        sign = -1 if self.reversed else 1
        for name in self.OUT:
            if buffers.get(name) is not None:
                setattr(args, "dz_t" if name == "dz" else "out_t", sign * buffers[name].stride(1))
        tensors = {n: cast(a, self.dtype) for n, a in rows.items() if a is not None}
        for name, a in tensors.items():
            b, t, d = a.stride()
            fits = t * size < 2**31 and (d == 1 or a.shape[2] == 1)  # the kernels' strides in bytes have 32 bits
            if not fits or self.aligned > 1 and (a.data_ptr() | b * size | t * size) % self.aligned:
                tensors[name] = a = a.clone(memory_format=torch.contiguous_format)
                b, t, d = a.stride()
            setattr(args, name + "_b", sign * b)
            setattr(args, name + "_t", sign * t)
        tensors |= {n: cast(a).contiguous() for n, a in floats.items() if a is not None}
        tensors |= {n: a for n, a in buffers.items() if a is not None}
        point(args, **tensors)  # the dict keeps the copies alive until the function returns
        for name, a in tensors.items() if self.reversed else ():
            if name in rows or name in self.OUT:  # start at the last row
                last = (a.shape[0] - 1) * a.stride(0) + (a.shape[1] - 1) * a.stride(1)
                setattr(args, name, a.data_ptr() + last * a.itemsize)
        self.run(function)

    def run(self, function):
        if self.module is None:
            return getattr(build.library(), function + "_cpu")(ctypes.byref(self.args))
        in_stream(self.device, functools.partial(self.launch, function))

    def launch(self, function, stream):
        a, module = self.args, self.module
        kernel = function.removeprefix("longhorn_scan_").removeprefix("causal_") + "_kernel"
        whole = kernel.replace("_kernel", "_whole_kernel")
        if kernel in FETCHED and self.is_whole(FETCHED[kernel]) and module.has_room(whole, kernel):
            kernel = whole
        blocks = a.B * -(-a.D * a.N // module.threads) if kernel == "combine_kernel" else a.B * self.segments * a.splits
        if blocks:
            module.launch(kernel, blocks, a, stream)

    def is_whole(self, rows):
        """True if the kernels without bounds checks can run. They need whole chunks and blocks, all `rows`, aligned for
        16-byte copies, and k and q aligned for copies of four numbers."""
        a, size = self.args, self.dtype.itemsize
        if a.cu or a.T % build.CHUNK or a.D % self.module.channels or a.N != self.module.states:
            return False
        for name, part in (*[(n, 16) for n in rows], ("k", 4 * size), ("q", 4 * size)):
            address, b = getattr(a, name), getattr(a, name + "_b") if a.B > 1 else 0  # with one row, b is arbitrary
            if not address or (address | (b | getattr(a, name + "_t")) * size) % part:
                return False
        return True

    def initial_segment_states(self, rows, floats, function, initial, reverse=0):
        """Compute the state before each segment of T, (rows, segments, D, N): `function` finds each segment's final
        state from a zero state, and combine_kernel joins them. With `reverse`: the gradient after each segment."""
        a = self.args
        states, decay = (empty(next(iter(rows.values())), a.B * a.segments, a.D, a.N) for _ in range(2))
        self(function, rows, floats, hT=states, decay=decay)
        self.args.reverse = reverse
        self("longhorn_scan_combine", {}, {"dhT" if reverse else "h0": initial}, hT=states, decay=decay)
        return states


@functools.cache
def gpu_module(update, dtype, shape, device):
    """`build.cuda_module` for this GPU."""
    gpu = torch.cuda.get_device_properties(device)
    return build.cuda_module(update, dtype, shape, f"sm_{gpu.major}{gpu.minor}", device.index)


def sums_module(device):
    """The kernel of `sums`; None on a CPU."""
    return gpu_module("sums", torch.float32, (build.BLOCK_SUMS,), device) if device.type == "cuda" else None


def sums(parts, dtypes, columns=0):
    """Sum each of `parts`, float32 (P, ...), over P and round it to its dtype in `dtypes`; None stays None. On a GPU
    one kernel computes all sums. columns: the first part is (P, columns, n), and its sum is (n, columns)."""
    module = sums_module(parts[0].device)
    args, totals, blocks = build.SumsArgs(), [], 0
    for i, (a, dtype) in enumerate(zip(parts, dtypes, strict=True)):
        transposed = i == 0 and columns > 0
        if a is None or module is None:
            total = None if a is None else cast(a[0] if len(a) == 1 else a.sum(0), dtype)
            totals.append(total.t().contiguous() if transposed else total)
            continue
        totals.append(empty(a, *a.shape[:0:-1] if transposed else a.shape[1:], dtype=dtype))
        n = totals[-1].numel()
        args.of[i] = build.Sum(blocks, len(a), n, columns if transposed else 1, SUM_TYPES.index(dtype))
        point(args.of[i], source=a, to=totals[-1])
        blocks += -(-n // build.BLOCK_SUMS)
    for unused in args.of:
        unused.first = unused.first if unused.n else blocks  # unused entries start after the last block
    if blocks:
        in_stream(parts[0].device, functools.partial(module.launch, "sums_kernel", blocks, args))
    return totals


def in_stream(device, launch):
    """Call `launch` with the address of PyTorch's current stream on this GPU, while the GPU is the current device."""
    stream = raw_stream(device.index)
    if device.index == torch.cuda.current_device():
        return launch(stream)
    with torch.cuda.device(device.index):
        launch(stream)


@functools.lru_cache(1024)
def _prepare(args_class, shape, dtype, device, update, rows, gated, backward, threads, **sizes):
    """The attributes of Kernels that depend only on shapes, dtypes and devices. They are cached, so the caller must
    copy `args`. `module` is None on a CPU."""
    B, T, D = shape
    if rows is not None:
        B = rows
    if device.type == "cuda":
        threads = 0
        module, segments, splits = _on_gpu(B, T, D, dtype, device, update, rows, gated, backward, sizes)
    else:
        module, segments = None, 1
        dtype = torch.float32 if dtype == torch.float16 else dtype
        groups = -(-D // build.library().longhorn_lanes())
        splits = 1
        while B * splits % threads and B * splits < 4 * threads and splits < groups:
            splits += 1  # until all threads have equal work
    if update is not None:
        sizes |= segment_sizes(T, segments)
        sizes["update"] = UPDATES.index(update)
        segments = sizes["segments"]
    args = args_class(B=B, T=T, D=D, splits=splits, threads=threads, dtype=int(dtype == torch.bfloat16), **sizes)
    aligned = alignment(update, segments, dtype, module)
    return dict(device=device, dtype=dtype, module=module, segments=segments, aligned=aligned, args=args)


def alignment(update, segments, dtype, module):
    """The alignment that rows need, in bytes: what a lane of the convolution, or a segment, reads at once."""
    if update is None and module is not None:
        return dtype.itemsize * module.channels // module.threads
    return 16 if segments > 1 else 1


def _on_gpu(B, T, D, dtype, device, update, rows, gated, backward, sizes):
    """Return (module, number of segments of T or of the convolution's tiles, blocks that share a row). Raises
    ValueError if no block of the kernels fits."""
    gpu = torch.cuda.get_device_properties(device)
    segments = 1
    if update is None:
        at_once = 2 if dtype.itemsize == 2 and D % 2 == 0 else 1  # channels per lane
        module = gpu_module("conv", dtype, (sizes["W"], at_once), device)
        segments = -(-T // build.CONV_TILE)
    else:
        # Joining segments of `exact` would take products of N x N matrices. Segments need the kernels for whole chunks.
        may_split = gated and rows is None and update != "exact"
        shared = gpu.shared_memory_per_multiprocessor
        layout = cuda_shape(update, B, T, D, sizes["N"], gpu.multi_processor_count, shared, may_split, backward)
        module = gpu_module(update, dtype, layout, device)
        row_bytes = module.channels // (module.threads // 32) * dtype.itemsize  # for a warp, fetched 16 at a time
        whole = T % build.CHUNK == 0 and D % module.channels == 0 and sizes["N"] == module.states
        if may_split and whole and row_bytes >= 16:
            blocks = B * D // module.channels
            segments = cuda_segments(update, dtype, layout, blocks, T, gpu.multi_processor_count, shared, backward)
    return module, segments, -(-D // module.channels)


def kept_states(x, N):
    """States per channel stored at a chunk boundary: N, on a GPU rounded up to a multiple of four."""
    return -(-N // 4) * 4 if x.is_cuda else N


def cast(a, dtype=torch.float32):
    """`a` in `dtype`; None stays None. Tensor.to takes microseconds even if there is nothing to do."""
    return a if a is None or a.dtype == dtype else a.to(dtype)


def point(args, **tensors):
    """Write the tensors' addresses into a struct; the caller must keep the tensors alive."""
    for name, a in tensors.items():
        setattr(args, name, a.data_ptr())
    return ctypes.byref(args)


def empty(x, *shape, dtype=torch.float32):
    """An uninitialised tensor on x's device: kernels write every element of their results."""
    return torch.empty(shape, dtype=dtype, device=x.device)
