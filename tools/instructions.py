"""How many instructions the CUDA kernels take a (token, channel), from the disassembly: no GPU is needed to count them.

    python tools/instructions.py                                 # Longhorn, N = 16, bfloat16, sm_90
    python tools/instructions.py --update=mamba --architecture=sm_80 --N=64
    python tools/instructions.py --all --save                    # results/instructions.json
    python tools/instructions.py --mamba_ssm=FOLDER              # mamba-ssm's kernels beside them: its sdist, unpacked

These kernels are bound by the number of instructions, so this is the figure to watch while changing them. Counted is the
length of each loop over the steps that it covers, as if every branch in it were entered and every predicate true: an upper
bound, by a few per cent. What stands before and behind the loops is left out, done once a lane and T. Beside it the
arithmetic that Eq. 7 cannot do without (--help says which), registers and spills from the compiler's report, and how many
of the instructions go to pipes slower than arithmetic: instructions, not cycles.

mamba-ssm's kernels are compiled from its own source with the flags of its setup.py and counted likewise, the instances that
selective_scan_fn runs at T = 1024, 2048 and 4096 (variable B and C, skip, gate, bias, softplus). A block takes one channel
through chunks of 16 tokens a thread; in each, a loop over the states. What stands outside the loops is counted there, done
once in one or two chunks. What only one warp of a block enters, such as the middle of a scan, is counted for that one; for
all of them it would be 2 to 13% more ("all_entered" of the record). Their backward also adds 2 N numbers a (token, channel)
to global memory atomically: whether it waits for that rather than for instructions, only a GPU can tell.

Needs nvcc or NVRTC, and nvdisasm (CUDA's, or `pip install nvidia-cuda-nvdisasm`); for mamba-ssm nvcc.
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
from kernels import (
    build,  # noqa: E402
    cuda,  # noqa: E402
)

# Instructions a (token, channel) that no arrangement of Eq. 7 avoids on one lane a channel, N states:
#   forward   4 N: eps k, x - k S, S +=, y +=, and 2 N / 4 loads of k and q; step size 7, gate 6, skip 1, bias 1, in and out 7
#   backward  3 N for the states; again with dq and y (5 N); back 8 N (G, eps G, its product with k, dx, deps, dk 2, G);
#             sums of dk and dq over 32 channels, 2 (N shuffles, N additions); 5 passes over k or q, N / 4 loads each; 60 else
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
    """A kernel: instructions up to EXIT, how many in all, (first, last) of loops from the longest and of what may be skipped."""

    instructions: list
    in_all: int
    loops: list
    skipped: list

    def weights(self, outside, *times):
        """How often each instruction runs: times[0] for the longest loop, and so on, `outside` for those in no loop."""
        if len(self.loops) < len(times):
            raise ValueError(f"{len(self.loops)} loops in the disassembly of a kernel that has {len(times)}: it changed, or the "
                             "compiler unrolled one")
        weights = [outside] * len(self.instructions)
        for (first, last), often in zip(self.loops, times, strict=False):  # an inner loop is shorter, and so comes later
            weights[first:last + 1] = [often] * (last + 1 - first)
        return weights

    def totals(self, weights):
        """{instructions, pipes}, each instruction counted weights times."""
        codes = [opcode(i) for i in self.instructions]
        pipe = {name: sum(w for w, code in zip(weights, codes, strict=True) if code in of) for name, of in PIPES.items()}
        return {"instructions": round(sum(weights), 1), "pipes": {name: round(n, 1) for name, n in pipe.items()}}


def opcode(instruction):
    """Such as LDS, of '@!P0 LDS.64 R2, [R3+0x10]'."""
    return re.match(r"(?:@\S+\s+)?(\w+)", instruction)[1]


def kernels(text):
    """Kernel -> Code, from nvdisasm's text: a branch backwards closes a loop, a conditional one forwards skips something."""
    found = {}
    for part in re.split(r"\n\.text\.", text)[1:]:
        labels, code = {}, []
        for line in part.splitlines():
            label, instruction = re.match(r"\s*(\.L_x_\d+):", line), re.search(r"/\*[0-9a-f]+\*/\s+(.*?)\s*;", line)
            if label:
                labels[label[1]] = len(code)
            elif instruction:
                code.append(instruction[1])
        end = code.index("EXIT") + 1 if "EXIT" in code else len(code)  # behind it shuffles for warps that drifted apart
        branches = [(at, re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", code[at])) for at in range(end)]
        branches = [(at, labels[target[1]]) for at, target in branches if target]
        loops = sorted(((to, at) for at, to in branches if to < at), key=lambda loop: loop[0] - loop[1])
        skipped = [(at + 1, to - 1) for at, to in branches if at + 1 < to <= end and re.match(r"@|BRA\.U", code[at])]
        found[part.split(":")[0].strip()] = Code(code[:end], len(code), loops, skipped)
    return found


def disassembled(cubin):
    return kernels(subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout)


def compiler_report(text):
    """Kernel -> registers and bytes of spills and of static shared memory, from what ptxas -v wrote."""
    found = {}
    for part in text.split("Compiling entry function '")[1:]:
        shared = re.search(r"(\d+) bytes smem", part)
        found[part.split("'")[0]] = {"registers": int(re.search(r"Used (\d+) registers", part)[1]),
                                     "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", part)[1]),
                                     "shared_bytes": int(shared[1]) if shared else 0}
    return found


def steps_of(name):
    """A constant of longhorn_scan.cu, such as TILE."""
    return int(re.search(rf"#define {name} (\d+)", build.SCAN.read_text())[1])


def count(update, dtype, N, architecture, folder):
    """{'forward' | 'backward': instructions a (token, channel), registers, spills}, for a full GPU (L small).

    Of the kernels that run where T, D and the gate leave nothing to ask; "with_a_rest" is the count of those that ask.
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
        result[direction] = {**found, "floor": FLOOR[direction](N), "with_a_rest": rest["instructions"], "in_all": whole.in_all,
                             "loops": [last - first + 1 for first, last in whole.loops]}
    if cuda.nvcc():
        command = [cuda.nvcc(), "-O3", "-std=c++17", f"-arch={architecture}", "-Xptxas", "-v", "-cubin", *macros]
        run = subprocess.run([*command, str(build.SCAN), "-o", str(cubin)], capture_output=True, text=True, check=True)
        for kernel, report in compiler_report(run.stderr).items():
            if kernel.removesuffix("_whole_kernel") in result:
                result[kernel.removesuffix("_whole_kernel")] |= {n: report[n] for n in ("registers", "spilled_bytes")}
    return {"update": update, "dtype": str(dtype).removeprefix("torch."), "N": N, "states_a_lane": P, "lanes": L, "channels": C,
            "architecture": architecture, **result}


def forward_steps(code, states, dtype):
    """Steps that a turn of the two loops of a forward's kernel takes, or of what joins segments: AsyncForwardShared has them."""
    tile, keys, longer, longer_row = (steps_of(name) for name in ("TILE", "KEYS", "LONGER", "LONGER_ROW"))
    fetches = any(opcode(i) == "LDGSTS" for i in code.instructions)
    return keys * (longer if fetches and states * dtype.itemsize <= longer_row else 1), tile * (longer if fetches else 1)


def once_a_chunk(code):
    """The instructions of the loop over sub-chunks that one of them enters: it fetches states, by more copies than rows take."""
    _, (first, last), *_ = code.loops
    inside = [(start, end) for start, end in code.skipped if first < start and end < last  # and no else follows
              and not code.instructions[end].startswith("BRA ")]
    return {at for start, end in inside if sum(opcode(i) == "LDGSTS" for i in code.instructions[start:end + 1]) > 2
            for at in range(start, end + 1)}


# ----------------------------------------------------------------------------------------------------------- mamba-ssm

# The flags of its setup.py, but for the list of architectures.
SSM_FLAGS = ("-O3 -std=c++17 -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_BFLOAT16_OPERATORS__ "
             "-U__CUDA_NO_BFLOAT16_CONVERSIONS__ -U__CUDA_NO_BFLOAT162_OPERATORS__ -U__CUDA_NO_BFLOAT162_CONVERSIONS__ "
             "--expt-relaxed-constexpr --expt-extended-lambda --use_fast_math --ptxas-options=-v -lineinfo").split()
SSM_FOLDER = "csrc/selective_scan"
SSM_TYPES = {torch.bfloat16: "at::BFloat16", torch.float16: "at::Half", torch.float32: "float"}
SSM_T, SSM_ITEMS = (1024, 2048, 4096), 16  # tokens a thread and chunk
# Template arguments: threads, tokens a thread, (forward: rows,) whole chunks, variable B, variable C, (backward: softplus,) gate.
# fwd_ and bwd_ are here for the report alone: their static shared memory is what the launch asks for, as its code adds it up.
SSM_SOURCE = """
#include "selective_scan_fwd_kernel.cuh"
#include "selective_scan_bwd_kernel.cuh"
#define INSTANCES(THREADS)                                                                                              \\
    typedef Selective_Scan_fwd_kernel_traits<THREADS, 16, 1, true, true, true, true, TYPE, float> Forward##THREADS;       \\
    typedef Selective_Scan_bwd_kernel_traits<THREADS, 16, true, true, true, true, true, TYPE, float> Backward##THREADS;   \\
    template __global__ void selective_scan_fwd_kernel<Forward##THREADS>(SSMParamsBase);                                 \\
    template __global__ void selective_scan_bwd_kernel<Backward##THREADS>(SSMParamsBwd);                                 \\
    ROOM(fwd_##THREADS, Forward##THREADS::kSmemSize + MAX_DSTATE * 8)                                                    \\
    ROOM(bwd_##THREADS, Backward##THREADS::kSmemSize + MAX_DSTATE * 8 + (THREADS + 4 * MAX_DSTATE) * 4)
#define ROOM(name, bytes) extern "C" __global__ void name() { __shared__ volatile char room[bytes]; room[threadIdx.x] = 0; }
INSTANCES(64)
INSTANCES(128)
"""


def ssm_missing(source):
    """None if the kernels of an unpacked sdist can be compiled, else what is missing, in one line."""
    if not (Path(source) / SSM_FOLDER / "selective_scan_bwd_kernel.cuh").exists():
        return f"--mamba_ssm={source} has no {SSM_FOLDER}: unpack mamba-ssm's .tar.gz from PyPI and name its folder"
    return None if cuda.nvcc() else "--mamba_ssm needs nvcc, and none was found: install the CUDA toolkit, or set NVCC"


def ssm_threads(T):
    """Threads of a block, as selective_scan_fwd_cuda and selective_scan_bwd_cuda choose them for T > 512."""
    return 64 if T <= 1024 else 128


def ssm_count(code, N, threads, T):
    """{instructions, pipes} a (token, channel) of one of its kernels, and instructions if all warps entered everything.

    The longest loop is that over chunks, the next that over states in it. What a branch passes over and has neither an
    exponential nor an atomic in it is for one warp: the middle of a scan, a sum's end, the last state; or for none that
    matters: where log1pf overflows, and the gated output again, which its autograd does not ask for.
    """
    weights = code.weights(1 / SSM_ITEMS / max(1, T // (threads * SSM_ITEMS)), 1 / SSM_ITEMS, N / SSM_ITEMS)
    entered = list(weights)
    for first, last in code.skipped:
        if not {opcode(i) for i in code.instructions[first:last + 1]} & {*PIPES["special"], *PIPES["atomics"]}:
            entered[first:last + 1] = [w * 32 / threads for w in weights[first:last + 1]]
    return {**code.totals(entered), "all_entered": code.totals(weights)["instructions"]}


def mamba_ssm(source, dtype, N, architecture, folder):
    """Rows like count's, one a length in SSM_T, for the kernels in an unpacked source distribution of mamba-ssm."""
    kernel_folder, version = Path(source) / SSM_FOLDER, Path(source) / "mamba_ssm" / "__init__.py"
    headers, stub = Path(torch.__file__).parent / "include", Path(folder) / "stub" / "c10" / "cuda" / "impl"
    stub.mkdir(parents=True, exist_ok=True)
    (stub / "cuda_cmake_macros.h").write_text("")  # the one header that a CPU build of PyTorch lacks; found last
    program, cubin = Path(folder) / "mamba_ssm.cu", Path(folder) / "mamba_ssm.cubin"
    program.write_text(SSM_SOURCE)
    include = [kernel_folder, headers, headers / "torch" / "csrc" / "api" / "include", Path(folder) / "stub"]
    command = [cuda.nvcc(), *SSM_FLAGS, f"-arch={architecture}", "-cubin", f"-DTYPE={SSM_TYPES[dtype]}",
               *(f"-I{i}" for i in include), str(program), "-o", str(cubin)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
        raise OSError(f"nvcc could not build --mamba_ssm={source}: {errors[0] if errors else 'it said nothing'}")
    reports, codes = compiler_report(run.stderr), disassembled(cubin)
    found = re.search(r'__version__\s*=\s*"(.*)"', version.read_text() if version.exists() else "")
    rows = []
    for T in SSM_T:
        row = {"update": "mamba-ssm", "version": found[1] if found else None, "dtype": str(dtype).removeprefix("torch."), "N": N,
               "T": T, "threads": ssm_threads(T), "architecture": architecture}
        for direction, short in (("forward", "fwd"), ("backward", "bwd")):
            name = next(n for n in codes if f"selective_scan_{short}_kernelI" in n and f"traitsILi{row['threads']}E" in n)
            row[direction] = {**ssm_count(codes[name], N, row["threads"], T), "in_all": codes[name].in_all,
                              "loops": [last - first + 1 for first, last in codes[name].loops],
                              **reports[name], "shared_bytes": reports[f"{short}_{row['threads']}"]["shared_bytes"]}
        rows.append(row)
    return rows


def ratios(ours, theirs):
    """Instructions of ours for each of theirs."""
    n = [[row[direction]["instructions"] for direction in ("forward", "backward")] for row in (ours, theirs)]
    n = [[forward, backward, forward + backward] for forward, backward in n]
    return {name: round(a / b, 3) for name, a, b in zip(("forward", "backward", "both"), *n, strict=True)}


def lacking(source=None):
    """None if the kernels can be compiled and disassembled, mamba-ssm's in folder `source` too, else what is missing."""
    missing = cuda.missing() or (None if nvdisasm() else "no nvdisasm found: pip install nvidia-cuda-nvdisasm")
    return missing or (ssm_missing(source) if source is not None else None)


# ------------------------------------------------------------------------------------------------------------------ main

def show(row):
    length = f" at T={row['T']}" if "T" in row else ""
    for direction in ("forward", "backward"):
        r = row[direction]
        report = f"{r['registers']} registers, {r['spilled_bytes']} bytes spilled" if "registers" in r else "no nvcc: no report"
        floor = f" (floor {r['floor']}, {r['instructions'] / r['floor']:.2f} x)" if row["update"] == "longhorn" else ""
        print(f"{row['update']:9} N={row['N']:<4} {row['dtype']:9} {row['architecture']:7} {direction:9} "
              f"{r['instructions']:7.1f} instructions a (token, channel){length}{floor}; {report}")
        print(" " * 36 + "of them " + ", ".join(f"{name} {n}" for name, n in r["pipes"].items() if n))


def main():
    parser = argparse.ArgumentParser(description=__doc__ + f"\nFloor: forward {FLOOR['forward'](16)} and backward "
                                     f"{FLOOR['backward'](16)} at N = 16; see FLOOR in the source for the terms.",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", default="longhorn", choices=build.UPDATES)
    parser.add_argument("--architecture", default="sm_90", help="of the GPU, sm_80 or later (%(default)s)")
    parser.add_argument("--N", type=int, default=16, help="state size (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--all", action="store_true", help="all updates, sm_80, sm_90 and sm_100, N = 16 and 64, bfloat16")
    parser.add_argument("--save", action="store_true", help=f"write results/{SAVED.name}")
    parser.add_argument("--mamba_ssm", metavar="FOLDER", help="an unpacked source distribution of mamba-ssm, to be counted too")
    args = parser.parse_args()
    missing = lacking(args.mamba_ssm)
    if missing:
        sys.exit(f"tools/instructions.py: {missing}")
    refuse_uncommitted(SAVED if args.save else None, "no --save")
    cases = [(args.update, args.N, args.architecture)]
    if args.all:
        cases = [(u, N, a) for a in ("sm_90", "sm_80", "sm_100") for u in build.UPDATES for N in (16, 64)]
    rows, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for update, N, architecture in cases:
                rows.append(count(update, getattr(torch, args.dtype), N, architecture, folder))
                show(rows[-1])
            for N, architecture in dict.fromkeys(case[1:] for case in cases) if args.mamba_ssm else ():
                for row in mamba_ssm(args.mamba_ssm, getattr(torch, args.dtype), N, architecture, folder):
                    show(row)
                    like = [r for r in rows if (r["N"], r["architecture"]) == (N, architecture)]
                    theirs.append({**row, "ours_to_theirs": {r["update"]: ratios(r, row) for r in like}})
                    for update, ratio in theirs[-1]["ours_to_theirs"].items():
                        print(f"instructions of {update} : mamba-ssm: " + ", ".join(f"{n} {r:.2f}" for n, r in ratio.items()))
        except (OSError, ValueError) as error:
            sys.exit(f"tools/instructions.py: {' '.join(str(error).split())}")
    if args.save:
        version = cuda.compiler_version().strip().splitlines()[-1]
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        records.write_json(SAVED, {"benchmark": "instructions", "date": date, "compiler": version,
                                   "environment": records.environment(), "rows": rows, "mamba_ssm": theirs})
        print(f"record: {SAVED}")


if __name__ == "__main__":
    with main_error("tools/instructions.py"):
        main()
