"""Compile the scan's kernels for every kind of GPU and write down what ptxas used: results/cubins.csv.

    python tools/cubins.py                     # what the table lacks; all of it takes 20 to 60 minutes of one core
    python tools/cubins.py --only=bf16,sm_90   # the rows with all of these words

Needs nvcc, but no GPU. A row is a cubin: update, type, P x L (`build.cuda_shape`) and architecture, then numbers per
kernel in the order of cuda.SCAN_KERNELS: registers per thread, bytes of spills (stores and loads), bytes of shared
memory per block, and the blocks that fit a multiprocessor, 0 if the kernel cannot be launched. The first line has the
hash of the source without comments, and the compiler: with another source or compiler all rows are compiled again.
It can be killed at any time; rerun the command to resume.
"""

import argparse
import hashlib
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from kernels import build, cuda  # noqa: E402
from runtime.errors import ConfigError, main_error  # noqa: E402

TABLE = REPO / "results" / "cubins.csv"
GPUS = {  # architecture: bytes of shared memory per multiprocessor and at most per block, threads per multiprocessor
    "sm_80": (164 << 10, 163 << 10, 2048), "sm_86": (100 << 10, 99 << 10, 1536), "sm_89": (100 << 10, 99 << 10, 1536),
    "sm_90": (228 << 10, 227 << 10, 2048), "sm_100": (228 << 10, 227 << 10, 2048),
    "sm_120": (100 << 10, 99 << 10, 1536)}
REGISTERS = 65536  # per multiprocessor, on all of these; a warp's registers are allocated 256 at a time
COLUMNS = ("registers", "spills", "shared", "blocks")


def keys():
    """(update, dtype, (P, L), architecture) of every cubin that `build.cuda_shape` may choose."""
    return [(update, dtype, shape, gpu) for gpu in GPUS for update in build.UPDATES for dtype in build.DTYPES
            for shape in build.CUDA_SHAPES]


def name(update, dtype, shape, gpu):
    return f"{update},{cuda.TYPES[dtype]},{shape[0]}x{shape[1]},{gpu}"


def version():
    """'source <hash>, <nvcc's version>': what the rows of a table depend on."""
    code = b"".join(re.sub(rb"\s*//[^\n]*|\s+", b" ", path.read_bytes()) for path in (build.HEADER, build.SCAN))
    release = re.search(r"release [\d.]+, V([\d.]+)", cuda.compiler_version("nvcc"))[1]
    return f"source {hashlib.sha256(code).hexdigest()[:16]}, nvcc {release}"


def measure(update, dtype, shape, gpu):
    """{column: a number per kernel} of one cubin, compiled here. Raises OSError with the compiler's message."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scan.cubin"
        macros = cuda.defines(update, dtype, *shape)
        command = [cuda.nvcc(), "-cubin", *cuda.OPTIONS["nvcc"], f"-arch={gpu}", "-Xptxas=-v", *macros, str(build.SCAN)]
        run = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True)
        if run.returncode:
            raise OSError(f"nvcc could not build {name(update, dtype, shape, gpu)}: {run.stderr.strip()[:500]}")
        facts = read_global(path.read_bytes(), b"facts")
    report = {}
    for part in run.stderr.split("Compiling entry function '")[1:]:
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        report[part.split("'")[0]] = int(re.search(r"Used (\d+) registers", part)[1]), sum(map(int, spilled.groups()))
    registers, spills = zip(*(report[kernel] for kernel in cuda.SCAN_KERNELS), strict=True)
    shared = facts[-len(cuda.SCAN_KERNELS):]
    blocks = [blocks_per_multiprocessor(gpu, *used) for used in zip(registers, shared, strict=True)]
    return dict(zip(COLUMNS, map(list, (registers, spills, shared, blocks)), strict=True))


def blocks_per_multiprocessor(gpu, registers, shared):
    """How many blocks of a kernel run at once on one multiprocessor; 0: it cannot be launched."""
    room, most, threads = GPUS[gpu]
    per_warp = -(-registers * 32 // 256) * 256
    warps = build.CUDA_THREADS // 32
    by_registers = REGISTERS // 4 // per_warp * 4 // warps  # each of four schedulers has a quarter of the registers
    return 0 if shared > most else min(room // (shared + cuda.RESERVED), by_registers, threads // build.CUDA_THREADS)


def read_global(cubin, symbol):
    """The int64s of a global variable in a cubin, a 64-bit ELF file."""
    header = struct.unpack_from("<16sHHIQQQIHHHHHH", cubin)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, header[6] + i * header[11]) for i in range(header[12])]
    for _, kind, _, _, offset, size, link, _, _, entry in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = sections[link][4]
        for at in range(offset, offset + size, entry):
            text, _, _, section, value, length = struct.unpack_from("<IBBHQQ", cubin, at)
            if cubin[names + text:cubin.index(b"\0", names + text)] == symbol:
                start = sections[section][4] + value
                return struct.unpack_from(f"<{length // 8}q", cubin, start)
    raise OSError(f"the cubin has no {symbol.decode()}")


def read_table(path=TABLE):
    """(version, {name: {column: a number per kernel}}) of a table; (None, {}) if there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {}
    for line in lines[2:]:
        *key, registers, spills, shared, blocks = line.split(",")
        values = [[int(n) for n in numbers.split()] for numbers in (registers, spills, shared, blocks)]
        rows[",".join(key)] = dict(zip(COLUMNS, values, strict=True))
    return (lines[0].removeprefix("# "), rows) if lines else (None, {})


def write_table(rows, path=TABLE):
    order = [name(*key) for key in keys()]
    lines = [f"# {version()}", f"update,type,shape,architecture,{','.join(COLUMNS)}"]
    for key in sorted(rows, key=order.index):
        lines.append(",".join([key, *(" ".join(map(str, rows[key][column])) for column in COLUMNS)]))
    temporary = path.with_suffix(".tmp")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words, separated by commas, that a row must have")
    words = [word for word in parser.parse_args().only.split(",") if word]
    if cuda.nvcc() is None:
        raise ConfigError("no nvcc found: install the CUDA toolkit, or set NVCC")
    made_with, rows = read_table()
    rows = rows if made_with == version() else {}
    wanted = [key for key in keys() if name(*key) not in rows and set(words) <= set(name(*key).split(","))]
    for i, key in enumerate(wanted):
        rows[name(*key)] = measure(*key)
        write_table(rows)
        print(f"{i + 1} of {len(wanted)}: {name(*key)} {rows[name(*key)]}", flush=True)


if __name__ == "__main__":
    with main_error("cubins.py"):
        main()
