"""kernels/build.py and kernels/choose.py: building, caching, choosing and refusing. Fake compilers imitate broken ones.

    python -m pytest tests/test_native.py
"""

import contextlib
import ctypes
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from helpers import left_behind, table
from operators import COMPILER, OPERATORS

from kernels import build, choose, ops
from kernels.scan import longhorn_scan

F32, BF16 = torch.float32, torch.bfloat16
ROOT = build.ROOT
CACHES = (build.library, choose.unavailable, build.say_once)
TINY_SOURCE = 'extern "C" long long longhorn_answer(void) { return %d; }\n'


def scan_inputs():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 4, n, generator=g) for n in (3, 3, 2, 2)]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Makes this process like a new one with an empty build folder: no backend chosen, no line printed."""
    monkeypatch.setenv("LONGHORN_BUILD_DIR", str(tmp_path / "deep" / "build"))
    for f in CACHES:
        f.cache_clear()
    yield
    for f in CACHES:
        f.cache_clear()


def fake_compiler(folder, body):
    """A fake compiler that answers --version and otherwise runs `body`."""
    path = folder / "fake-c++"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo fake 1.0; exit 0; }}\nfor out; do :; done\n{body}\n')
    path.chmod(0o755)
    return quote(path)


def quote(path):
    return shlex.quote(str(path))


@pytest.fixture
def copying(request, tmp_path, monkeypatch):
    """Like `fresh`, with a compiler that copies the library already built."""
    built = build.build()[0]
    request.getfixturevalue("fresh")
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, f'cp {quote(built)} "$out"'))


# ------------------------------------------------------------------------------------------------------------- building

@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.cu"
    path.write_text(TINY_SOURCE % 1)
    return path


def test_a_cached_library_that_was_cut_short_or_zeroed_is_built_again(source, tmp_path):
    """If loaded, such a library would kill every process with SIGBUS or compute something else."""
    path, seconds = build.build([source], tmp_path)
    assert seconds > 0
    good = path.read_bytes()
    for content in (good[:len(good) // 2], b"", good[:4096] + bytes(4096) + good[8192:]):
        path.unlink()
        path.write_bytes(content)
        leftover = left_behind(tmp_path / path.stem.rpartition("_")[0])
        leftover.touch()
        again, seconds = build.build([source], tmp_path)
        assert seconds > 0 and ctypes.CDLL(str(again)).longhorn_answer() == 1 and not leftover.exists()
        before = again.stat().st_mtime_ns
        assert build.build([source], tmp_path) == (again, 0.0) and again.stat().st_mtime_ns == before
        path = again


def give_away(path):
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize("which", ["folder", "file"])
@pytest.mark.parametrize("how", [lambda path: path.chmod(0o775), lambda path: path.chmod(0o757), give_away],
                         ids=["of a group", "of all", "of another user"])
def test_nothing_is_loaded_that_another_user_could_have_written(source, tmp_path, monkeypatch, capfd, which, how):
    """Not even the same library is loaded, in its place and with the right hash in its name. If others may write to
    the folder, the library is built in the user's own cache. If they may write there too, building is refused."""
    build.say_once.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, before = tmp_path / "build", os.umask(0o002)  # the umask of many systems
    try:
        path, _ = build.build([source], folder)
    finally:
        os.umask(before)
    assert build.build([source], folder) == (path, 0.0)
    how(folder if which == "folder" else path)
    again, seconds = build.build([source], folder)
    assert seconds > 0 and build.build([source], folder) == (again, 0.0)
    said = capfd.readouterr().err
    if which == "file":
        assert again == path and path.stat().st_mode & 0o777 == 0o755 and path.stat().st_uid == os.geteuid()
        assert not said
        return
    assert again.parent == tmp_path / "cache/longhorn" and said.count("\n") == 1
    assert said.startswith(f"native kernels: other users may write to {folder}: using {again.parent} instead")
    how(again.parent)
    with pytest.raises(OSError, match="^other users may write to .* set LONGHORN_BUILD_DIR to a folder that only you"):
        build.build([source], folder)


@pytest.mark.parametrize("change", ("source", "header", "new header", "a header beside longhorn_scan.cu",
                                    "flags", "cpu", "compiler"))
def test_another_source_flag_cpu_or_compiler_makes_another_file(change, source, tmp_path, monkeypatch):
    first, _ = build.build([source], tmp_path)
    if change == "source":
        source.write_text(TINY_SOURCE % 2)
    elif "header" in change:  # the sources include it
        shutil.copy(build.HEADER, tmp_path)
        beside = change == "a header beside longhorn_scan.cu"
        monkeypatch.setattr(build, *(("ROOT", tmp_path) if beside else ("HEADER", tmp_path / "lanes.h")))
        (tmp_path / ("lanes.h" if change == "header" else "more.h")).write_text("// edited")
    elif change == "flags":
        flags = build._flags
        monkeypatch.setattr(build, "_flags", lambda openmp: [*flags(openmp), "-O0"])
    elif change == "cpu":
        monkeypatch.setattr(build, "_cpu_name", lambda: "another")
    else:
        monkeypatch.setenv("CXX", fake_compiler(tmp_path, 'echo > "$out"'))
    second, _ = build.build([source], tmp_path)
    assert first != second and first.exists()


@pytest.mark.usefixtures("fresh")
def test_a_source_that_does_not_compile_stops_a_run_but_a_broken_compiler_does_not(source, tmp_path, monkeypatch):
    """If the run went on, plain PyTorch would train without the edit. A compiler that is missing, or that cannot
    compile anything, does not stop it."""
    source.write_text("int x = edited;")
    monkeypatch.setenv("CXX", " ")  # as if it were not set
    with pytest.raises(build.Broken, match="could not build a.cu: .*edited"):
        build.build([source], tmp_path)
    for compiler in "no such compiler", fake_compiler(tmp_path, "echo no licence >&2; exit 1"):
        monkeypatch.setenv("CXX", str(compiler))
        with pytest.raises(OSError) as error:
            build.build([source], tmp_path)
        assert not isinstance(error.value, build.Broken)

    monkeypatch.setattr(build, "library", mock.Mock(side_effect=build.Broken("c++ could not build a.cu: edited")))
    with pytest.raises(RuntimeError, match="a.cu: edited: correct that, or use --backend=torch"):
        choose.choose("longhorn_scan", "", "cpu")
    assert choose.choose("longhorn_scan", "torch", "cpu") == "torch"
    build.library.side_effect = OSError("no C++ compiler found")
    assert choose.choose("longhorn_scan", "", "cpu") == "torch"


def test_a_source_that_is_edited_while_it_is_compiled_is_not_cached(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, f'echo "// more" >> {quote(source)}; exec {COMPILER} "$@"'))
    with pytest.raises(build.Broken, match="a.cu was edited while it was being compiled"):
        build.build([source], tmp_path / "build")
    assert not list((tmp_path / "build").glob("*.so"))


# Building does not need PyTorch, and importing it takes longer than the build. These processes skip it.
LEAN = """
import sys, unittest.mock
sys.modules["torch"] = unittest.mock.MagicMock()
from kernels import build, choose
"""


def test_four_processes_at_once_build_once(start, tmp_path):
    """All start with an empty folder: one compiles, the others wait, and all load the same file. The compiler is held
    until all four have found nothing built and wait for the lock."""
    log, go, folder = tmp_path / "log", tmp_path / "go", tmp_path / "build"
    body = (f'echo build >> {quote(log)}\nuntil [ -e {quote(go)} ]; do sleep 0.05; done\n'
            f'cp {quote(build.build()[0])} "$out"')
    code = LEAN + f"""
import os, pathlib
at_lock = pathlib.Path({str(tmp_path)!r}) / f"at-lock-{{os.getpid()}}"
sys.addaudithook(lambda event, args: event == "fcntl.flock" and at_lock.touch())
path, seconds = build.build()
print(path, seconds > 0, build.load(path).longhorn_chunk(), sep="|")
"""
    environment = {"LONGHORN_BUILD_DIR": str(folder), "CXX": fake_compiler(tmp_path, body)}
    processes = [start([sys.executable, "-c", code], **environment) for _ in range(4)]
    gives_up = time.monotonic() + 120
    while not all((tmp_path / f"at-lock-{p.pid}").exists() for p in processes):
        assert all(p.alive() for p in processes) and time.monotonic() < gives_up, [p.said() for p in processes]
        assert not log.exists() or log.read_text().count("build") <= 1
        time.sleep(0.01)
    go.touch()
    assert [p.wait() for p in processes] == [0] * 4, [p.said() for p in processes]
    paths, built, chunks = zip(*(p.said().split("|") for p in processes), strict=True)
    assert len(set(paths)) == 1 and built.count("True") == 1 and {int(n) for n in chunks} == {build.CHUNK}
    assert log.read_text().split() == ["build"]
    assert sorted(p.suffix for p in folder.iterdir()) == [".lock", ".so"]


def test_without_openmp_the_library_is_built_for_one_thread(source, tmp_path, monkeypatch):
    """With a compiler that refuses -fopenmp, as Apple's does, the library is built without it."""
    refuse = 'for a; do [ "$a" = -fopenmp ] && { echo no OpenMP >&2; exit 1; }; done'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, f'{refuse}; exec {COMPILER} "$@"'))
    source.write_text("#ifdef _OPENMP\n#error built with OpenMP\n#endif\n" + TINY_SOURCE % 3)
    path, _ = build.build([source], tmp_path)
    assert ctypes.CDLL(str(path)).longhorn_answer() == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_one_openmp_runtime_is_loaded():
    """PyTorch brings its own libgomp; a second one would put its threads on the same cores. The test uses a new
    process because other tests may have loaded scikit-learn, which brings one too."""
    code = """
import torch
from kernels import build, choose
build.library()
torch.randn(200, 200) @ torch.randn(200, 200)
print(open("/proc/self/maps").read())"""
    lines = filter(None, subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).splitlines())
    mapped = {line.split()[-1] for line in lines if re.search(r"/lib(g|i)?omp[^/]*\.so", line)}
    assert len({os.path.realpath(p) for p in mapped}) == 1, mapped


@pytest.mark.parametrize("struct", ("ScanArgs", "ConvArgs", "NormArgs"))
def test_fields_have_the_same_order_in_cpp_and_python(struct):
    """The size check cannot notice two swapped fields, which would make a kernel write to the wrong place."""
    text = build.SCAN.read_text() + build.CONV.read_text()
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.S).group(1)
    body = re.sub(r"//[^\n]*|\b(const|void|float|double|int64_t)\b|\*", "", body)
    names = [n for n in re.split(r"[\s,;]+", body) if n]
    assert names == [n for n, _ in getattr(build, struct)._fields_]


@pytest.mark.parametrize("wrong", ("", "scan", "conv", "norm", "chunk", "width"))
def test_a_changed_struct_or_constant_is_refused(source, tmp_path, wrong):
    answers = {"longhorn_chunk": build.CHUNK // (1 + (wrong == "chunk")), "longhorn_lanes": 8,
               "longhorn_max_width": build.MAX_WIDTH - (wrong == "width")}
    for name, struct in {"scan": build.ScanArgs, "conv": build.ConvArgs, "norm": build.NormArgs}.items():
        answers[f"{name}_args_size"] = ctypes.sizeof(struct) + 8 * (name == wrong)
    getters = "".join(f"long long {name}(void) {{ return {n}; }}\n" for name, n in answers.items())
    source.write_text(f'extern "C" {{ {getters} }}\n')
    path, _ = build.build([source], tmp_path)
    with pytest.raises(build.Broken, match="change both") if wrong else contextlib.nullcontext():
        build.load(path)


# --------------------------------------------------------------------------------------------------- choosing, refusing

FAILING = {  # {what fails: (environment variables, or the body of a fake compiler; words of the error)}
    "the compiler does not start": ({"CXX": "/bin/false"}, "'/bin/false' does not run"),
    "no compiler is found": ({"CXX": "", "PATH": ""}, "no C++ compiler found (install g++ or clang++, or set CXX)"),
    "the folder is a file": ({"LONGHORN_BUILD_DIR": "/dev/null"}, "/dev/null"),
    "compiling": ('echo "longhorn_scan.cu:7: error: words of the" >&2; echo compiler >&2; exit 1',
                  "words of the compiler"),
    "loading": ('echo rubbish > "$out"', "longhorn_scan_cpu_"),
}


@pytest.mark.parametrize("how", FAILING)
def test_a_failing_build_falls_back_and_says_so_once(how, fresh, tmp_path, monkeypatch, capfd):
    environment, words = FAILING[how]
    if isinstance(environment, str):
        environment = {"CXX": fake_compiler(tmp_path, environment)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    args = scan_inputs()
    want = longhorn_scan(*args, backend="torch")
    assert torch.equal(longhorn_scan(*args), want) and torch.equal(longhorn_scan(*args), want)
    ops.rms_norm(args[0], torch.ones(3))
    ops.causal_conv1d(args[0], torch.ones(3, 4))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("native kernels: plain PyTorch runs instead") and words in said[0]
    assert not list(tmp_path.glob("deep/build/*.so"))
    for call in (functools.partial(longhorn_scan, *args), functools.partial(ops.rms_norm, args[0], torch.ones(3)),
                 functools.partial(ops.causal_conv1d, args[0], torch.ones(3, 4))):
        with pytest.raises(RuntimeError) as error:
            call(backend="cpu")
        assert words in str(error.value) and "\n" not in str(error.value)


def test_the_library_is_announced_once_and_by_one_rank(copying, monkeypatch, capfd):
    build.library()
    build.library()
    line = r"native kernels: cpu \d+ lanes, (OpenMP|one thread .*) \(built in \d+\.\d s\)\n"
    assert re.fullmatch(line, capfd.readouterr().err)
    build.library.cache_clear()
    build.library()
    assert "(cached)" in capfd.readouterr().err
    for f in CACHES:
        f.cache_clear()
    monkeypatch.setenv("RANK", "1")
    build.library()
    assert capfd.readouterr().err == ""


def test_a_machine_is_judged_by_its_oldest_visible_gpu(fresh, monkeypatch):
    """A model may be on any GPU, not only on the current one."""
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: capabilities[device])
    monkeypatch.setattr(build.cuda, "missing", lambda: None)
    assert "8.0 (Ampere) or later: hide older ones with CUDA_VISIBLE_DEVICES" in choose.unavailable("cuda")
    capabilities.pop()
    choose.unavailable.cache_clear()
    assert choose.unavailable("cuda") is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_that_cannot_be_printed_ends_nothing(unbuffered):
    code = LEAN + """
from common import errors
with errors.main_error("p"):
    build.say_once("a"); build.say_once("b"); print("went on")
"""
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=full, text=True,
                             env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert (run.returncode, run.stdout) == (0, "went on\n")


def test_a_cpu_run_never_looks_for_nvcc_or_builds_for_torch(fresh, monkeypatch):
    monkeypatch.setattr(build.subprocess, "run", lambda *a, **k: pytest.fail(f"ran {a}"))
    longhorn_scan(*scan_inputs(), backend="torch")
    longhorn_scan(*(v.double() for v in scan_inputs()))


def test_the_backend_depends_on_the_request_the_device_and_the_dtype():
    pick = choose.choose
    assert {pick("longhorn_scan", backend, "cpu") for backend in (None, "", "cpu")} == {"cpu"}
    assert pick("longhorn_scan", None, "cpu", torch.float64) == "torch"
    assert pick("causal_conv1d", "", "cpu", F32, "too wide") == "torch"
    assert pick("longhorn_scan", "torch", "cuda") == "torch"
    assert pick("attention", "", "cuda", F32) == pick("wkv4", "cuda", "cuda") == "cuda"  # PyTorch's operators
    assert pick("rms_norm", "fused", "cpu") == pick("linear_cross_entropy", "fused", "cpu") == "cpu"
    with pytest.raises(AssertionError, match="^plain: unknown operator 'scan': choose from longhorn_scan,"):
        choose.plain("rms_norm", "scan").__enter__()


# Operator, backend, device and dtype; words of the error.
REFUSED = """
mesa nvidia cpu -              unknown backend 'nvidia': choose one of torch, cpu
rms_norm cuda cpu -            backend 'cuda' cannot run here:
attention cuda cpu -           backend 'cuda' cannot run here: the tensors are on cpu
longhorn_scan cpu meta float32       the tensors are on meta
longhorn_scan cpu cpu float64        float32, bfloat16, float16, got float64: use
longhorn_scan fused cuda float32     no library has Longhorn's scan: leave backend empty
wkv4 fused cuda float32              no library has RWKV-4's wkv: leave backend empty
selective_scan fused cpu float32     the tensors are on cpu: leave backend empty
attention fused cuda float32         flash-attn takes bfloat16, float16, got float32
kda fused cuda float32               flash-linear-attention takes bfloat16, float16, got float32
causal_conv1d fused cuda float64     causal-conv1d takes float32, bfloat16, float16, got float64
"""


@pytest.mark.parametrize("given, words", table(REFUSED))
def test_a_backend_that_cannot_run_is_refused_in_a_line(given, words):
    op, backend, device, dtype = given.split()
    with pytest.raises((ValueError, RuntimeError), match=rf"^{op}: [^\n]*{words}[^\n]*$"):
        choose.choose(op, backend, device, getattr(torch, dtype, None))


def test_the_plain_implementation_runs_inside_a_compiled_model():
    """An implementation that loops over time breaks the graph."""
    torch._dynamo.reset()
    row = OPERATORS["wkv4"]
    twice = lambda a: row.run("torch", **a)["y"] * 2
    a = row.draw(5)
    torch.testing.assert_close(torch.compile(twice, backend="eager")(a), twice(a), rtol=1e-12, atol=1e-12)
