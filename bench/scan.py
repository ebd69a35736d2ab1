"""The scan, compared with other scans and with GLA and attention: is it right, and how fast is it?

    python bench/scan.py --device=cpu                            # ours, and plain PyTorch
    python bench/scan.py --T=1024 --B=4 --dtype=bfloat16
    python bench/scan.py --device=cuda --save                    # the paper's 24 shapes, results/scan_cuda.json
    python bench/scan.py --device=cuda --T=2048 --D=1024 --N=32  # your own shape

First every result and gradient is compared with a loop in float64 on the same device. The comparison uses the shape
that is timed (on a GPU the paper's shapes), also with keys times 1000 and logits of +-1000. Wrong kernels are not
timed. mamba-ssm's kernels, if installed, are compared in the same way. Then all contenders take turns at each shape,
round after round: the forward without autograd, then forward and backward with it.

A scan's time comes with its share of the copy bandwidth measured on the same device. The share is the bytes that a scan
must move (bytes_moved), divided by its time and by the bandwidth. GLA and attention do a different job and get none.
"""

import functools
import itertools
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import configurator  # noqa: E402
from bench import measure  # noqa: E402
from bench.measure import DTYPES, EPS, PASSES, LeftOut, Threads, a_pass, as_mamba, imported, in_one_line  # noqa: E402
from common.errors import ConfigError, main_error  # noqa: E402
from configurator import Count, Seconds  # noqa: E402
from kernels import build  # noqa: E402
from kernels.scan import longhorn_scan, selective_scan  # noqa: E402


class Shape(NamedTuple):
    B: int
    T: int
    D: int
    N: int

    def __str__(self):
        return f"B={self.B} T={self.T} D={self.D} N={self.N}"


# ----------------------------------------------------------------------------------------------------------- contenders

def our_longhorn(shape, a, dy, device, backend=""):
    return a_pass(functools.partial(longhorn_scan, backend=backend or device.name), a, dy)


def our_mamba(shape, a, dy, device):
    return a_pass(functools.partial(selective_scan, delta_softplus=True, backend=device.name), as_mamba(a), dy)


def mamba_ssm(shape, a, dy, device):
    """mamba-ssm in its own layout, (B, D, T) with time contiguous; the transposition is not timed."""
    check_mamba_ssm(device)
    a = {n: time_last(v) for n, v in as_mamba(a).items()}
    return a_pass(functools.partial(imported(*MAMBA_SSM), delta_softplus=True), a, time_last(dy))


def time_last(v):
    return v.transpose(1, 2).contiguous() if v.dim() == 3 else v


def need_gpu(device):
    if device.name != "cuda":
        raise LeftOut("its kernels need a GPU")


def fla_chunk_gla(shape, a, dy, device):
    """GLA with D / 128 heads, keys of N and values of 128 channels. Its state has D N numbers, like the scan's."""
    f = imported("fla.ops.gla", "chunk_gla")
    if shape.D % 128:
        raise LeftOut(f"D {shape.D} is not a whole number of heads of 128")
    g = torch.Generator(device.name).manual_seed(3)
    random = torch.randn(3, shape.B, shape.T, shape.D // 128, shape.N, generator=g, device=device.name)
    q, k, gate = random.to(a["x"].dtype)
    v = a["x"].unflatten(-1, (-1, 128))
    a = {"q": q, "k": k, "v": v, "g": F.logsigmoid(gate) / 16}  # the gate of fla's GLA layer
    return a_pass(lambda **a: f(**a)[0], a, dy.view_as(v))


def attention(shape, a, dy, device):
    """PyTorch's causal flash attention, D channels in heads of 64; x, dt and z serve as q, k and v."""
    if shape.D % 64:
        raise LeftOut(f"D {shape.D} is not a whole number of heads of 64")
    heads = lambda v: v.view(shape.B, shape.T, shape.D // 64, 64).transpose(1, 2)  # (B, H, T, 64)

    def call(**a):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(**a, is_causal=True)

    return a_pass(call, {"query": heads(a["x"]), "key": heads(a["dt"]), "value": heads(a["z"])}, heads(dy))


def longhorn_mma(shape, a, dy, device):
    """The prototype of the same recurrence on tensor cores, in TF32. It does less work than the others: no D and z, and
    the step sizes are given."""
    need_gpu(device)
    scan = imported("tools.scan_mma", "longhorn_scan")

    def step_sizes(dt, k):
        return 1 / (1 + torch.exp(-dt) + k.square().sum(-1, keepdim=True))  # (B, T, D)

    def with_step_sizes(x, dt, k, q):
        return scan(step_sizes(dt, k), x, k, q)

    small = measure.make_inputs(1, 101, 200, shape.N, torch.float32, device.name)
    small = {name: small[name] for name in ("x", "dt", "k", "q")}
    if wrong := measure.faults(with_step_sizes, scans("longhorn", "torch"), small, 1e-3):
        raise LeftOut(f"wrong in {wrong}")
    e = step_sizes(a["dt"].float(), a["k"].float()).to(dy.dtype)
    return a_pass(lambda **a: scan(**a)[0], {"e": e, "x": a["x"], "k": a["k"], "q": a["q"]}, dy)


SCANS = {"longhorn_scan": our_longhorn, "selective_scan": our_mamba, "mamba_ssm": mamba_ssm}
ON_CPU = {"longhorn_scan": our_longhorn, "selective_scan": our_mamba,
          "torch": functools.partial(our_longhorn, backend="torch")}
ON_GPU = SCANS | {"longhorn_mma": longhorn_mma, "fla_chunk_gla": fla_chunk_gla, "attention": attention}


# ---------------------------------------------------------------------------------------------------------- correctness

MAMBA_SSM = "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn"
KERNELS_OF = {"longhorn": "longhorn_scan", "exact": "longhorn_scan", "mamba": "selective_scan"}

KEYS, LOGITS = {"key": 1000.0}, {"logit": 1000.0}
PAPER = (64, 1024, 1536, 16)
AT_THE_PAPERS = [  # family, (B, T, D, N), dtype, extremes; the last has few rows, so that T is split into segments
    ("longhorn", PAPER, "bfloat16", {}), ("longhorn", PAPER, "float32", {}), ("mamba", PAPER, "bfloat16", {}),
    ("longhorn", PAPER, "bfloat16", KEYS | LOGITS), ("longhorn", PAPER, "float32", KEYS),
    ("longhorn", (16, 4096, 1536, 16), "bfloat16", {}), ("longhorn", (64, 1024, 1536, 64), "bfloat16", {}),
    ("exact", PAPER, "bfloat16", {}), ("mamba", PAPER, "float32", {}), ("longhorn", PAPER, "float32", LOGITS),
    ("longhorn", (2, 4096, 1536, 16), "bfloat16", {})]


def cases_at(shape, dtype):
    """The comparisons for a shape other than the paper's."""
    return [("longhorn", shape, dtype, {}), ("longhorn", shape, dtype, KEYS | LOGITS), ("mamba", shape, dtype, {})]


def scans(family, backend):
    """Return f(**a) -> (y, hT) for longhorn, exact (Eq. 6) or mamba. For mamba_ssm, whose hT has no gradient, f returns
    (y, None)."""
    if family == "mamba_ssm":
        if backend == "torch":
            return lambda **a: (selective_scan(**a, delta_softplus=True, backend=backend), None)
        f = imported(*MAMBA_SSM)
        return lambda **a: (f(**{n: time_last(v) for n, v in a.items()}, delta_softplus=True).transpose(1, 2), None)
    if family == "mamba":
        return functools.partial(selective_scan, delta_softplus=True, return_last_state=True, backend=backend)
    return functools.partial(longhorn_scan, exact=family == "exact", return_state=True, backend=backend)


def check_case(family, shape, dtype, extreme, device):
    """Compare a scan with the loop in float64, and return a row for the record.

    The row has errors and tolerances for y, hT and every gradient, and says if two runs agree to the bit. If the scan
    did not run, it has a 'reason' instead. Raises ConfigError if the GPU is unusable afterwards.
    """
    row = {"family": family, **dict(zip("BTDN", shape, strict=True)), "dtype": dtype, **extreme}
    try:
        row |= compared(family, shape, DTYPES[dtype], extreme, device)
    except Exception as error:
        row |= {"right": False, "reason": in_one_line(error)}
    if not device.recover():
        raise ConfigError(f"the GPU is unusable after {describe_case(row)}")
    return row


def compared(family, shape, dtype, extreme, device):
    a = measure.make_inputs(*shape, dtype, device.name, **extreme)
    if family.startswith("mamba"):
        a = as_mamba(a)
    got = measure.values_and_gradients(scans(family, device.name), a)
    same = None  # mamba-ssm sums atomically, in an order that changes from run to run
    if family != "mamba_ssm":
        again = measure.values_and_gradients(scans(family, device.name), a)
        same = all(torch.equal(again[name], v) for name, v in got.items())
        del again
    # the torch backend recomputes pieces in its backward, so that float64 fits in memory
    true = measure.values_and_gradients(scans(family, "torch"), a, torch.float64)
    results = measure.compare(got, true, slack(family, shape[1], extreme))
    right = same is not False and not measure.wrong_in(results)
    return {"right": right, "two_runs_agree": same, "results": results}


def slack(family, T, extreme):
    """Return the relative error that a float32 result may have after T steps."""
    if family == "mamba_ssm":  # compiled with fast math
        return 1e-3
    # Mamba: the hardware approximates the exponential, and an error of 2 ulp in a decay near 1 adds up over T steps
    if extreme:
        return 2e-5
    return 64 * EPS + (2 * T * EPS if family == "mamba" else 0)


def describe_case(row):
    case = f"{Shape(*(row[n] for n in 'BTDN'))} {row['dtype']}"
    for name in ("key", "logit"):
        if name in row:
            case += f" |{name}|={row[name]:g}"
    if "reason" in row:
        return f"{case}: {row['reason']}"
    if row["right"]:
        return f"{case}: ok, largest error {max(r['relative_error'] for r in row['results'].values()):.1e}"
    return f"{case}: WRONG: {measure.wrong_in(row['results']) or 'two runs differ'}"


def check(cases, device, budget_s):
    """Run and print all cases that fit in budget_s seconds; returns (records, {contender: why it is not timed})."""
    rows = []
    wrong = {}
    began = time.perf_counter()
    for case in cases:
        if time.perf_counter() - began > budget_s:
            print(f"  {len(cases) - len(rows)} more comparisons are left out: {budget_s:.0f} s are used up")
            break
        row = check_case(*case, device)
        rows.append(row)
        print(f"  {row['family']:9} {describe_case(row)}", flush=True)
        if not row["right"]:
            wrong.setdefault(KERNELS_OF[row["family"]], describe_case(row))
    return rows, wrong


@functools.cache
def check_mamba_ssm(device):
    """Compare mamba-ssm with the loop in float64 at two shapes. Raises LeftOut if it is wrong or missing."""
    need_gpu(device)
    imported(*MAMBA_SSM)
    for shape in [(2, 1024, 256, 16), (2, 4096, 256, 64)]:
        row = check_case("mamba_ssm", shape, "bfloat16", {}, device)
        if not row["right"]:
            raise LeftOut(describe_case(row))


# ----------------------------------------------------------------------------------------------------------------- time

def bytes_moved(B, T, D, N, itemsize):
    """Bytes that a scan must read and write in each of PASSES, counting every tensor once.

    With autograd the forward also writes one state per chunk, in float32, and the backward reads them.
    """
    wide, narrow = B * T * D * itemsize, B * T * N * itemsize
    states = 4 * B * math.ceil(T / build.CHUNK) * D * N
    forward = 4 * wide + 2 * narrow            # x, dt, z in, y out; k, q in
    backward = 7 * wide + 4 * narrow + states  # x, dt, z, dy in, dx, ddt, dz out; k, q in, dk, dq out
    return dict(zip(PASSES, (forward, backward, forward + backward + states), strict=True))


def refuse(why, *arguments):
    """Stands in for a contender that is not timed."""
    raise LeftOut(why)


def time_shapes(record, out, device, args, began):
    """Time the contenders at each shape, until --budget_s seconds have passed since `began`."""
    without = dict.fromkeys(args.without, "left out by --without") | record["wrong"]
    contenders = dict(ON_GPU if args.device == "cuda" else ON_CPU)
    for name in contenders.keys() & without:
        contenders[name] = functools.partial(refuse, without[name])
    for shape in chosen_shapes(args):
        spent = time.perf_counter() - began
        try:
            if spent > args.budget_s:
                raise LeftOut(f"{spent:.0f} of {args.budget_s:g} s are used up (--budget_s)")
            time_shape(record, shape, contenders, device, args.rounds)
        except (LeftOut, torch.OutOfMemoryError) as error:
            record["left_out"].append({"shape": str(shape), "reason": in_one_line(error)})
            print(f"left out: {shape} ({in_one_line(error)})")
        device.recover()
        record["seconds"] = time.perf_counter() - began
        measure.write_record(out, record)


def time_shape(record, shape, contenders, device, rounds):
    """Time all contenders at one shape; add the result to the record and print it."""
    dtype = DTYPES[record["dtype"]]
    a = measure.make_inputs(*shape, dtype, device.name)
    g = torch.Generator(device.name).manual_seed(2)
    dy = torch.randn(a["x"].shape, generator=g, device=device.name).to(dtype)
    makes = {name: functools.partial(f, shape, a, dy, device) for name, f in contenders.items()}
    rows = measure.time_contenders(makes, device, rounds)
    moved = bytes_moved(*shape, dtype.itemsize)
    print(f"\n{shape} {record['dtype']}, milliseconds (share of the copy bandwidth)")
    for row in rows:
        words = []
        for direction in () if "reason" in row else PASSES:
            seconds = row[direction]["median_seconds"]
            words.append(f"{direction} {1e3 * seconds:.3f}")
            if row["contender"] in SCANS:
                share = moved[direction] / record["copy_bytes_per_second"] / seconds
                row[direction]["share_of_bandwidth"] = share
                words[-1] += f" ({share:.0%})"
        print(f"  {row['contender']:16}{row.get('reason') or ', '.join(words)}", flush=True)
    record["shapes"].append({"shape": {**shape._asdict(), "name": str(shape)}, "rows": rows})


def in_short(record):
    """Prints the number of right comparisons, and every contender's forward + backward at the first two shapes."""
    right = sum(row["right"] for row in record["correctness"])
    print(f"in short: {right} of {len(record['correctness'])} comparisons with the loop in float64 are right")
    for entry in record["shapes"][:2]:
        words = []
        for row in entry["rows"]:
            if "reason" not in row:
                words.append(f"{row['contender']} {1e3 * row['forward_backward']['median_seconds']:.2f} ms")
        print(f"in short: {entry['shape']['name']} forward + backward: {', '.join(words) or 'nothing timed'}")


# ----------------------------------------------------------------------------------------------------------------- main

@dataclass
class Options:
    device: Literal["cpu", "cuda"] = "cpu"
    B: Count = None  # batch size (8; cuda: 64K tokens)
    T: Count = None  # steps (256; cuda: 1024 to 32768)
    D: Count = None  # channels (512; cuda: 1536 and 2048)
    N: Count = None  # state size per channel (16; cuda: 16 and 64)
    dtype: Literal[tuple(DTYPES)] = None  # of x, dt, k, q, z (float32; cuda: bfloat16)
    threads: Threads = None  # threads of PyTorch and the kernels (PyTorch's choice)
    rounds: Count = 10  # rounds of all contenders in turn
    budget_s: Seconds = math.inf  # start no new shape after this many seconds
    without: tuple[Literal[tuple(ON_GPU | ON_CPU)], ...] = ()  # contenders to leave out
    out: Path = None  # write the record to this JSON file (out/scan_cpu.json or out/scan_cuda.json)
    save: bool = False  # write it to results/ instead
    dry_run: bool = False  # with --device=cuda: the same code on the CPU at tiny sizes, as a test


def chosen_shapes(args):
    """Return the shape from the options, or else all shapes timed on a GPU. The most important come first: the paper's
    width and state, then more tokens, larger states, more width."""
    if args.device == "cpu":
        return [Shape(args.B or 8, args.T or 256, args.D or 512, args.N or 16)]
    T = args.T or 1024
    if args.B or args.T or args.D or args.N:
        return [Shape(args.B or max(1, 65536 // T), T, args.D or 1536, args.N or 16)]
    if args.dry_run:
        return [Shape(8, 16, 128, 16), Shape(4, 64, 128, 16)]
    every = itertools.product((1536, 2048), (16, 64), (65536, 524288), (1024, 4096, 32768))
    return [Shape(tokens // T, T, D, N) for D, N, tokens, T in every]


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    began = time.perf_counter()
    on_gpu = args.device == "cuda" and not args.dry_run
    benchmark = f"scan_{args.device}"
    out = measure.record_file(args, benchmark, args.dry_run)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = measure.Gpu() if on_gpu else measure.Cpu()
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    record = measure.new_record(benchmark, dry_run=args.dry_run, device=device.describe(), shapes=[], left_out=[],
                                dtype=dtype)
    print(f"{measure.headline(record, record['device']['name'])}\nkernels against the loop in float64:", flush=True)
    cases = AT_THE_PAPERS if on_gpu else cases_at(chosen_shapes(args)[0], dtype)
    record["correctness"], record["wrong"] = check(cases, device, args.budget_s / 3)
    record["copy_bytes_per_second"] = device.copy_bandwidth()
    print(f"copy bandwidth {record['copy_bytes_per_second'] / 1e9:,.0f} GB/s", flush=True)
    time_shapes(record, out, device, args, began)
    measure.finish(out, record)
    in_short(record)
    for name, why in record["wrong"].items():
        print(f"bench/scan.py: {name} was not timed: {why}", file=sys.stderr)
    ours = [entry["rows"][0] for entry in record["shapes"]]
    missing = any("reason" in row for row in ours) and "longhorn_scan" not in args.without
    return int(bool(record["wrong"]) or not ours or missing)


if __name__ == "__main__":
    with main_error("bench/scan.py"):
        sys.exit(main(sys.argv[1:]))
