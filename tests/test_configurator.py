"""Every key, type and mistake of configurator.py. `pytest tests/test_configurator.py`"""
import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configurator
from configurator import load
from runtime import errors
from runtime.errors import ConfigError

ROOT = os.path.dirname(os.path.abspath(configurator.__file__))


@dataclass
class Base:
    # --- model
    model: Literal["longhorn", "llama"] = "longhorn"  # the family
    n_layer: int = 6  # layers
    block_size: int = 256  # context length in tokens
    dropout: float = 0.1  # fraction zeroed


@dataclass
class Config(Base):
    RENAMED = {"batch_size": "batch_tokens"}
    n_layer: int = 12
    # --- training
    learning_rate: float = 6e-4  # peak # of the cosine
    batch_tokens: int = 16384
    compile: bool = False  # use torch.compile
    out_dir: str = "out/a#b"  # records go here
    name: str = ""  # the run's name
    top_k: int = 200  # 0 for all
    act: Literal["relu", "silu"] = "silu"

    def __post_init__(self):
        if self.n_layer < 1:
            raise ValueError(f"n_layer {self.n_layer} is below 1:\nchoose a positive number")  # no help of a field's


def message(*argv):
    with pytest.raises(ConfigError) as info:
        load(Config, list(argv))
    assert "\n" not in str(info.value) and len(str(info.value)) < 300
    return str(info.value)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("config")

    def write(text, name="x"):
        Path(f"config/{name}.py").write_text(text)
        return f"config/{name}.py"
    return write


@pytest.mark.parametrize("argument, key, expected", [
    ("--n_layer=5_000", "n_layer", 5000), ("--n_layer=1e6", "n_layer", 10**6), ("--n_layer=2.0", "n_layer", 2),
    ("--dropout=0", "dropout", 0.0), ("--dropout=1e-3", "dropout", 1e-3), ("--dropout=-.5", "dropout", -0.5),
    ("--compile", "compile", True), ("--compile=No", "compile", False), ("--compile=1", "compile", True),
    ("--out_dir=a=b", "out_dir", "a=b"), ("--out_dir=", "out_dir", ""), ("--out_dir=none", "out_dir", "none"),
    ("--out_dir=__import__('os')", "out_dir", "__import__('os')"), ("--out_dir=x.py", "out_dir", "x.py"),
    ("--name=3", "name", "3"), ("--model=llama", "model", "llama"), ("--act=relu", "act", "relu")])
def test_command_line_value(argument, key, expected):
    value = getattr(load(Config, [argument]), key)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize("argument, expected", [
    ("--learning_rte=3", "unknown key '--learning_rte': did you mean '--learning_rate'? --help lists all keys"),
    ("--learning-rate=3", "unknown key '--learning-rate': did you mean '--learning_rate'? --help lists all keys"),
    ("--batch_size=3", "unknown key '--batch_size': it is now '--batch_tokens'"),
    ("--RENAMED=3", "unknown key '--RENAMED': did you mean '--name'? --help lists all keys"),
    ("--qqq=3", "unknown key '--qqq'; --help lists all keys"),
    ("--", "unknown key '--'; --help lists all keys"),
    ("--n_layer", "--n_layer needs a value, joined by '=': --n_layer=12"),
    ("--n_layer=2.5", "--n_layer=2.5: expected a whole number (int)"),
    ("--n_layer=1e17", "--n_layer=1e17: expected a whole number (int)"),
    ("--dropout=nan", "--dropout=nan: expected a finite number (float)"),
    ("--compile=maybe", "--compile=maybe: expected true or false (bool)"),
    ("--model=lama", "--model=lama: expected one of longhorn, llama: did you mean 'llama'?"),
    ("--n_layer=0", "n_layer 0 is below 1: choose a positive number"),
    ("batch", "unexpected argument 'batch': give config files (*.py) and --key=value; --help lists all keys")])
def test_command_line_mistake(argument, expected):
    assert message(argument) == expected


@pytest.mark.parametrize("text, expected", [
    ("learning_rte = 3",
     "config/x.py: unknown key 'learning_rte': did you mean 'learning_rate'? --help lists all keys"),
    ("batch_size = 3", "config/x.py: unknown key 'batch_size': it is now 'batch_tokens'"),
    ("qqq = 3", "config/x.py: unknown key 'qqq'; --help lists all keys; a helper's name starts with _"),
    ("n_layer = True", "config/x.py: n_layer = True: expected a whole number (int)"),
    ("dropout = '0.1'", "config/x.py: dropout = '0.1': expected a finite number (float)"),
    ("dropout = 10**400", f"config/x.py: dropout = 1{'0' * 79}: expected a finite number (float)"),
    ("compile = 1", "config/x.py: compile = 1: expected true or false (bool)"),
    ("out_dir = 3", "config/x.py: out_dir = 3: expected a string of UTF-8 (str)"),
    ("model = ['llama']", "config/x.py: model = ['llama']: expected one of longhorn, llama"),
    ("import math as n_layer", "config/x.py: n_layer = <module 'math'"),
    ("n_layer = 3\ndropout = (", "config/x.py:2: '(' was never closed"),
    ("\nn_layer = 1 // 0", "config/x.py:2: ZeroDivisionError: "),
    ("def f():\n    return nothing\n\nn_layer = f()", "config/x.py:2: NameError: name 'nothing' is not defined"),
    ("raise ValueError('two\\nlines')", "config/x.py:1: ValueError: two lines"),
    ("raise SystemExit(0)", "config/x.py:1: SystemExit: 0")])
def test_file_mistake(file, text, expected):
    assert message(file(text)).startswith(expected)


def test_a_file_that_cannot_be_read(file):
    file("", "longhorn_120m")
    os.mkfifo("config/pipe.py")
    for path, words in (
            ("config/longhron_120m.py", "No such file or directory: did you mean 'config/longhorn_120m.py'?"),
            ("no/such.py", "No such file or directory"), ("config/pipe.py", "not a regular file"),
            (f"{'x' * 256}.py", "File name too long")):
        assert message(path).startswith(f"{path}: {words}")


def test_later_wins_and_files_see_the_values_so_far(file):
    a = file("batch_tokens = block_size * 64\ncompile = True  # shadows nothing that we need\ntop_k = 0\n", "a")
    b = file("import math\nfrom math import sqrt\n_helper = 2\ndef double(n): return 2 * n\n"
             "n_layer = double(n_layer) + _helper\nlearning_rate = 0\ndropout = 1e-1\nblock_size = 2e5", "b")
    c = load(Config, ["--block_size=128", "--n_layer=3", a, b, "--dropout=0.5", "--name=z"])
    expected = dict(block_size=200_000, n_layer=8, batch_tokens=8192, compile=True, top_k=0, learning_rate=0.0,
                    dropout=0.5, name="z")
    assert c.overrides == expected and c.config_files == [a, b] and "overrides" not in dataclasses.asdict(c)
    for key, value_ in expected.items():
        assert getattr(c, key) == value_ and type(getattr(c, key)) is type(value_)
    message("--n_layer=3", "--n_layer=x")
    assert load(Config, []) == Config()  # the class is as it was


def test_a_file_includes_another_of_its_folder(file):
    file("n_layer = 3\nblock_size = n_layer * 64\n", "base")
    config = load(Config, ["--n_layer=2", file('include("base.py")\nbatch_tokens = block_size * 4\n'), "--dropout=0"])
    assert config.overrides == {"n_layer": 3, "block_size": 192, "batch_tokens": 768, "dropout": 0.0}
    file("n_layer = 1 / 0\n", "base")
    assert message("config/x.py") == "config/base.py:1: ZeroDivisionError: division by zero"
    assert message(file('include("bas.py")')).endswith("No such file or directory: did you mean 'config/base.py'?")


def test_a_key_set_to_its_default_is_an_override_and_a_branch_not_taken_is_none(file):
    assert load(Config, [file("n_layer = 12\nif False: dropout = 0.5")]).overrides == {"n_layer": 12}
    assert load(Config, [file("def f():\n    global n_layer\n    n_layer = 3\nf()")]).overrides == {"n_layer": 3}


def test_help_has_the_values_of_a_config_file(file, capsys):
    with pytest.raises(SystemExit):
        load(Config, [file("n_layer = 7"), "--help"], "train.py")
    assert re.search(r"--n_layer +int +7 +layers", capsys.readouterr().out)


def test_a_config_file_of_another_program_names_it(file, monkeypatch):
    monkeypatch.setattr(Config, "PROGRAMS", {"images": "classify.py"}, raising=False)
    path = file("task = 'images'\npatch = 7")
    with pytest.raises(ConfigError, match=f"task = 'images': python classify.py {re.escape(str(path))} '--a=b c'"):
        load(Config, [path, "--a=b c"])
    with pytest.raises(ConfigError, match="unknown key 'task'"):
        load(Config, [file("task = 'sounds'", "sounds")])


def test_help_names_every_key_with_type_default_and_meaning(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as info:
        load(Config, ["--n_layer=x", "--help"], "train.py")
    out = capsys.readouterr().out
    assert info.value.code == 0 and max(map(len, out.splitlines())) <= 100
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}
    assert out.startswith("usage: train.py [config.py ...] [--key=value ...]\n")
    assert lines["--n_layer"] == "int 12 layers"  # the new default, the base's meaning
    assert lines["--learning_rate"] == "float 0.0006 peak # of the cosine"
    assert lines["--out_dir"] == "str out/a#b records go here"
    assert lines["--model"] == "choice longhorn the family (one of longhorn, llama)"
    assert lines["--act"] == "choice silu (one of relu, silu)" and lines["--top_k"] == "int 200 0 for all"
    assert out.index("model:") < out.index("--model") < out.index("training:") < out.index("--learning_rate")
    assert {f"--{f.name}" for f in dataclasses.fields(Config)} <= set(lines)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_main_error_ends_with_exit_code_2_even_where_nothing_can_be_said():
    code = "from runtime import errors\nwith errors.main_error('train.py'): raise errors.ConfigError('no')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "train.py: error: no\n")
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=full).returncode == 2


@pytest.mark.parametrize("error, words", [
    (PermissionError(13, "Permission denied", "a/b"), "a/b: Permission denied: check this path"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "out of memory ("),
    (MemoryError(), "choose smaller sizes"), (OverflowError("int too large"), "a number is too large (int too large)"),
    (RuntimeError("Storage size calculation overflowed"), "a number is too large"),
    (RuntimeError("Symlink loop from 'a'"), "Symlink loop from 'a'"), (KeyError("a\nb"), "p: error: 'a")])
def test_what_a_user_can_mend_is_one_line(error, words, capsys):
    with pytest.raises(SystemExit, match="2"), errors.main_error("p", KeyError):
        raise error
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("not ours"),
                                   BrokenPipeError(32, "of a worker, not of our reader")], ids=repr)
def test_a_mistake_in_the_code_keeps_its_traceback(error):
    with pytest.raises(type(error)), errors.main_error("p", KeyError):
        raise error


def test_names_and_output_that_are_not_utf8():
    with pytest.raises(ConfigError, match="--out_dir=.*: expected a string of UTF-8"):
        load(Config, ["--out_dir=\udcff"])  # as Python reads the byte ff
    code = "from runtime import errors\nwith errors.main_error('p'): print('\u00b1'); raise OSError('no \u00b1')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.stdout, done.stderr) == ("\\xb1\n", "p: error: no \\xb1\n")


def with_nobody_reading(*command, **environment):
    """The finished process of a command whose output is a pipe that nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "wb") as nobody:
        return subprocess.run(command, cwd=ROOT, stdout=nobody, stderr=subprocess.PIPE, text=True,
                              env=os.environ | environment)


@pytest.mark.parametrize("more, unbuffered", [("", ""), (", OSError", ""), ("", "1")])
def test_a_reader_that_has_gone_is_no_stack(more, unbuffered):
    def after(text, end=""):
        code = f"import sys\nfrom runtime import errors\nwith errors.main_error('p'{more}): {text}{end}"
        done = with_nobody_reading(sys.executable, "-c", code, PYTHONUNBUFFERED=unbuffered)
        return done.returncode, done.stderr

    assert after("[print('a line') for i in range(100_000)]") == (130, "")
    assert after("print('a line')") == (130 if unbuffered else 0, "")  # seen at the end, when all has been done
    if not unbuffered:
        assert after("print('a line')", "; sys.exit(3)") == (3, "")
        assert after("print('a line')", "; raise errors.ConfigError('no')") == (2, "p: error: no\n")


@pytest.mark.parametrize("script, unbuffered", [
    ("experiments/scaling/sweep.py", ""), ("bench/gpu.py", "1"), ("data/loader.py", ""), ("bench/scan.py", "1")])
def test_scripts_start_and_take_it_that_their_reader_has_gone(script, unbuffered):
    assert with_nobody_reading(sys.executable, script, "--help", PYTHONUNBUFFERED=unbuffered).stderr == ""


@settings(deadline=None)
@given(st.lists(st.one_of(
    st.text(), st.builds("--{}={}".format, st.sampled_from([f.name for f in dataclasses.fields(Config)]), st.text()),
    st.builds("--{}={}".format, st.text(), st.text())), max_size=4))
def test_any_argv_gives_a_config_or_one_line(argv):
    argv = [a for a in argv if a not in ("-h", "--help")]
    try:
        config = load(Config, argv)
    except ConfigError as error:
        assert len(str(error).splitlines()) <= 1
    else:
        assert set(config.overrides) == {a[2:].partition("=")[0] for a in argv}


@settings(deadline=None)
@given(st.integers(1, 10**30), st.floats(allow_nan=False, allow_infinity=False), st.booleans(),
       st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_what_is_written_is_what_is_read(n, x, b, s):
    config = load(Config, [f"--n_layer={n}", f"--dropout={x!r}", f"--compile={b}", f"--out_dir={s}"])
    assert (config.n_layer, config.dropout, config.compile, config.out_dir) == (n, x, b, s)
