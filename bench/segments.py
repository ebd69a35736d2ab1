"""Into how many segments the scan's T is best split on this GPU: by the clock, beside what native.cuda_segments takes by a model.

    python bench/segments.py                     # eight shapes whose rows are too few or just enough to fill a GPU
    python bench/segments.py --save              # results/segments_cuda.json
    python bench/segments.py --shapes=2x8192x1536x16,1x65536x2048x64         # B x T x D x N of your own

For each shape, forward and backward by themselves: every number of segments in turn, round after round, from an empty cache; then
which constants (native.LONE, native.JOINING) would have chosen best over all of them.

The surprise: nothing is chosen while training, though a clock would choose better than a model. Another number of segments rounds
otherwise, and two runs of one command are to agree to the bit. So the clock runs here, and who believes it edits native.py.
"""

import argparse
import datetime
import functools
import math
import sys
import time
from pathlib import Path
from unittest import mock

BEGAN = time.perf_counter()  # before PyTorch is imported

import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import native  # noqa: E402
import records  # noqa: E402
from bench.measure import finite, in_one_line, make_inputs, refuse_uncommitted, spread  # noqa: E402
from bench.scan_cuda import DryRun, Gpu, Shape, sources  # noqa: E402
from configurator import main_error  # noqa: E402
from scan import longhorn_scan  # noqa: E402

SAVED = ROOT / "results" / "segments_cuda.json"
SHAPES = ("16x4096x1536x16,1x65536x1536x16,2x4096x1536x16,32x1024x1536x16,8x1024x1536x16,4x16384x1536x16,1x4096x1536x16,"
          "16x4096x1536x64")
TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
DIRECTIONS = tuple(native.JOINING)
LONES, JOININGS = [1 + i / 4 for i in range(9)], [j / 20 for j in range(31)]  # the constants that are compared


def blocks_of(shape, multiprocessors):
    """Blocks of the kernels that `native` takes for a shape, a segment."""
    return shape.B * math.ceil(shape.D / native.cuda_channels(native.cuda_shape(*shape, multiprocessors)))


def split_into(segments):
    """A context in which every scan on a GPU takes so many segments, as far as T has them."""
    return mock.patch.object(native, "cuda_segments", lambda *_: segments)


@functools.cache  # a fit asks for the same ones again after every shape
def choice(blocks, T, multiprocessors, lone, joining):
    """What native.cuda_segments would choose with these constants, as it comes out in whole chunks."""
    with mock.patch.object(native, "LONE", lone):
        return native.segment_sizes(T, native.cuda_segments.__wrapped__(blocks, T, multiprocessors, joining))["segments"]


def tried(shape, multiprocessors):
    """The numbers of segments that can be had, of at least native.SEGMENT steps: TRIED, what is chosen
    now, and all that best_constants compares."""
    most = max(1, shape.T // native.SEGMENT)
    blocks, constants = blocks_of(shape, multiprocessors), {(native.LONE, j) for j in native.JOINING.values()}
    constants |= {(lone, j) for lone in LONES for j in JOININGS}
    compared = {choice(blocks, shape.T, multiprocessors, *c) for c in constants}
    return sorted(compared | {native.segment_sizes(shape.T, S)["segments"] for S in (*TRIED, most) if S <= most})


def time_shape(shape, device, multiprocessors, rounds):
    """Rows of a shape, one a direction: {'direction', 'blocks', 'chosen', 'seconds': {segments: spread}, ...}, of bfloat16."""
    a = {n: v.requires_grad_() for n, v in make_inputs(*shape, torch.bfloat16, device=device.name).items()}
    kept, dy = {}, torch.ones_like(a["x"])

    def forward():  # as in training: it keeps the states that the backward reads
        longhorn_scan(**a)

    def backward():
        torch.autograd.grad(kept["y"], list(a.values()), dy, retain_graph=True)

    blocks, numbers, rows = blocks_of(shape, multiprocessors), tried(shape, multiprocessors), []
    for direction, step in zip(DIRECTIONS, (forward, backward), strict=True):
        kept["y"] = longhorn_scan(**a) if direction == "backward" else None
        laps = {S: [] for S in numbers}
        for i in range(rounds + 1):
            for S in laps:
                with split_into(S):
                    seconds, = device.laps(step)
                laps[S] += [seconds] * (i > 0)  # the first warms up
        chosen = choice(blocks, shape.T, multiprocessors, native.LONE, native.JOINING[direction])
        rows.append({"shape": str(shape), **shape._asdict(), "direction": direction, "blocks": blocks, "chosen": chosen,
                     "multiprocessors": multiprocessors, "seconds": {S: spread(times) for S, times in laps.items()}})
    return rows


def cost(row, S):
    """How many times longer S segments take than they may: 1.05 times the best, since native.cuda_segments saves memory by 5%."""
    medians = {n: s["median_seconds"] for n, s in row["seconds"].items()}
    return max(1.0, medians[S] / min(medians.values()) / 1.05)


def mean_cost(rows, lone, joining):
    """The geometric mean of `cost` over rows of one direction, had native.cuda_segments had these constants."""
    chosen = [choice(r["blocks"], r["T"], r["multiprocessors"], lone, joining) for r in rows]
    return math.exp(sum(math.log(cost(r, S)) for r, S in zip(rows, chosen, strict=True)) / len(rows))


def best_constants(rows):
    """{'lone', 'joining': {direction: ...}, 'mean_cost', 'mean_cost_now'}: of a grid, the nearest to today's among equals."""
    of = {d: [r for r in rows if r["direction"] == d] for d in DIRECTIONS}
    now = math.prod(mean_cost(of[d], native.LONE, native.JOINING[d]) for d in DIRECTIONS) ** 0.5
    found = []
    for lone in LONES:
        joining = {}
        for d in DIRECTIONS:
            costs = {j: mean_cost(of[d], lone, j) for j in JOININGS}
            joining[d] = min(costs, key=lambda j, costs=costs, d=d: (round(costs[j], 3), abs(j - native.JOINING[d])))
        mean = math.prod(mean_cost(of[d], lone, joining[d]) for d in DIRECTIONS) ** 0.5
        found.append((round(mean, 3), abs(lone - native.LONE), {"lone": lone, "joining": joining, "mean_cost": mean}))
    return {**min(found, key=lambda f: f[:2])[2], "mean_cost_now": now}


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="B x T x D x N each, separated by commas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed passes of each number of segments (%(default)s)")
    parser.add_argument("--budget_s", type=float, default=math.inf, help="seconds in which the last shape is to end")
    parser.add_argument("--out", help="the record")
    parser.add_argument("--save", action="store_true", help=f"the record into {SAVED.relative_to(ROOT)}")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="on the CPU, at tiny sizes: no measurement")
    args = parser.parse_args(argv)
    try:
        args.shapes = [Shape(*map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    except (TypeError, ValueError):
        parser.error(f"--shapes={args.shapes}: give BxTxDxN, such as 16x4096x1536x16")
    if args.rounds < 1 or min(map(min, args.shapes)) < 1:
        parser.error("--rounds and every size of --shapes must be at least 1")
    return args


def main(argv=None):
    args = parse(argv)
    out = Path(args.out) if args.out else SAVED if args.save else None
    if args.dry_run and out is not None and SAVED.parent in out.resolve().parents:
        return refuse(f"--dry_run measures nothing, so its record does not belong in {SAVED.parent.name}/: choose another --out")
    if not args.dry_run and not torch.cuda.is_available():
        return refuse("PyTorch sees no GPU (--dry_run tries the code)")
    if not args.out:  # as bench/scan.py
        refuse_uncommitted(out)
    device = DryRun() if args.dry_run else Gpu()
    multiprocessors = 132 if args.dry_run else device.properties.multi_processor_count
    record = {"benchmark": "segments", "dry_run": args.dry_run, "finished": False,
              "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
              "environment": records.environment(), "sources": sources(), "device": device.describe(), "dtype": "bfloat16",
              "lone": native.LONE, "joining": native.JOINING, "rows": [], "left_out": []}

    def save():
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            records.write_json(out, finite(record))

    print(f"{record['device']['name']}, {multiprocessors} multiprocessors\n"
          f"{'shape':28} {'':8} {'blocks':>6} {'chosen':>7} {'ms':>9} {'best':>5} {'ms':>9} {'times':>6}", flush=True)
    longest, failed, lost = 0.0, False, None
    for shape in args.shapes:
        start = time.perf_counter()
        if lost or start - BEGAN + longest > args.budget_s:
            why = lost or f"budget of {args.budget_s:g} s: {start - BEGAN:.0f} spent, up to {longest:.0f} needed"
            record["left_out"].append({"shape": str(shape), "reason": why})
            print(f"{shape!s:28} left out: {why}", flush=True)
            continue
        shape = shape._replace(B=min(shape.B, 2), T=min(shape.T, 512), D=64) if args.dry_run else shape
        try:
            rows = time_shape(shape, device, multiprocessors, args.rounds)
        except Exception as error:
            record["left_out"].append({"shape": str(shape), "reason": in_one_line(error)})
            print(f"{shape!s:28} left out: {in_one_line(error)}", flush=True)
            failed, lost = True, None if device.alive() else f"the GPU was lost at {shape}"
            save()
            continue
        record["rows"] += rows
        record["best_constants"] = best_constants(record["rows"])  # so far: a run that is killed keeps them
        longest = max(longest, time.perf_counter() - start)
        for row in rows:
            ms = {S: s["median_seconds"] * 1e3 for S, s in row["seconds"].items()}
            best, mine = min(ms, key=ms.get), row["chosen"]
            print(f"{row['shape']:28} {row['direction']:8} {row['blocks']:6} {mine:7} {ms[mine]:9.3f} {best:5} {ms[best]:9.3f} "
                  f"{ms[mine] / ms[best]:6.2f}", flush=True)
        save()
        device.free()
    if not record["rows"]:
        save()
        return refuse("no shape could be timed")
    record["finished"] = lost is None
    save()
    found = record["best_constants"]
    joining = ", ".join(f"{d} {j:g}" for d, j in found["joining"].items())
    print(f"in short: what is chosen takes {found['mean_cost_now']:.3f} times what it may (the best and 5%) on the geometric "
          f"mean of {len(record['rows'])} rows; with LONE {found['lone']:g} and JOINING {joining}: {found['mean_cost']:.3f}")
    if out is not None:
        print(f"record: {out}")
    return int(failed)


def refuse(why):
    print(f"bench/segments.py: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    with main_error("bench/segments.py"):
        sys.exit(main())
