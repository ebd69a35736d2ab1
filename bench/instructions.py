"""How many instructions the CUDA kernels take a (token, channel), from the disassembly: no GPU is needed to count them.

    python bench/instructions.py                                 # Longhorn, N = 16, bfloat16, sm_90
    python bench/instructions.py --update=mamba --architecture=sm_80 --N=64
    python bench/instructions.py --all --save                    # results/instructions.json

These kernels are bound by the number of instructions, so this is the figure to watch while changing them. Counted is the
length of each loop over the steps that it covers, as if every branch in it were taken and every predicate true: an upper
bound, by a few per cent. Beside it the arithmetic that Eq. 7 cannot do without (--help says which), and registers, spills
and shared memory from the compiler's report. Needs nvcc or NVRTC, and nvdisasm (CUDA's, or `pip install nvidia-cuda-nvdisasm`).
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import native  # noqa: E402
import native_cuda  # noqa: E402
import records  # noqa: E402

# Instructions a (token, channel) that no arrangement of Eq. 7 avoids on one lane a channel, N states:
#   forward   4 N: eps k, x - k S, S +=, y +=, and 2 N / 4 loads of k and q; step size 7, gate 6, skip 1, bias 1, in and out 7
#   backward  the forward's 4 N again for the states; S again with dq and y (5 N); back 9 N (G, dx 2, deps 3, dk 2, G);
#             sums of dk and dq over 32 channels, 2 (N shuffles, N additions); 5 passes over k or q, N / 4 loads each; 60 else
FLOOR = {"forward": lambda N: 4 * N + N // 2 + 22, "backward": lambda N: 18 * N + 4 * N + 5 * N // 4 + 60}
SAVED = Path(__file__).resolve().parent.parent / "results" / "instructions.json"


def nvdisasm():
    """The path of nvdisasm, or None: on the PATH, beside nvcc, or in the wheel of that name."""
    beside = str(Path(native_cuda.nvcc()).resolve().with_name("nvdisasm")) if native_cuda.nvcc() else None
    wheel = glob.glob(str(Path(torch.__file__).parent.parent / "nvidia/*/bin/nvdisasm"))
    return next((p for p in map(shutil.which, filter(None, ["nvdisasm", beside, *wheel])) if p), None)


def loops(cubin, disassembler):
    """Kernel -> (instructions in all, [instructions of a loop, from the longest]), by the backward branches of its code."""
    text = subprocess.run([disassembler, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    found = {}
    for part in re.split(r"\n\.text\.", text)[1:]:
        labels, at, backward, done = {}, 0, [], False
        for line in part.splitlines():
            label, code = re.match(r"\s*(\.L_x_\d+):", line), re.search(r"/\*[0-9a-f]+\*/\s+(.*?);", line)
            if label:
                labels[label[1]] = at
            elif code:
                target = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", code[1])
                if target and labels.get(target[1], at) < at and not done:
                    backward.append((labels[target[1]], at))
                done = done or code[1].strip() == "EXIT"  # behind it stand shuffles for warps that have drifted apart: not ours
                at += 1
        found[part.split(":")[0].strip()] = at, sorted((last - first + 1 for first, last in backward), reverse=True)
    return found


def steps_of(name):
    """A constant of longhorn_scan.cu, such as TILE."""
    return int(re.search(rf"#define {name} (\d+)", native.SOURCE.read_text())[1])


def count(update, dtype, N, architecture, folder):
    """{'forward' | 'backward': instructions a (token, channel), registers, spills, shared memory}, for a full GPU (L small)."""
    P, L, _ = native.cuda_shape(4096, 4096, 4096, N, 1)
    macros, cubin = native_cuda.defines(update, dtype, P, L), Path(folder) / "kernels.cubin"
    native_cuda.compile_cubin(native.SOURCE, cubin, architecture, macros)
    chunk, tile, keys, sub = (steps_of(name) for name in ("CHUNK", "TILE", "KEYS", "SUB"))
    result = {}
    for kernel, (total, lengths) in loops(cubin, nvdisasm()).items():
        direction = kernel.removesuffix("_kernel")
        if direction not in FLOOR:
            continue
        if direction == "forward":  # batches of keys, tiles of steps in them
            outer, inner = lengths[:2]
            a_step = inner / tile + (outer - inner) / keys
        else:  # chunks; in them the sub-chunks backwards, the states of all but the last forwards, and the rows of dk and dq
            outer, back, states = lengths[:3]
            a_step = back / sub + states / sub * (1 - sub / chunk) + (outer - back - states) / chunk
        result[direction] = {"instructions": round(L * a_step, 1), "floor": FLOOR[direction](N), "in_all": total,
                             "loops": lengths}
    if native_cuda.nvcc():
        command = [native_cuda.nvcc(), "-O3", "-std=c++17", f"-arch={architecture}", "-Xptxas", "-v", "-cubin", *macros]
        run = subprocess.run([*command, str(native.SOURCE), "-o", str(cubin)], capture_output=True, text=True, check=True)
        report = run.stderr
        names = re.findall(r"entry function '(\w+)_kernel'", report)
        for name, registers, spills in zip(names, re.findall(r"Used (\d+) registers", report),
                                           re.findall(r"(\d+) bytes spill stores", report), strict=True):
            if name in FLOOR:
                result[name] |= {"registers": int(registers), "spilled_bytes": int(spills)}
    return {"update": update, "dtype": str(dtype).removeprefix("torch."), "N": N, "states_a_lane": P, "lanes_a_channel": L,
            "architecture": architecture, **result}


def show(row):
    for direction in ("forward", "backward"):
        r = row[direction]
        report = f"{r['registers']} registers, {r['spilled_bytes']} bytes spilled" if "registers" in r else "no nvcc: no report"
        floor = f" (floor {r['floor']}, {r['instructions'] / r['floor']:.2f} x)" if row["update"] == "longhorn" else ""
        print(f"{row['update']:9} N={row['N']:<4} {row['dtype']:9} {row['architecture']:7} {direction:9} "
              f"{r['instructions']:7.1f} instructions a (token, channel){floor}; {report}")


def main():
    parser = argparse.ArgumentParser(description=__doc__ + f"\nFloor: forward {FLOOR['forward'](16)} and backward "
                                     f"{FLOOR['backward'](16)} at N = 16; see FLOOR in the source for the terms.",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", default="longhorn", choices=native.UPDATES)
    parser.add_argument("--architecture", default="sm_90", help="of the GPU, sm_80 or later (%(default)s)")
    parser.add_argument("--N", type=int, default=16, help="state size (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--all", action="store_true", help="all updates, sm_80, sm_90 and sm_100, N = 16 and 64, bfloat16")
    parser.add_argument("--save", action="store_true", help=f"write results/{SAVED.name}")
    args = parser.parse_args()
    if native_cuda.missing() or nvdisasm() is None:
        sys.exit(f"bench/instructions.py: {native_cuda.missing() or 'no nvdisasm found: pip install nvidia-cuda-nvdisasm'}")
    cases = [(args.update, args.N, args.architecture)]
    if args.all:
        cases = [(u, N, a) for a in ("sm_90", "sm_80", "sm_100") for u in native.UPDATES for N in (16, 64)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for update, N, architecture in cases:
            try:
                rows.append(count(update, getattr(torch, args.dtype), N, architecture, folder))
            except OSError as error:
                sys.exit(f"bench/instructions.py: {' '.join(str(error).split())}")
            show(rows[-1])
    if args.save:
        version = native_cuda.compiler_version().strip().splitlines()[-1]
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        records.write_json(SAVED, {"benchmark": "instructions", "date": date, "compiler": version,
                                   "environment": records.environment(), "rows": rows})
        print(f"record: {SAVED}")


if __name__ == "__main__":
    main()
