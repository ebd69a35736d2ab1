"""mamba-ssm's kernels without its package, as far as a machine without a GPU can tell: structs, launches, reasons.

Where wheels/ has its sdist (`python bench/mamba_ssm_kernels.py` fetches it), its own header is compiled, else one of
the same fields. Instead of its kernels a stand-in reads the struct as they do, address by address, and computes with
the loop of kernels/scan.py.

    python -m pytest tests/test_mamba_ssm_kernels.py
"""

import ctypes
import io
import re
import subprocess
import tarfile
import urllib.error
from types import SimpleNamespace

import pytest
import torch

from bench import mamba_ssm_kernels as theirs
from bench import measure, scan_cuda
from bench.measure import LeftOut
from kernels import cuda
from kernels.scan import selective_scan_ref

F32, BF16 = torch.float32, torch.bfloat16
SIZES = """ using index_t = uint64_t;
 int batch, dim, seqlen, dstate, n_groups, n_chunks;
 int dim_ngroups_ratio;
 bool is_variable_B;
 bool is_variable_C;
 bool delta_softplus;
"""
STRIDES = {"A": "d dstate", "B": "batch d dstate group", "C": "batch d dstate group", "x": "", "D": "",
           "delta_bias": "", **dict.fromkeys(("u", "delta", "z", "out", "out_z"), "batch d")}
GRADIENTS = {"A": "dA", "B": "dB", "C": "dC", "u": "du", "delta": "ddelta", "z": "dz", "out": "dout", "D": "dD",
             "delta_bias": "ddelta_bias"}
KERNEL = """#include "selective_scan.h"
template<int threads, int steps, %s, typename E, typename F> struct Selective_Scan_%s_kernel_traits {
    typedef float2 scan_t; static constexpr int kSmemSize = threads; };
template<typename Traits> __global__ void selective_scan_%s_kernel(%s params) {}
"""
FILES = {"selective_scan_fwd_kernel.cuh": KERNEL % ("int, bool, bool, bool, bool", "fwd", "fwd", "SSMParamsBase"),
         "selective_scan_bwd_kernel.cuh": KERNEL % ("bool, bool, bool, bool, bool", "bwd", "bwd", "SSMParamsBwd")}


def header(more=""):
    """A selective_scan.h with the real one's fields; `more` comes before those of the backward."""
    def body(strides):
        return "".join([f" index_t {n}_{s}_stride;\n" for n, which in strides.items() for s in which.split()]
                       + [f" void *__restrict__ {n}_ptr;\n" for n in strides])

    return (f"#pragma once\n#include <stdint.h>\n#define MAX_DSTATE 256\nnamespace at {{ struct BFloat16 {{}}; }}\n"
            f"struct SSMParamsBase {{\n{SIZES}{body(STRIDES)}}};\nstruct SSMParamsBwd: public SSMParamsBase {{\n"
            f"{more}{body({GRADIENTS[n]: STRIDES[n] for n in GRADIENTS})}}};\n")


def write_sdist(folder, **files):
    """A mamba_ssm-0.tar.gz with these texts in its source folder."""
    with tarfile.open(folder / "mamba_ssm-0.tar.gz", "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"mamba_ssm-0/{theirs.SOURCE}/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return folder / "mamba_ssm-0.tar.gz"


@pytest.fixture
def sdist(tmp_path):
    return write_sdist(tmp_path, **FILES, **{"selective_scan.h": header()})


# ------------------------------------------------------------------------------------------------ source and compiling

def test_the_structs_are_the_compilers(sdist, tmp_path):
    """The mirrors' sizes and offsets, asserted beside the header that they were read from."""
    sdist = next(iter(sorted(theirs.WHEELS.glob("mamba_ssm-*.tar.gz"))[::-1]), sdist)
    structs = theirs.structs(sdist)
    assert [s.__name__ for s in structs] == ["SSMParamsBase", "SSMParamsBwd"] and issubclass(*structs[::-1])
    command = ["g++", "-x", "c++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "-"]
    text = "#include <stdint.h>\n" + theirs.sources(sdist)["selective_scan.h"]

    def errors(text):
        program = text + theirs.assertions(structs)
        return subprocess.run(command, input=program, capture_output=True, text=True).stderr

    assert "error" not in errors(text)
    for old, new in (("bool is_variable_C", "short is_variable_C"), ("void *__restrict__ dD_ptr", "char dD_ptr[9]"),
                     ("int batch, dim", "int dim, batch")):
        assert "static assertion failed" in errors(text.replace(old, new)) and old in text
    with pytest.raises(AttributeError):  # a name that the struct lacks is no silent attribute of Python's
        structs[1]().no_such_field = 1


@pytest.mark.skipif(cuda.nvcc() is None, reason="needs nvcc")
def test_its_source_becomes_kernels_with_names(sdist, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGHORN_BUILD_DIR", str(tmp_path))
    path, seconds = theirs.compiled(sdist, BF16, 1024, "sm_90")
    assert seconds > 0 and theirs.compiled(sdist, BF16, 1000, "sm_90")[0] != path
    assert theirs.compiled(sdist, BF16, 1024, "sm_90") == (path, 0.0)
    for way, args in (("fwd", "Base"), ("bwd", "Bwd")):
        assert re.fullmatch(rf"_Z\d+selective_scan_{way}_kernelI.*SSMParams{args}", theirs.kernel_name(
            path.read_bytes(), way))
    other = write_sdist(tmp_path, **FILES, **{"selective_scan.h": header(more=" double unknown;\n")})
    theirs.structs.cache_clear()
    with pytest.raises(OSError, match=r"^nvcc could not build mamba_ssm-0.tar.gz for sm_90: [^\n]*sizeof SSMParamsBwd"):
        theirs.compiled(other, BF16, 1024, "sm_90")


def test_which_kernels_run():
    assert [theirs.layout(T) for T in (128, 200, 512, 1024, 1025, 4096)] == [
        (32, 4, True), (32, 8, False), (32, 16, True), (64, 16, True), (128, 16, False), (128, 16, True)]


def test_without_its_source_there_is_one_line(tmp_path, monkeypatch, sdist):
    def no_network(url, timeout):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(theirs, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(theirs.urllib.request, "urlopen", no_network)
    with pytest.raises(LeftOut, match=r"^no wheels/mamba_ssm-\*.tar.gz, and no network .*Name or service not known"):
        theirs.find_sdist()
    monkeypatch.setattr(theirs.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"another file"))
    with pytest.raises(LeftOut, match="is not the file that is known"):
        theirs.find_sdist()
    assert not (tmp_path / "wheels").exists()
    monkeypatch.setattr(theirs, "WHEELS", tmp_path)
    assert theirs.find_sdist() == sdist
    (tmp_path / "torn.tar.gz").write_bytes(sdist.read_bytes()[:100])
    for path, words in ((tmp_path / "torn.tar.gz", "is no whole .tar.gz"),
                        (write_sdist(tmp_path, **FILES), "has no csrc/selective_scan/selective_scan.h")):
        with pytest.raises(OSError, match=words):
            theirs.sources(path)
    monkeypatch.setattr(cuda, "nvcc", lambda: None)
    with pytest.raises(OSError, match="^mamba-ssm's source needs nvcc, and none was found"):
        theirs.compiled(sdist, BF16, 1024, "sm_90")


# ----------------------------------------------------------------------------------------------------------- launching

def stand_in(sdist, backward, args, like):
    """What the kernels do, in float64, from the addresses, sizes and strides in the struct alone."""
    B, D, T, N = args.batch, args.dim, args.seqlen, args.dstate
    assert type(args) is theirs.structs(sdist)[backward] and args.n_groups == 1 and args.dim_ngroups_ratio == D
    assert args.is_variable_B and args.is_variable_C and args.delta_softplus and args.n_chunks == -(-T // 2048)

    def at(name, dtype=like.dtype):
        kind = name.removeprefix("d") if name in GRADIENTS.values() else name
        which = {"A": ("d", "dstate"), "B": ("batch", "dstate"), "C": ("batch", "dstate")}.get(
            kind, ("batch", "d") if STRIDES[kind] else ())
        shape = {"A": (D, N), "B": (B, N, T), "C": (B, N, T)}.get(kind, (B, D, T) if STRIDES[kind] else (D,))
        dtype = F32 if kind in ("A", "D", "delta_bias") or name in ("dB", "dC") else dtype
        strides = [getattr(args, f"{name}_{w}_stride") for w in which] + [1] * (len(shape) - len(which))
        elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(getattr(args, f"{name}_ptr"))
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    swap = lambda v: v.transpose(1, 2) if v.dim() == 3 else v
    with torch.enable_grad():
        a = {n: at(n).double().requires_grad_() for n in names}
        y = selective_scan_ref(**{n: swap(v) for n, v in a.items() if n != "z"}, delta_softplus=True)
        y_z = swap(selective_scan_ref(**{n: swap(v) for n, v in a.items()}, delta_softplus=True))
        if not backward:
            at("out").copy_(swap(y).detach())
            at("out_z").copy_(y_z.detach())
            return
        assert torch.equal(at("out"), swap(y).detach().to(like.dtype)) and args.x_ptr and not args.out_z_ptr
        for name, g in zip(names, torch.autograd.grad(y_z, list(a.values()), at("dout").double()), strict=True):
            if name in ("u", "delta", "z"):
                at(f"d{name}").copy_(g)
            else:
                at(f"d{name}").add_(g)  # by atomics: they must be zero


@pytest.mark.parametrize("dtype", (F32, BF16))
def test_values_and_gradients_through_the_structs(sdist, monkeypatch, dtype):
    monkeypatch.setattr(theirs, "launch", stand_in)
    monkeypatch.setattr(theirs, "find_sdist", lambda: sdist)
    a = measure.as_mamba(measure.make_inputs(2, 5, 3, 4, dtype))
    got = measure.values_and_gradients(scan_cuda.scans("mamba_ssm", "cuda"), a)
    true = measure.values_and_gradients(scan_cuda.scans("mamba_ssm", "torch"), a, torch.float64)
    assert got.keys() == true.keys() == {"y", *(f"d{n}" for n in a)}
    assert all(got[f"d{n}"].dtype == v.dtype for n, v in a.items())
    found = measure.compare(got, true, 1e-6)
    assert all(r["right"] for r in found.values()), found


def test_what_differs_is_said_and_not_timed(monkeypatch):
    def fake(factor):
        f = lambda **a: factor * selective_scan_ref(**{n: scan_cuda.time_last(v) for n, v in a.items()},
                                                    delta_softplus=True).transpose(1, 2)
        monkeypatch.setattr(theirs, "selective_scan_fn", lambda: (f, "a fake", None))
        device = SimpleNamespace(name="cpu", backend="cuda")
        return scan_cuda.check_case("mamba_ssm", (2, 20, 8, 4), "bfloat16", {}, device)

    assert fake(1.0)["right"] and not fake(1.01)["right"]
    ran = SimpleNamespace(returncode=0, stdout="in short: a fake\n", stderr="")
    monkeypatch.setattr(scan_cuda.subprocess, "run", lambda *_, **__: ran)
    assert scan_cuda.check_mamba_ssm() == ("a fake", None)
    ran.returncode, ran.stderr = 1, "bench/mamba_ssm_kernels.py: B=2: WRONG\n"
    assert scan_cuda.check_mamba_ssm() == (None, "bench/mamba_ssm_kernels.py: B=2: WRONG")
