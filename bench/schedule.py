"""How long the CUDA kernels would keep a multiprocessor busy, by a model of one: no GPU is needed, and nothing is measured.

    python bench/schedule.py                                  # Longhorn, N = 16, bfloat16, sm_90
    python bench/schedule.py --update=mamba --N=64
    python bench/schedule.py --mamba_ssm=FOLDER --save        # mamba-ssm's kernels beside them: its sdist, unpacked

bench/instructions.py counts instructions; this asks what they wait for. Each instruction on NVIDIA's GPUs since Volta carries
the compiler's schedule: how many cycles the warp pauses after it, and which of six scoreboards it sets or waits for. The
disassembly's loops are walked by as many warps as fit, four schedulers issue one instruction a cycle where its pipe is free,
scoreboards clear after LATENCY, and the shared-memory pipe serves all four. What comes out is cycles for one step of all
blocks of a multiprocessor, and that number over what one block would need if it only had to issue ("share").

The surprise it was written for: a scoreboard is a counter, so that waiting for a shuffle is waiting for every load from memory
that counts on the same one. Rows that were read ahead into registers made each tile wait for memory; asynchronous copies have
a counter of their own.

The latencies are those of published microbenchmarks of Hopper, rounded. Left out: the caches' limits, bank conflicts (tests/
test_ptx.py counts them), what other blocks do to memory, clocks. Ratios between versions are what to look at; a GPU decides.
"""

import argparse
import datetime
import heapq
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import native  # noqa: E402
import native_cuda  # noqa: E402
import records  # noqa: E402
from bench import instructions  # noqa: E402
from bench.measure import refuse_uncommitted  # noqa: E402
from configurator import main_error  # noqa: E402

SAVED = Path(__file__).resolve().parent.parent / "results" / "schedule.json"
SCHEDULERS, MULTIPROCESSORS = 4, 132  # of an H100 or H200
# Pipe: cycles for which a scheduler's is taken by an instruction of a warp (16 lanes wide: 2), and cycles until a scoreboard
# that it set is clear. float32 arithmetic has two pipes of 16 lanes, one of which also multiplies integers.
FLOAT, HEAVY, ALU, SPECIAL, MEMORY, CONTROL = "float", "heavy", "alu", "special", "memory", "control"
TAKEN = {FLOAT: 2, HEAVY: 2, ALU: 2, SPECIAL: 8, MEMORY: 2, CONTROL: 1}
PIPE = {**dict.fromkeys(("FFMA", "FADD", "FMUL"), FLOAT), "IMAD": HEAVY, "HFMA2": HEAVY, "MUFU": SPECIAL,
        **dict.fromkeys(("LDS", "STS", "SHFL", "LDG", "STG", "LDGSTS", "LDGDEPBAR", "LDC", "S2R", "S2UR", "R2UR", "LDL", "STL",
                         "ATOMS", "RED", "REDG", "I2F", "F2I", "F2F"), MEMORY),
        **dict.fromkeys(("BAR", "BRA", "EXIT", "NOP", "WARPSYNC", "BSSY", "BSYNC", "DEPBAR"), CONTROL)}
GLOBAL = 600  # cycles to memory and back
LATENCY = {"MUFU": 22, "LDS": 30, "STS": 20, "SHFL": 25, "LDG": GLOBAL, "LDGDEPBAR": GLOBAL, "LDGSTS": 20, "STG": 20}
OPERANDS = 12  # cycles until an instruction of the memory pipe has read its registers
WAVES = {"LDS": 1, "STS": 1, "SHFL": 1, "LDG": 1, "STG": 1, "LDGSTS": 2, "ATOMS": 2}  # of the pipe that the schedulers share
QUEUE = 32  # cycles of work that this pipe takes in advance
BARRIER = 10  # cycles from the last warp's arrival on


class Instruction(NamedTuple):
    """What the model knows of one: pipe, latency, waves of shared memory; the schedule; (scoreboard, most left) of DEPBAR."""

    pipe: str
    latency: int
    waves: int
    pause: int
    sets: tuple  # scoreboards: (until the result is there, until the operands are read), None where none
    waits: tuple
    left: tuple | None
    barrier: bool


def instruction(text, word):
    """An instruction from its text and the upper half of its 128 bits, whose bits 41 to 57 are the schedule."""
    code = instructions.opcode(text)
    waves = WAVES.get(code, 0) * (2 if ".128" in text and code in ("LDS", "STS") else 1)  # 4 where lanes read different rows
    written, read, mask = word >> 46 & 7, word >> 49 & 7, word >> 52 & 63
    left = re.search(r"DEPBAR\.LE SB(\d), 0x(\w+)", text)
    return Instruction(PIPE.get(code, ALU), LATENCY.get(code, 30), waves, max(1, word >> 41 & 15),
                       tuple(n if n < 6 else None for n in (written, read)), tuple(n for n in range(6) if mask >> n & 1),
                       (int(left[1]), int(left[2], 16)) if left else None, code == "BAR")


def disassembled(cubin):
    """Kernel -> (Code of bench/instructions.py, its Instructions)."""
    text = subprocess.run([instructions.nvdisasm(), "-hex", "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    words = {part.split(":")[0].strip(): [int(w, 16) for w in re.findall(r"^\s+/\* 0x([0-9a-f]{16}) \*/$", part, re.M)]
             for part in re.split(r"\n\.text\.", text)[1:]}
    return {name: (code, [instruction(i, w) for i, w in zip(code.instructions, words[name], strict=False)])
            for name, code in instructions.kernels(text).items()}


def walk(code, times, left_out=()):
    """The longest loop's instructions in the order of execution, by their places: `times` each loop, from the longest."""
    often = dict(zip(code.loops, times, strict=False))

    def body(first, last, loops):
        order, at = [], first
        while at <= last:
            inner = next((loop for loop in loops if loop[0] == at), None)
            if inner:
                order += body(*inner, [loop for loop in loops if loop != inner]) * often.get(inner, 1)
                at, loops = inner[1] + 1, [loop for loop in loops if loop[0] > inner[1]]
            else:
                order += [at] if at not in left_out else []
                at += 1
        return order

    outer = code.loops[0]
    return body(*outer, code.loops[1:]) * often[outer]


def cycles(trace, blocks, warps):
    """Cycles in which `blocks` blocks of `warps` warps each, on one multiprocessor, execute these Instructions."""
    n = blocks * warps
    at, ready, counts = [0] * n, [0] * n, [[0] * 6 for _ in range(n)]
    taken = [dict.fromkeys(TAKEN, 0) for _ in range(SCHEDULERS)]
    of_scheduler = [[w for w in range(n) if w % SCHEDULERS == s] for s in range(SCHEDULERS)]
    waiting, clears, shared_free, now, left = [set() for _ in range(blocks)], [], 0, 0, n
    while left:
        while clears and clears[0][0] <= now:
            _, warp, board = heapq.heappop(clears)
            counts[warp][board] -= 1
        for s, mine in enumerate(of_scheduler):
            for place, warp in enumerate(mine):  # the one that issued last, then the others in turn
                block = warp // warps
                if ready[warp] > now or at[warp] == len(trace) or warp in waiting[block]:
                    continue
                one, count, pipe = trace[at[warp]], counts[warp], one_pipe(taken[s], trace[at[warp]].pipe)
                if (taken[s][pipe] > now or any(count[b] for b in one.waits) or one.left and count[one.left[0]] > one.left[1]
                        or one.waves and shared_free > now + QUEUE):
                    continue
                taken[s][pipe], delay = now + TAKEN[pipe], 0
                if one.waves:
                    delay, shared_free = max(0, shared_free - now), max(shared_free, now) + one.waves
                for board, after in zip(one.sets, (one.latency + one.waves, OPERANDS), strict=True):
                    if board is not None:
                        count[board] += 1
                        heapq.heappush(clears, (now + delay + after, warp, board))
                ready[warp], at[warp] = now + one.pause, at[warp] + 1
                left -= at[warp] == len(trace)
                if one.barrier:
                    waiting[block].add(warp)
                    if len(waiting[block]) == warps:
                        for other in waiting[block]:
                            ready[other] = max(ready[other], now + BARRIER)
                        waiting[block].clear()
                mine.insert(0, mine.pop(place))
                break
        now += 1
    return now


def one_pipe(taken, pipe):
    return HEAVY if pipe == FLOAT and taken[HEAVY] < taken[FLOAT] else pipe


def tabulate(trace, steps, warps, most):
    """Cycles a step of 1 .. most blocks; a block's instructions a step on each scheduler, which is what it must take."""
    return {"warps": warps, "instructions": round(len(trace) * warps / SCHEDULERS / steps, 1),
            "cycles": [round(cycles(trace, blocks, warps) / steps, 1) for blocks in range(1, most + 1)]}


def ours(update, dtype, N, architecture, folder):
    """A row for each kernel that whole chunks run: forward, backward, and those that join segments."""
    P, L, C = native.cuda_shape(4096, 4096, 4096, N, 1)
    cubin = Path(folder) / "kernels.cubin"
    native_cuda.compile_cubin(native.SCAN, cubin, architecture, native_cuda.defines(update, dtype, P, L, C))
    chunk, keys, sub = (instructions.steps_of(name) for name in ("CHUNK", "KEYS", "SUB"))
    codes, rows = disassembled(cubin), []
    for direction in ("forward", "ends", "pulls", "backward"):
        if update == "exact" and direction in ("ends", "pulls"):
            continue  # its T is not split
        code, all_of_it = codes[f"{direction}_whole_kernel"]
        if direction == "backward":
            often, steps, left_out = (1, chunk // sub, chunk // sub - 1, chunk // keys), chunk, instructions.once_a_chunk(code)
        else:
            batch, turn = instructions.forward_steps(code, P * L, dtype)
            often, steps, left_out = (6, batch // turn), 6 * batch, ()
        trace = [all_of_it[i] for i in walk(code, often, left_out)]
        most = 4 if direction != "backward" else 3 if (update, N) == ("longhorn", 16) else 2
        rows.append({"update": update, "dtype": str(dtype).removeprefix("torch."), "N": N, "architecture": architecture,
                     "kernel": direction, **tabulate(trace, steps, native.CUDA_THREADS // 32, most)})
    return rows


def mamba_ssm(source, dtype, N, architecture, folder):
    """Rows like these for mamba-ssm's kernels at T = 1024 and 4096, with as many blocks as their registers leave room for."""
    reports, rows = instructions.mamba_ssm(source, dtype, N, architecture, folder), []
    codes = disassembled(Path(folder) / "mamba_ssm.cubin")  # that this wrote
    for report in reports:
        for direction, short in (("forward", "fwd"), ("backward", "bwd")) if report["T"] in (1024, 4096) else ():
            name = f"selective_scan_{short}_kernelI"
            code, all_of_it = next(found for n, found in codes.items() if name in n and f"traitsILi{report['threads']}E" in n)
            trace = [all_of_it[i] for i in walk(code, (1, N))]
            most = 65536 // (-(-report[direction]["registers"] // 8) * 8 * report["threads"])
            rows.append({"update": "mamba-ssm", "version": report["version"], "dtype": report["dtype"], "N": N, "T": report["T"],
                         "architecture": architecture, "kernel": direction,
                         **tabulate(trace, instructions.SSM_ITEMS, report["threads"] // 32, most)})
    return rows


def ratios(ours, theirs, B, D):
    """How many times ours theirs take, both passes: of full multiprocessors, and at B rows of D channels and their T, where
    ours leave the busiest of MULTIPROCESSORS with more blocks than the others and theirs, a block a channel, do not."""
    mine = {row["kernel"]: row for row in ours}
    of_a_warp = lambda row: row["cycles"][-1] / len(row["cycles"]) / row["warps"]
    full, blocks, busiest = sum(map(of_a_warp, theirs)), B * -(-D // native.CUDA_THREADS), 0
    at = lambda kernel, n: mine[kernel]["cycles"][-(-n // MULTIPROCESSORS) - 1]
    for direction, joins in (("forward", "ends"), ("backward", "pulls")):
        S = native.cuda_segments(blocks, theirs[0]["T"], MULTIPROCESSORS, native.JOINING[direction])
        busiest += (at(direction, S * blocks) + (at(joins, (S - 1) * blocks) if S > 1 else 0)) / S
    return {"T": theirs[0]["T"], "full": round(full / sum(of_a_warp(mine[d]) for d in ("forward", "backward")), 2),
            "rows": B, "channels": D, "at_these": round(full * B * D / 32 / MULTIPROCESSORS / busiest, 2)}


def show(row):
    each = [f"{n + 1}: {c:g} ({(n + 1) * row['instructions'] / c:.0%})" for n, c in enumerate(row["cycles"])]
    length = f" T={row['T']}" if "T" in row else ""
    print(f"{row['update']:9} N={row['N']:<3} {row['kernel']:8}{length} {row['instructions']:7.1f} instructions a step and "
          f"scheduler; cycles a step with so many blocks (share): {', '.join(each)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", default="longhorn", choices=native.UPDATES)
    parser.add_argument("--architecture", default="sm_90", help="of the GPU: the latencies are a Hopper's (%(default)s)")
    parser.add_argument("--N", type=int, default=16, help="state size (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--save", action="store_true", help=f"write results/{SAVED.name}")
    parser.add_argument("--mamba_ssm", metavar="FOLDER", help="an unpacked source distribution of mamba-ssm, to be walked too")
    args = parser.parse_args()
    missing = instructions.lacking(args.mamba_ssm)
    if missing:
        sys.exit(f"bench/schedule.py: {missing}")
    refuse_uncommitted(SAVED if args.save else None, "no --save")
    dtype, rows = getattr(torch, args.dtype), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows += ours(args.update, dtype, args.N, args.architecture, folder)
            if args.mamba_ssm:
                rows += mamba_ssm(args.mamba_ssm, dtype, args.N, args.architecture, folder)
        except (OSError, ValueError) as error:
            sys.exit(f"bench/schedule.py: {' '.join(str(error).split())}")
    for row in rows:
        show(row)
    mine, theirs = ([r for r in rows if (r["update"] == "mamba-ssm") == other] for other in (False, True))
    comparable = theirs and (args.update, args.N) == ("longhorn", 16)  # 128 channels a block
    few = [ratios(mine, pair, 16, 1536) for pair in (theirs[:2], theirs[2:])] if comparable else []
    for r in few:
        print(f"mamba-ssm : longhorn, both passes, T={r['T']}: {r['full']} times the cycles of full multiprocessors, "
              f"{r['at_these']} at {r['rows']} rows of {r['channels']} channels")
    if args.save:
        version = native_cuda.compiler_version().strip().splitlines()[-1]
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        records.write_json(SAVED, {"benchmark": "schedule", "measured": False, "date": date, "compiler": version,
                                   "environment": records.environment(), "rows": rows, "mamba_ssm_to_longhorn": few})
        print(f"record: {SAVED}")


if __name__ == "__main__":
    with main_error("bench/schedule.py"):
        main()
