"""Instructions per token and channel of the CUDA scan, counted in the disassembly: no GPU is needed.

    python tools/instructions.py                                 # Longhorn, N = 16, bfloat16, sm_90
    python tools/instructions.py --update=mamba --architecture=sm_80 --N=64
    python tools/instructions.py --all --save                    # results/instructions.json

Watch this figure while changing the kernels. Counted is the length of each loop over the steps that it covers, as if
every branch in it were taken and every predicate true: an upper bound, by a few per cent. What stands before and behind
the loops is left out. Beside it: the arithmetic that Eq. 7 cannot do without (--help says which), registers and spills
from the compiler's report, and how many instructions go to pipes slower than arithmetic. These are instructions, not
cycles.

Needs nvcc or NVRTC, and nvdisasm (CUDA's, or `pip install nvidia-cuda-nvdisasm`).
"""

import argparse
import datetime
import glob
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import records  # noqa: E402
from bench.measure import refuse_uncommitted  # noqa: E402
from configurator import main_error  # noqa: E402
from kernels import build, cuda  # noqa: E402

# Instructions per token and channel that no arrangement of Eq. 7 avoids on one lane per channel with N states:
#   forward   4 N: eps k, x - k S, S +=, y +=, and 2 N / 4 loads of k and q; step size 7, gate 6, skip 1, bias 1, I/O 7
#   backward  3 N for the states; again with dq and y (5 N); back 8 N (G, eps G, its product with k, dx, deps, dk 2, G);
#             sums of dk and dq over 32 channels, 2 (N shuffles, N additions); 5 passes over k or q, N / 4 loads each;
#             60
FLOOR = {"forward": lambda N: 4 * N + N // 2 + 22, "backward": lambda N: 16 * N + 4 * N + 5 * N // 4 + 60}
PIPES = {"special": ("MUFU",),  # exponentials, reciprocals, logarithms
         "shuffles": ("SHFL",), "shared": ("LDS", "STS", "ATOMS"), "copies": ("LDGSTS",),
         "local": ("LDL", "STL"), "atomics": ("RED", "REDG", "ATOM", "ATOMG"), "barriers": ("BAR",)}
SAVED = Path(__file__).resolve().parent.parent / "results" / "instructions.json"


def nvdisasm():
    """The path of nvdisasm, or None: on the PATH, beside nvcc, or in the wheel of that name."""
    beside = str(Path(cuda.nvcc()).resolve().with_name("nvdisasm")) if cuda.nvcc() else None
    wheel = glob.glob(str(Path(torch.__file__).parent.parent / "nvidia/*/bin/nvdisasm"))
    return next((p for p in map(shutil.which, filter(None, ["nvdisasm", beside, *wheel])) if p), None)


class Code(NamedTuple):
    """A kernel: instructions up to EXIT, their number with what follows, (first, last) of its loops from the longest
    on, and of what a branch may skip."""

    instructions: list
    in_all: int
    loops: list
    skipped: list

    def weights(self, outside, *times):
        """How often each instruction runs: times[0] for the longest loop, and so on, `outside` for those in no loop."""
        if len(self.loops) < len(times):
            raise ValueError(f"{len(self.loops)} loops in the disassembly of a kernel that has {len(times)}: it "
                             "changed, or the compiler unrolled one")
        weights = [outside] * len(self.instructions)
        for (first, last), often in zip(self.loops, times, strict=False):  # an inner loop is shorter: it comes later
            weights[first:last + 1] = [often] * (last + 1 - first)
        return weights

    def totals(self, weights):
        """{instructions, pipes}, each instruction counted weights times."""
        codes = [opcode(i) for i in self.instructions]
        pipes = {name: round(sum(w for w, code in zip(weights, codes, strict=True) if code in of), 1)
                 for name, of in PIPES.items()}
        return {"instructions": round(sum(weights), 1), "pipes": pipes}


def opcode(instruction):
    """Such as LDS, of '@!P0 LDS.64 R2, [R3+0x10]'."""
    return re.match(r"(?:@\S+\s+)?(\w+)", instruction)[1]


def kernels(text):
    """Kernel -> Code, from the text of nvdisasm: a backward branch closes a loop, a conditional one ahead skips."""
    found = {}
    for part in re.split(r"\n\.text\.", text)[1:]:
        labels, code = {}, []
        for line in part.splitlines():
            label, instruction = re.match(r"\s*(\.L_x_\d+):", line), re.search(r"/\*[0-9a-f]+\*/\s+(.*?)\s*;", line)
            if label:
                labels[label[1]] = len(code)
            elif instruction:
                code.append(instruction[1])
        end = code.index("EXIT") + 1 if "EXIT" in code else len(code)  # then come shuffles for diverged warps
        branches = [(at, re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", code[at])) for at in range(end)]
        branches = [(at, labels[target[1]]) for at, target in branches if target]
        loops = sorted(((to, at) for at, to in branches if to < at), key=lambda loop: loop[0] - loop[1])
        skipped = [(at + 1, to - 1) for at, to in branches if at + 1 < to <= end and re.match(r"@|BRA\.U", code[at])]
        found[part.split(":")[0].strip()] = Code(code[:end], len(code), loops, skipped)
    return found


def disassembled(cubin):
    return kernels(subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout)


def compiler_report(text):
    """Kernel -> registers and bytes of spills, from the output of ptxas -v."""
    found = {}
    for part in text.split("Compiling entry function '")[1:]:
        found[part.split("'")[0]] = {"registers": int(re.search(r"Used (\d+) registers", part)[1]),
                                     "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", part)[1])}
    return found


def steps_of(name):
    """A constant of longhorn_scan.cu, such as TILE."""
    return int(re.search(rf"#define {name} (\d+)", build.SCAN.read_text())[1])


def count(update, dtype, N, architecture, folder):
    """{'forward' | 'backward': instructions per token and channel, registers, spills}, for a full GPU (L small).

    Of the kernels for whole chunks and blocks; "with_a_rest" counts those that check bounds.
    """
    P, L, C = build.cuda_shape(4096, 4096, 4096, N, 1)
    macros, cubin = cuda.defines(update, dtype, P, L, C), Path(folder) / "kernels.cubin"
    cuda.compile_cubin(build.SCAN, cubin, architecture, macros)
    chunk, keys, sub = (steps_of(name) for name in ("CHUNK", "KEYS", "SUB"))
    loops = {"forward": lambda code: [1 / n for n in forward_steps(code, P * L, dtype)],
             # chunks; in them the sub-chunks backwards, the states of all but the last forwards, batches of keys
             "backward": lambda code: (1 / chunk, 1 / sub, (1 - sub / chunk) / sub, 1 / keys)}
    result = {}
    codes = disassembled(cubin)
    for direction, often in loops.items():
        whole, asking = (codes[f"{direction}{kind}_kernel"] for kind in ("_whole", ""))
        weights = whole.weights(0, *(L / C * n for n in often(whole)))
        for at in once_a_chunk(whole):
            weights[at] *= sub / chunk
        found, rest = whole.totals(weights), asking.totals(asking.weights(0, *(L / C * n for n in often(asking))))
        result[direction] = {**found, "floor": FLOOR[direction](N), "with_a_rest": rest["instructions"],
                             "in_all": whole.in_all, "loops": [last - first + 1 for first, last in whole.loops]}
    if cuda.nvcc():
        command = [cuda.nvcc(), "-O3", "-std=c++17", f"-arch={architecture}", "-Xptxas", "-v", "-cubin", *macros]
        run = subprocess.run([*command, str(build.SCAN), "-o", str(cubin)], capture_output=True, text=True, check=True)
        for kernel, report in compiler_report(run.stderr).items():
            if kernel.removesuffix("_whole_kernel") in result:
                result[kernel.removesuffix("_whole_kernel")] |= {n: report[n] for n in ("registers", "spilled_bytes")}
    return {"update": update, "dtype": str(dtype).removeprefix("torch."), "N": N, "states_per_lane": P, "lanes": L,
            "channels": C, "architecture": architecture, **result}


def forward_steps(code, states, dtype):
    """Steps per iteration of the two loops of a forward kernel: see AsyncForwardShared."""
    tile, keys, longer, longer_row = (steps_of(name) for name in ("TILE", "KEYS", "LONGER", "LONGER_ROW"))
    if not any(opcode(i) == "LDGSTS" for i in code.instructions):
        return keys, tile
    return keys * (longer if states * dtype.itemsize <= longer_row else 1), tile * longer


def once_a_chunk(code):
    """The instructions of the loop over sub-chunks that one of them runs: those that fetch states, by many copies."""
    _, (first, last), *_ = code.loops
    inside = [(start, end) for start, end in code.skipped if first < start and end < last  # and no else follows
              and not code.instructions[end].startswith("BRA ")]
    return {at for start, end in inside if sum(opcode(i) == "LDGSTS" for i in code.instructions[start:end + 1]) > 2
            for at in range(start, end + 1)}


def lacking():
    """None if the kernels can be compiled and disassembled, else what is missing."""
    return cuda.missing() or (None if nvdisasm() else "no nvdisasm found: pip install nvidia-cuda-nvdisasm")


# ----------------------------------------------------------------------------------------------------------------- main

def show(row):
    for direction in ("forward", "backward"):
        r = row[direction]
        report = "no nvcc: no report"
        if "registers" in r:
            report = f"{r['registers']} registers, {r['spilled_bytes']} bytes spilled"
        floor = f" (floor {r['floor']}, {r['instructions'] / r['floor']:.2f} x)" if row["update"] == "longhorn" else ""
        print(f"{row['update']:9} N={row['N']:<4} {row['dtype']:9} {row['architecture']:7} {direction:9} "
              f"{r['instructions']:7.1f} instructions per token and channel{floor}; {report}")
        print(" " * 36 + "of them " + ", ".join(f"{name} {n}" for name, n in r["pipes"].items() if n))


def main():
    parser = argparse.ArgumentParser(description=__doc__ + f"\nFloor: forward {FLOOR['forward'](16)} and backward "
                                     f"{FLOOR['backward'](16)} at N = 16; see FLOOR in the source for the terms.",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", default="longhorn", choices=build.UPDATES)
    parser.add_argument("--architecture", default="sm_90", help="of the GPU, sm_80 or later (%(default)s)")
    parser.add_argument("--N", type=int, default=16, help="state size (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--all", action="store_true", help="all updates, sm_80, sm_90, sm_100, N = 16 and 64, bfloat16")
    parser.add_argument("--save", action="store_true", help=f"write results/{SAVED.name}")
    args = parser.parse_args()
    missing = lacking()
    if missing:
        sys.exit(f"tools/instructions.py: {missing}")
    refuse_uncommitted(SAVED if args.save else None, "no --save")
    cases = [(args.update, args.N, args.architecture)]
    if args.all:
        cases = [(u, N, a) for a in ("sm_90", "sm_80", "sm_100") for u in build.UPDATES for N in (16, 64)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for update, N, architecture in cases:
                rows.append(count(update, getattr(torch, args.dtype), N, architecture, folder))
                show(rows[-1])
        except (OSError, ValueError) as error:
            sys.exit(f"tools/instructions.py: {' '.join(str(error).split())}")
    if args.save:
        version = cuda.compiler_version().strip().splitlines()[-1]
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        records.write_json(SAVED, {"benchmark": "instructions", "date": date, "compiler": version,
                                   "environment": records.environment(), "rows": rows})
        print(f"record: {SAVED}")


if __name__ == "__main__":
    with main_error("tools/instructions.py"):
        main()
