"""Translates PTX, the output of nvcc or NVRTC for the kernels, to C++ that runs on a CPU. Needs a CUDA compiler, but no
GPU.

tools/cuda_shim.h runs the source as compiled by g++. Inline assembly, argument offsets, addresses, vectors and the
optimiser's handling of branches around shuffles exist only in the CUDA compiler's output. Here that output runs, one
C++ statement per instruction, on the same shim and tools/ptx_shim.h. Only the driver's translation of PTX to GPU
instructions is not covered. An unknown instruction is an error that names it, so nothing is skipped. Approximate
instructions (ex2, rcp) are computed exactly, but flush denormals to zero as a GPU does.

    python -m pytest tests/test_ptx.py
"""

import re
import tempfile
from pathlib import Path

from kernels import cuda

SHIM = Path(__file__).with_name("ptx_shim.h")
MODULE = re.compile(r"""\s*(?:
    \.(?:version|target|address_size|file|loc)\b[^\n]*\n            # of no consequence
  | \.section\s+\.debug\w*\s*\{[^}]*\}
  | (?P<bytes>\.global \s+ \.align\s+(?P<align>\d+) \s+ \.b8\s+(?P<name>\w+)\[(?P<size>\d+)\] \s*=\s*
    (?P<values>\{[\d,\s]*\});)
  | \.global\s+\.align\s+\d\s+\.[us]\d+\s+\w+;               # constants that NVRTC keeps; C++ using one fails
  | \.extern\s+\.shared\s+\.align\s+16\s+\.b8\s+(?P<shared>\w+)\[\];
  | (?:\.visible|\.weak)?\s*\.entry\s+(?P<kernel>\w+)\(
    \s*\.param\s+\.align\s+8\s+\.b8\s+(?P<param>\w+)\[(?P<args>\d+)\]\s*\)
    (?:\s*\.(?:maxntid|minnctapersm)[\d,\ ]+)*\s*\n\{(?P<body>.*?)\n\}
)""", re.VERBOSE | re.DOTALL)
STATEMENT = re.compile(r"""\s*(?:
    \.loc\s+(?P<file>\d+)\s+(?P<source>\d+)[^\n]*\n | (?P<label>\$?\w+): | (?P<brace>[{}])
  | (?:@(?P<unless>!?)(?P<guard>%?\w+)\s+)?(?P<text>[^;]+);
)""", re.VERBOSE)
REGISTERS = {  # type -> (C++ type, initial value: a NaN or a bad address, to expose reads before writes)
    "pred": ("bool", "true"), "b16": ("uint16_t", "0x7fff"), "b32": ("uint32_t", "0x7fffdead"),
    "f32": ("uint32_t", "0x7fffdead"), "b64": ("uint64_t", "0x7fffdead00000000")}
KINDS = {"pred": "bool", "f32": "float", "f16": "uint16_t", "bf16": "uint16_t",
         **{f"{sign}{bits}": f"{'' if sign == 's' else 'u'}int{bits}_t" for sign in "usb" for bits in (8, 16, 32, 64)}}

INT, BITS = "[us](16|32|64)", "b(16|32|64)"
COMPARE = {"eq": "==", "ne": "!=", "neu": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
RULES = [(re.compile(pattern), rule) for pattern, rule in {  # instruction name -> C++ of its result
    rf"mov\.([us]|b)(16|32|64)|mov\.(f32|pred)|cvta\.to\.global\.u64|cvt\.{INT}\.{INT}": "{a}",
    rf"add\.({INT}|f32)": "{a} + {b}", rf"sub\.({INT}|f32)": "{a} - {b}", rf"mul\.(lo\.{INT}|f32)": "{a} * {b}",
    rf"mad\.lo\.{INT}": "{a} * {b} + {c}", r"mul\.wide\.[us](16|32)": "wide({a}) * {b}",
    r"fma\.rn\.f32": "fmaf({a}, {b}, {c})", r"neg\.(s(16|32|64)|f32)": "-{a}",
    rf"div\.{INT}": "{a} / {b}", rf"rem\.{INT}": "{a} % {b}",
    rf"min\.{INT}": "std::min({a}, {b})", rf"max\.{INT}": "std::max({a}, {b})",
    r"min\.NaN\.f32": "nan_or({a}, {b}, lesser({a}, {b}))", r"max\.NaN\.f32": "nan_or({a}, {b}, greater({a}, {b}))",
    rf"and\.({BITS}|pred)": "{a} & {b}", rf"or\.({BITS}|pred)": "{a} | {b}", rf"xor\.({BITS}|pred)": "{a} ^ {b}",
    rf"not\.{BITS}": "~{a}", r"not\.pred": "!{a}",
    rf"shl\.{BITS}": "shift_left({a}, {b})", rf"shr\.{INT}": "shift_right({a}, {b})",
    rf"selp\.({INT}|{BITS}|f32)": "{c} ? {a} : {b}",
    # these treat NaN as C++ does
    rf"setp\.(eq|ne|lt|le|gt|ge)\.({INT}|{BITS})|setp\.(eq|neu|lt|le|gt|ge)\.f32": "{a} {compare} {b}",
    r"cvt\.rn\.bf16\.f32": "round_to_bf16({a})", r"cvt\.rn\.f16\.f32": "round_to_fp16({a})",
    r"cvt\.f32\.f16": "widen_fp16({a})",
    r"ex2\.approx\.ftz\.f32": "flush(exp2f(flush({a})))", r"lg2\.approx\.ftz\.f32": "flush(log2f(flush({a})))",
    r"rcp\.approx\.ftz\.f32": "flush(1.0f / flush({a}))",
}.items()]
MEMORY = re.compile(r"(?P<way>ld|st)(\.(?P<space>global|shared|param))?(?P<nc>\.nc)?(\.v(?P<count>[24]))?"
                    r"\.(?P<kind>[usb](8|16|32|64)|f32)")


def translate(ptx, left_out=()):
    """The C++ for PTX text: its kernels, each a function of PtxArgs by value, and its tables of bytes. Raises
    ValueError for anything unknown.

    Kernels in `left_out` cannot be launched; each one left out saves most of a second of g++.
    """
    ptx = re.sub(r"//[^\n]*", "", ptx.rstrip("\0"))
    out = []
    at = 0
    size = None
    while ptx[at:].strip():
        match = MODULE.match(ptx, at)
        if not match:
            raise ValueError(f"unknown PTX: {ptx[at:].strip()[:100]!r}")
        if match["bytes"]:
            out.append(f"alignas({match['align']}) unsigned char {match['name']}[{match['size']}] = {match['values']};")
        elif match["shared"]:
            out.append(f"constexpr uint32_t {match['shared']} = SHARED;")
        elif match["kernel"]:
            if size is None:
                size = match["args"]
                out.append(f"struct alignas(8) PtxArgs {{ char bytes[{size}]; }};")
                out.append("typedef PtxArgs ScanArgs, ConvArgs, LossArgs, SumsArgs;")
            if match["args"] != size:
                raise ValueError(f"{match['kernel']} takes {match['args']} bytes of arguments, the others {size}")
            body = "\n".join(statements(match["body"], 1 + ptx.count("\n", 0, match.start("body")), match["param"]))
            if match["kernel"] in left_out:
                body = f'shim_trap("{match["kernel"]} was left out");'
            out.append(f"void {match['kernel']}(const PtxArgs args) {{\nbegin();\n{body}\n}}")
        at = match.end()
    return "\n".join([f'#include "{SHIM}"', "using namespace ptx;", *out])


def statements(body, line, param):
    """Yields the C++ for a kernel's instructions, which start at `line` of the PTX; `param`: its argument's name."""
    at = source = 0
    while body[at:].strip():
        match = STATEMENT.match(body, at)
        if not match:
            raise ValueError(f"unknown PTX: {body[at:].strip()[:100]!r}")
        line = line + body.count("\n", at, match.end())
        at = match.end()
        if match["source"]:
            # file 1 is the source, others are the compiler's headers
            source = int(match["source"]) if match["file"] == "1" else source
        elif match["label"]:
            yield name(match["label"]) + ":;"
        elif match["brace"]:
            yield match["brace"]
        else:
            text = instruction(match["text"].strip(), f"{{{line}, {source}}}", param)
            if match["guard"]:
                text = f"if ({match['unless']}{name(match['guard'])}) {{ {text} }}"
            yield text


def name(text):
    return text.replace("%", "").replace("$", "")


def value(text, kind):
    """The C++ for an operand read as a `kind`."""
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        text = f"0x{match[1]}u"
    elif re.fullmatch(r"-?\d+", text):
        text += "ll"
    elif text in ("%tid.x", "%ctaid.x"):
        text = {"%tid.x": "threadIdx.x", "%ctaid.x": "blockIdx.x"}[text]
    elif pair := re.fullmatch(r"\{(%\w+), (%\w+)\}", text):  # of 16 bits each
        text = f"({name(pair[1])} | (uint32_t){name(pair[2])} << 16)"
    elif not re.fullmatch(r"%?\w+", text):
        raise ValueError(f"unknown PTX operand: {text}")
    return f"AS_FLOAT({name(text)})" if kind == "f32" else f"({KINDS[kind]}){name(text)}"


def instruction(text, at, param):
    """The C++ for one instruction without its guard."""
    opcode, _, rest = re.sub(r"\s+", " ", text).partition(" ")
    operands = [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", rest)]
    if opcode == ".reg":
        return registers(rest)
    if opcode == ".pragma":
        return ""
    if opcode == "ret":
        return "return;"
    if opcode in ("bra", "bra.uni"):
        return f"goto {name(rest)};"
    waits = waiting(opcode, operands, at)
    if waits:
        return waits
    if match := MEMORY.fullmatch(opcode):
        return access(match, operands, at, param)
    for pattern, rule in RULES:
        if pattern.fullmatch(opcode):
            return computed(opcode.split("."), rule, operands, param)
    raise ValueError(f"unknown PTX instruction: {text}")


def registers(rest):
    """The C++ for the declaration of registers of one type."""
    kind, _, names = rest.partition(" ")
    kind = kind.removeprefix(".")
    if kind not in REGISTERS:
        raise ValueError(f"PTX registers of an unknown type: {rest}")
    ranged = re.fullmatch(r"%(\w+)<(\d+)>", names.strip())
    if ranged:
        declared = [f"{ranged[1]}{i}" for i in range(int(ranged[2]))]
    else:
        declared = [name(each.strip()) for each in names.split(",")]
    type_, initial = REGISTERS[kind]
    return f"{type_} " + ", ".join(f"{register} = {initial}" for register in declared) + ";"


def waiting(opcode, operands, at):
    """The C++ for a barrier, a shuffle or an asynchronous copy; None for any other instruction."""
    if opcode in ("bar.sync", "barrier.sync") and operands == ["0"]:
        return f"block_barrier({at});"
    if opcode == "bar.warp.sync":
        return f"warp_barrier({at}, {value(operands[0], 'b32')});"
    if opcode == "shfl.sync.bfly.b32":
        to, *values = operands
        return f"{name(to.split('|')[0])} = shuffle_xor({at}, {', '.join(value(v, 'b32') for v in values)});"
    if opcode in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
        to, source = (re.fullmatch(r"\[(%\w+)\]", operand)[1] for operand in operands[:2])
        return f"copy_async<{operands[2]}>({at}, {name(to)}, {name(source)});"
    if opcode == "cp.async.commit_group":
        return "copy_group();"
    if opcode == "cp.async.wait_group":
        return f"copies_wait<{operands[0]}>({at});"
    return None


def computed(words, rule, operands, param):
    """The C++ for an instruction that computes a register from others, or takes the argument's address."""
    to, *operands = operands
    if operands == [param]:
        return f"{name(to)} = (uint64_t)&args;"
    kinds = [words[-1]] * 3
    if words[0] in ("shl", "shr"):
        kinds[1] = "u32"
    if words[0] == "selp":
        kinds[2] = "pred"
    if len(operands) != len(set(re.findall(r"\{[abc]\}", rule))):
        raise ValueError(f"PTX {'.'.join(words)} with {len(operands)} operands")
    named = {n: value(v, k) for n, v, k in zip("abc", operands, kinds, strict=False)}
    result = rule.format(**named, compare=COMPARE.get(words[1]))
    kind = words[-2] if words[0] == "cvt" else "pred" if words[0] == "setp" else words[-1]
    cast = "AS_BITS" if kind == "f32" else "" if "wide" in words else f"({KINDS[kind]})"
    return f"{name(to)} = {cast}({result});"


def access(match, operands, at, param):
    """The C++ for a load or store of a number or a vector."""
    loads = match["way"] == "ld"
    count = int(match["count"] or 1)
    kind = match["kind"]
    address, registers = operands if not loads else operands[::-1]
    registers = [r.strip() for r in registers.strip("{}").split(",")]
    where = re.fullmatch(r"\[(%?\w+)(?:\+(-?\d+))?\]", address)
    if not where or len(registers) != count:
        raise ValueError(f"PTX {match[0]} {', '.join(operands)}: unknown address or vector")
    base = "(uint64_t)&args" if where[1] == param else name(where[1])
    # generic addresses are global: only cvta.shared, which is unknown here, would make a shared one
    space = match["space"] or "global"
    element = KINDS[kind].replace("float", "uint32_t")
    way = "STORE" if not loads else "LOAD_CACHED" if match["nc"] else "LOAD"
    last = {"param": "&args, sizeof args", "shared": str(not loads).lower(), "global": way}[space]
    pointer = f"auto memory = {space}<{element}, {count}>({at}, {base} + {where[2] or 0}, {last});"
    kind = kind.replace("f", "b")
    assignments = []
    for i, register in enumerate(registers):
        if loads:
            assignments.append(f"{name(register)} = memory[{i}];")
        else:
            assignments.append(f"memory[{i}] = {value(register, kind)};")
    return f"{{ {pointer} {' '.join(assignments)} }}"


def compiled(macros, source, architecture="sm_90"):
    """The PTX for the text `source`, with the kernels that `macros` select. Raises OSError with the compiler's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder) / "kernels.cu", Path(folder) / "kernels.ptx"
        text.write_text(source)
        compiler, _, _ = cuda.ways(architecture)[0]
        cuda.compile_kernels(text, out, compiler, "ptx", architecture, macros)
        return out.read_text()
