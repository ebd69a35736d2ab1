"""Every key, type and mistake of configurator.py, and the limits of every program's settings.

    python -m pytest tests/test_configurator.py
"""

import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import helpers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configurator
from common import errors
from common.errors import ConfigError
from configurator import load
from data.tokens.prepare import Options
from evaluate import EvaluateConfig
from sample import SampleConfig
from train import TrainConfig

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
    FIRST = ("out_dir", "n_layer")
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
            raise ValueError(f"n_layer {self.n_layer} is below 1:\nchoose a positive number")  # not a field's help


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("config")

    def write(text, name="x"):
        Path(f"config/{name}.py").write_text(text)
        return f"config/{name}.py"
    return write


# An argument, and the value that its key gets.
VALUES = """
--n_layer=5_000              5000
--n_layer=1e6                1000000
--n_layer=2.0                2
--n_layer 5                  5
--compile no                 False
--n_layer=9e12               9000000000000
--dropout=0                  0.0
--dropout=1e-3               0.001
--dropout=-.5                -0.5
--dropout=0.1234567890123456  0.1234567890123456
--compile                    True
--compile=No                 False
--compile=1                  True
--compile=0                  False
--compile=yes                True
--out_dir=a=b                'a=b'
--out_dir=                   ''
--out_dir=none               'none'
--out_dir=__import__('os')   "__import__('os')"
--out_dir=x.py               'x.py'
--out_dir=~/a                '/home/a'
--name=3                     '3'
--model=llama                'llama'
--act=relu                   'relu'
"""


@pytest.mark.parametrize("argument, expected", helpers.table(VALUES))
def test_a_value_on_the_command_line_gets_the_type_of_its_key(monkeypatch, argument, expected):
    monkeypatch.setenv("HOME", "/home")
    assert repr(getattr(load(Config, argument.split()), re.split("[= ]", argument[2:])[0])) == expected


# An argument or the text of a config file, and how the refusal begins, with {} for the name of the file.
MISTAKES = """
--learning_rte=3             unknown key '--learning_rte': did you mean '--learning_rate'?
--batch_size=3               unknown key '--batch_size': type --batch_tokens=3
--RENAMED=3                  unknown key '--RENAMED'; --help lists all keys
--qqq=3                      unknown key '--qqq'; --help lists all keys
--                           unknown key '--'; --help lists all keys
../config/longhrn.py         ../config/longhrn.py: No such file or directory
--n_layer                    --n_layer needs a value: --n_layer=12
--n_layer=2.5                --n_layer=2.5: expected a whole number (int)
--n_layer=1e16               --n_layer=1e16: expected a whole number (int)
--dropout=nan                --dropout=nan: expected a finite number (float)
--compile=maybe              --compile=maybe: expected true or false (bool)
--model=lama                 --model=lama: expected one of longhorn, llama: did you mean 'llama'?
--n_layer=0                  n_layer 0 is below 1: choose a positive number
config/longhorn_120m         unexpected argument 'config/longhorn_120m': did you mean 'config/longhorn_120m.py'?
longhron_120m.py             longhron_120m.py: No such file or directory: did you mean 'config/longhorn_120m.py'?
batch
             unexpected argument 'batch': give config files (*.py) and --key=value; --help lists all keys
config/longhron_120m.py      config/longhron_120m.py: No such file or directory: did you mean 'config/longhorn_120m.py'?
no/such.py                   no/such.py: No such file or directory
config/pipe.py               config/pipe.py: not a regular file
n_layer=4                    unexpected argument 'n_layer=4': did you mean '--n_layer'?
learning_rte = 3             {}: unknown key 'learning_rte': did you mean 'learning_rate'?
batch_size = 3               {}: unknown key 'batch_size': type batch_tokens = 3
qqq = 3
             {}: unknown key 'qqq'; unknown key '--a'; --help lists all keys
n_layer = True               {}: n_layer = True: expected a whole number (int)
dropout = '0.1'              {}: dropout = '0.1': expected a finite number (float)
compile = 1                  {}: compile = 1: expected true or false (bool)
out_dir = 3                  {}: out_dir = 3: expected a string of UTF-8 (str)
model = ['llama']            {}: model = ['llama']: expected one of longhorn, llama
import math as n_layer       {}: n_layer = <module 'math'
raise SystemExit(0)          {}:1: SystemExit: 0
task = 'sounds'              {}: unknown key 'task'
"""
MORE_MISTAKES = [
    ("--out_dir=\udcff", "--out_dir=\udcff: expected a string of UTF-8"),  # as Python reads the byte ff
    (f"{'x' * 256}.py", f"{'x' * 256}.py: File name too long"),
    ("dropout = 10**400", f"{{}}: dropout = 1{'0' * 79}: expected a finite number (float)"),
    ("n_layer = 3\ndropout = (", "{}:2: '(' was never closed"),
    ("\nn_layer = 1 // 0", "{}:2: ZeroDivisionError: "),
    ("def f():\n    return nothing\n\nn_layer = f()", "{}:2: NameError: name 'nothing' is not defined"),
    ("raise ValueError('two\\nlines')", "{}:1: ValueError: two lines"),
    ("x = 10 ** 5000", "config/x.py: a value cannot be shown (Exceeds the limit (4300 digits)"),
    ("n_layer = 3\ninclude('wrong.py')", "config/wrong.py:1: ZeroDivisionError: division by zero"),
    ("n_layer = 3\ninclude('wrog.py')", "config/wrog.py: No such file or directory: did you mean 'config/wrong.py'?"),
    ("task = 'images'\npatch = 7", "{} has task = 'images': python classify.py {} '--a=b c'")]


@pytest.mark.parametrize("given, expected", [*helpers.table(MISTAKES), *MORE_MISTAKES])
def test_mistakes_get_one_line(file, monkeypatch, given, expected):
    monkeypatch.setattr(Config, "PROGRAMS", {"images": "classify.py"}, raising=False)
    file("", "longhorn_120m"), file("n_layer = 1 / 0", "wrong"), os.symlink(os.devnull, "config/pipe.py")
    argv = [file(given), "--a=b c"] if " " in given else [given]
    with pytest.raises(ConfigError) as info:
        load(Config, argv)
    line = str(info.value)
    assert "\n" not in line and len(line) < 600 and line.startswith(expected.replace("{}", argv[0])), line


SHAKESPEARE = """out_dir = 'out-shakespeare-char'
eval_interval = 250 # keep frequent because we'll overfit
eval_iters = 200
log_interval = 10 # don't print too too often
always_save_checkpoint = False
wandb_log = False # override via command line if you like
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256 # context of up to 256 previous characters
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3 # with baby networks can afford to go a bit higher
max_iters = 5000
lr_decay_iters = 5000 # make equal to max_iters usually
min_lr = 1e-4 # learning_rate / 10 usually
beta2 = 0.99 # make a bit bigger because number of tokens per iter is small
warmup_iters = 100 # not super necessary potentially
"""  # nanoGPT's config/train_shakespeare_char.py


def answers(config_class, argv):
    """The line for each key that is unknown or has a wrong value."""
    with pytest.raises(ConfigError) as caught:
        load(config_class, argv)
    return re.split("; (?=unknown|--[^h])", str(caught.value))


def test_a_config_of_nanogpt_is_answered_with_what_to_type_for_every_key(file):
    path = file(SHAKESPEARE)
    typed = {line.split("'")[1]: line.partition(": type ")[2] for line in answers(TrainConfig, [path])}
    assert typed == {
        "eval_iters": "eval_tokens = 3276800", "gradient_accumulation_steps": "batch_tokens = 16384", "dropout": "",
        "batch_size": "micro_batch_size = 64", "always_save_checkpoint": "", "wandb_log": "", "lr_decay_iters": ""}
    lines = [typed.get(line.split()[0], line) for line in SHAKESPEARE.splitlines()]
    config = load(TrainConfig, [file("\n".join(lines))])
    assert (config.batch_tokens, config.wandb_run_name, config.min_lr) == (16384, "mini-gpt", 1e-4)


# A setting as another program spells it, and words of our answer.
ABROAD = """
train.py --init_from=resume   type --resume=must
train.py --init_from=scratch  leave it out
train.py --init_from=gpt2-xl  export.py
train.py --lr=3e-4            type --learning_rate=3e-4
train.py --epochs=3           max_iters = epochs x
train.py --start=Once         sample.py's --prompt
train.py --bias=True          has no counterpart
train.py --decay_lr=False     type --schedule=constant
train.py --wandb_log=True     type --wandb=online
train.py --backend=nccl       leave it out
train.py --dtype=float16      type --dtype=bfloat16
train.py --num_steps=9        type --max_iters=9
train.py --d_model=64         type --n_embd=64
train.py --config=longhorn_laptop   give the config file alone
train.py --warmup_ratio=1%    give warmup_iters = warmup_ratio x max_iters
train.py --total_batch_size=9  type --batch_tokens=9
train.py --matrix_lr=0.02     has no counterpart
train.py --do_train           leave it out
train.py --optim=adamw_torch  type --optimizer=adamw
train.py --resume             type --resume=must
train.py --resume=results/h200   type --resume=must --out_dir=RUN
train.py --wandb=true         type --wandb=online
train.py --precision=bf16-mixed   type --dtype=bfloat16
train.py --train.max_tokens=9   give max_iters = tokens / batch_tokens
train.py --train.micro_batch_size=2   type --micro_batch_size=2
sample.py --start=Once        type --prompt=Once
sample.py --start=FILE:a.txt  give --prompt=@ and the file's name
sample.py --init_from=gpt2    export.py
sample.py --dtype=float16     has no counterpart
evaluate.py --ckpt=out/a      type --out_dir=out/a
prepare.py --input=a.txt      type --files=a.txt
"""


# A config file of nanoGPT, and words of our answer.
FILES = """
config/train_gpt2.py             type config/llama_120m.py
config/train_gpt2                type config/llama_120m.py
config/finetune_shakespeare.py   type --init_from=RUN
config/eval_gpt2_xl.py           type --init_from=RUN --eval_only
"""


@pytest.mark.parametrize("path, words", helpers.table(FILES))
def test_a_config_file_of_nanogpt_is_answered_with_what_to_type(path, words):
    assert words in answers(TrainConfig, [path])[0]


def test_old_names_are_answered_all_at_once():
    programs = {"train.py": TrainConfig, "sample.py": SampleConfig, "evaluate.py": EvaluateConfig,
                "prepare.py": Options}
    for program, config_class in programs.items():
        rows = [(given.split()[1], words) for given, words in helpers.table(ABROAD) if given.startswith(program)]
        lines = answers(config_class, [argument for argument, _ in rows])
        assert all(words in line for (_, words), line in zip(rows, lines, strict=True)), lines
        for name, row in config_class.RENAMED.items():
            key = str(row).partition("=")[0]
            assert " " in str(row) or key in configurator.settings(config_class), f"{name}: {row}"
    assert load(TrainConfig, ["--backend=cpu", "--init_from=."]).init_from == "."  # a folder may have any name


def test_only_a_key_with_a_similar_spelling_is_guessed():
    unlike = "--max_good_steps=3 --eval_batch_size=4 --keep=3 --loss=4 --beta3=4".split()
    assert not any("did you mean" in line for line in answers(TrainConfig, unlike))
    assert "did you mean '--weight_decay'?" in answers(TrainConfig, ["--weight-decy=1"])[0]


def test_later_values_win_and_files_see_the_values_so_far(file):
    a = file("batch_tokens = block_size * 64\ncompile = True  # shadows nothing that we need\ntop_k = 0\n", "a")
    b = file("import math\nfrom math import sqrt\n_helper = 2\ndef double(n): return 2 * n\n"
             "n_layer = double(n_layer) + _helper\nlearning_rate = 0\ndropout = 1e-1\nblock_size = 2e5", "b")
    c = load(Config, ["--block_size=128", "--n_layer=3", a, b, "--dropout=0.5", "--name=z"])
    expected = dict(block_size=200_000, n_layer=8, batch_tokens=8192, compile=True, top_k=0, learning_rate=0.0,
                    dropout=0.5, name="z")
    assert c.overrides == expected and c.config_files == [a, b] and "overrides" not in dataclasses.asdict(c)
    for key, value_ in expected.items():
        assert getattr(c, key) == value_ and type(getattr(c, key)) is type(value_)
    with pytest.raises(ConfigError):
        load(Config, ["--n_layer=3", "--n_layer=x"])
    file("block_size = n_layer * 64\nn_layer = 3\n", "base")  # an included file sees the values so far
    includes = file('n_layer = 5\ninclude("base.py")\nbatch_tokens = block_size * 4\n')
    assert load(Config, ["--n_layer=2", includes, "--dropout=0"]).overrides == {
        "n_layer": 3, "block_size": 320, "batch_tokens": 1280, "dropout": 0.0}
    assert load(Config, ["--n-layer=3"]).n_layer == 3
    assert load(Config, []) == Config()  # the class has not changed


def test_a_key_set_to_its_default_is_an_override_and_one_in_a_branch_not_taken_is_not(file):
    assert load(Config, [file("n_layer = 12\nif False: dropout = 0.5")]).overrides == {"n_layer": 12}
    assert load(Config, [file("def f():\n    global n_layer\n    n_layer = 3\nf()")]).overrides == {"n_layer": 3}


def test_help_names_every_key_with_type_value_and_meaning(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as info:
        load(Config, ["--n_layer=x", file("n_layer = 7"), "--help"], "train.py")
    out = capsys.readouterr().out
    assert info.value.code == 0 and max(map(len, out.splitlines())) <= 100
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}
    assert out.startswith("usage: train.py [config.py ...] [--key=value ...]\n")
    assert lines["--n_layer"] == "int 7 layers"  # the file's value, the base class's help
    assert lines["--learning_rate"] == "float 0.0006 peak # of the cosine"
    assert lines["--out_dir"] == "str out/a#b records go here"
    assert lines["--model"] == "choice longhorn the family (one of longhorn, llama)"
    assert lines["--act"] == "choice silu (one of relu, silu)" and lines["--top_k"] == "int 200 0 for all"
    rows = ["first:", "--out_dir", "--n_layer", "\nmodel:", "--model", "training:", "--learning_rate", "--top_k"]
    assert sorted(rows, key=out.index) == rows
    assert {f"--{f.name}" for f in dataclasses.fields(Config)} <= set(lines)


# A command, and words of the one line that answers it.
REFUSED = """
train.py --micro_batch_size=0                    micro_batch_size 0 must be at least 1
train.py --block_size=0                          block_size 0 must be at least 1
train.py --eval_interval=-1                      eval_interval -1 must be at least 0
train.py --seed=4294967296                       seed 4294967296 must be at most 4,294,967,295
train.py --timeout_minutes=0                     timeout_minutes 0.0 must be above 0
train.py --timeout_minutes=1e7                   timeout_minutes 10000000.0 must be at most 1,000,000
train.py --learning_rate=0                       learning_rate 0.0 must be above 0
train.py --learning_rate=nan                     learning_rate=nan: expected a finite number
train.py --min_lr=-0.5                           min_lr -0.5 must be at least 0, or -1.0, its default
train.py --warmup_iters=-2                       warmup_iters -2 must be at least 0, or -1, its default
train.py --beta1=1                               beta1 1.0 must be below 1
train.py --beta2=-0.1                            beta2 -0.1 must be at least 0
train.py --dry-run                               unknown key '--dry_run': python experiments/sweep.py paper longhorn
train.py --file=train_gpt2                       unknown key '--file'; --help
train.py --batch_size=8    type --micro_batch_size=8 and, for one micro-batch per step, type --batch_tokens=8192
train.py --batch_size=8 --global_batch_size=16   micro_batch_size=8; unknown key '--global_batch_size': type --batch
train.py --final_lr_frac=1 --learning_rate=6e-4  unknown key '--final_lr_frac': type --min_lr=0.0006
train.py --warmup_ratio=.05 --steps=4800         unknown key '--warmup_ratio': type --warmup_iters=240
experiments/vision/classify.py --batch_size=8 --x=1   type --micro_batch_size=8; unknown key '--x'
train.py --keep_steps=3,x                        keep_steps 3,x: expected comma-separated step numbers
train.py --min_lr=1                              min_lr 1.0 is above learning_rate 0.0006
train.py --warmup_iters=9 --max_iters=9          warmup_iters 9 must be below max_iters 9
train.py --schedule=wsd --warmup_iters=4 --decay_iters=9 --max_iters=12   warmup of 4 and decay of 9 steps
train.py --branch=a@4 --init_from=b              init_from=b and branch=a@4: give one
train.py --device=gpu                            device 'gpu' is unknown or missing
train.py --n_embd=1e15                           n_embd 1000000000000000 must be at most 281,474,976,710,656
train.py --grad_clip=-1                          grad_clip -1.0 must be at least 0
sample.py --temperature=-1                       temperature -1.0 must be at least 0
sample.py --temprature=1                         unknown key '--temprature': did you mean '--temperature'?
sample.py --device=meta                          device 'meta' is unknown or missing
sample.py --device=cpu:x                         device 'cpu:x' is unknown or missing
sample.py --device=                              device '' is unknown or missing
sample.py --out_dir=none                         none/checkpoint.safetensors: No such file or directory: no checkpoint
sample.py none                                   none/checkpoint.safetensors: No such file or directory: no checkpoint
sample.py -p hello                               unexpected argument '-p'
sample.py --top_p=0                              top_p 0.0 must be above 0
sample.py --top_p=1.5                            top_p 1.5 must be at most 1
sample.py --max_new_tokens=0                     max_new_tokens 0 must be at least 1
evaluate.py                                      give the out_dir: the run's folder
evaluate.py a --include=none                     include none: there is no such folder
evaluate.py a --limit=-1                         limit -1 must be at least 0
evaluate.py a --batch_tokens=0                   batch_tokens 0 must be at least 1
export.py --dtype=float8                         expected one of float32, bfloat16, float16
export.py --out_dir=a                            give --out_dir and either --to
export.py --out_dir=a --to=a --from_hf=b         give --out_dir and either --to
export.py --to=a                                 give --out_dir and either --to
export.py --check=b --to=a --out_dir=c           or --check, to verify an exported folder
export.py --check=b                              b/config.json
export.py --out_dir=none --to=a                  none/checkpoint.safetensors: No such file or directory: no checkpoint
export.py --out_dir=a --to=b --tokenizer=gpt2    --tokenizer works with --from_hf only
export.py --out_dir=a --from_hf=b --dtype=bfloat16   --dtype with --to only
export.py --out_dir=a --from_hf=b/c              hf download b/c --local-dir
data/prepared.py                                 give the folder: holds train.bin, val.bin and meta.json
data/prepared.py a b                             unexpected argument 'b'
data/adopt.py a                                  there is no folder a
data/adopt.py a --vocab_size 0                   vocab_size 0 must be at least 1
data/adopt.py a --bytes_per_token=nan            bytes_per_token=nan: expected a finite number
data/adopt.py a --bytes_per_token=0              bytes_per_token 0.0 must be above 0
data/pystdlib/prepare.py --val_fraction=1        val_fraction 1.0 must be below 1
data/pystdlib/prepare.py --documents=page        expected one of file, package
data/shakespeare_char/prepare.py --fil=a         unknown key '--fil': did you mean '--file'?
data/shakespeare_char/prepare.py --file          --file needs a value
data/tokens/prepare.py --val_fraction=0          val_fraction 0.0 must be above 0
data/tokens/prepare.py --val_frac=0.1            type --val_fraction=0.1
data/tokens/prepare.py --shuffle -1              shuffle -1 must be at least 0
data/tokens/prepare.py --workers=0               workers 0 must be at least 1
data/tokens/prepare.py --files --force           --files needs a value
data/openwebtext/prepare.py c4                   unexpected argument 'c4'
data/tokens/cluster.py --tasks=0                 tasks 0 must be at least 1
data/tokens/cluster.py --workers=0               workers 0 must be at least 1
data/tokens/cluster.py --cluster=lsf             expected one of slurm, ray
bench/scan.py --rounds=0                         rounds 0 must be at least 1
bench/scan.py --threads=1000000                  threads 1000000 must be at most
bench/scan.py --dtype=float64                    expected one of float32, bfloat16, float16
bench/scan.py --device=cuda --dry_run --save     a dry run measures nothing
bench/scan.py --without=rnn                      --without=rnn: expected one of longhorn_scan, selective_scan, mamba_ssm
bench/gpu.py --stages=tests,magic                --stages=magic: expected one of correctness, speed, training, build
bench/gpu.py --budget_s=nan                      budget_s=nan: expected a finite number
bench/gpu.py --budget_s=0.5                      budget_s 0.5 must be at least 1
bench/gpu.py --check=never                       never: no such folder
bench/ops.py                                     give the function: what to run, see above
bench/ops.py lost                                function lost: expected one of
bench/step.py --families=llama,rnn               --families=rnn: expected one of all, longhorn, mamba
bench/step.py --size=1B                          expected one of 120M, 350M
bench/generate.py --contexts=1K                  --contexts=1K: expected a whole number
bench/generate.py --contexts=64,0                contexts 0 must be at least 1
bench/generate.py --new-tokens=0                 new_tokens 0 must be at least 1
tools/parameters.py 120M                         unexpected argument '120M'
experiments/duel_simulation.py                   give the record: the file to write
experiments/edit_simulation.py a b               unexpected argument 'b'
experiments/law.py                               give the sweep: a sweep's folder, or the .json
experiments/law_simulation.py                    give the record
experiments/law.py a --draws=0                   draws 0 must be at least 1
experiments/law.py none llama --least=-1         least -1.0 must be above 0
experiments/sweep.py all                         the first argument must be one of duel, laptop,
experiments/sweep.py laptop --seed=3             --seed=3: the sweep sets seed
experiments/sweep.py laptop gla --wandb          unknown key '--wandb'
experiments/sweep.py laptop --learning_rat=1 --dry-run   did you mean '--learning_rate'
experiments/sweep.py report nowhere              no sweep
experiments/sweep.py laptop --nproc=0            nproc 0 must be at least 1
experiments/sweep.py laptop --budgets=0          budgets 0 must be at least 1
experiments/sweep.py laptop --budgets=28.5       --budgets=28.5: expected a whole number
experiments/sweep.py laptop --jobs=-1            jobs -1 must be at least 0
experiments/sweep.py laptop --cluster=pbs        slurm, ray or ray:HOST:PORT
experiments/sweep.py laptop --cluster_args=partition=gpu   slurm, ray
experiments/sweep.py laptop --cluster=slurm --cluster_args=gpu   key=value
experiments/recall/mqar.py report --x=1          unknown key '--x'
experiments/recall/mqar.py report                give the folder: the sweep's folder
experiments/extrapolation.py run --preset=phone  expected one of laptop, steps, gpu
experiments/vision/sweep.py run --config=imagenet   expected one of digits, cifar, tiny
experiments/edit.py --minutes=nan                --minutes=nan: expected a finite number
experiments/objectives.py --seed=-1              seed -1 must be at least 0
experiments/objectives.py --add=none.py          none.py: No such file or directory
experiments/objectives.py --out=a.png            --out=a.png: name a .json file
experiments/recall/cell.py --epochs=0            epochs 0 must be at least 1
experiments/recall/cell.py --max_iters=-1        max_iters -1 must be at least 0
experiments/vision/classify.py --drop_path=1     drop_path 1.0 must be at most 0.99
experiments/vision/classify.py --eval_crop=0     eval_crop 0.0 must be at least 0.01
experiments/vision/classify.py --repeats=0       repeats 0 must be at least 1
"""


@pytest.mark.parametrize("command, words", helpers.table(REFUSED))
def test_a_setting_that_a_program_cannot_take_is_refused_in_one_line(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, *argv = command.split()
    helpers.refused(helpers.run(argv, program=program), words)
    assert not os.listdir(tmp_path)


def python(code, errors="", **how):
    """(exit code, standard error) of a process that runs `code` inside main_error."""
    code = f"import sys\nfrom common import errors\nwith errors.main_error('p'{errors}): {code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, **{"stderr": subprocess.PIPE, **how})
    return done.returncode, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_main_error_exits_with_2_even_where_it_cannot_print(unbuffered):
    with open("/dev/full", "w") as full:
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        assert python("raise errors.ConfigError('no')", stderr=full, env=env)[0] == 2
    bar = "__import__('tqdm').tqdm(total=1, disable=None).close(); raise errors.ConfigError('no')"
    assert python(bar, stderr=None, preexec_fn=lambda: os.close(2))[0] == 2  # standard error is closed


@pytest.mark.parametrize("error, words", [
    (PermissionError(13, "Permission denied", "a/b"), "a/b: Permission denied: check this path"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "out of memory ("),
    (MemoryError(), "choose smaller sizes"), (OverflowError("int too large"), "a number is too large (int too large)"),
    (RuntimeError("Storage size calculation overflowed"), "a number is too large"),
    (RuntimeError("Symlink loop from 'a'"), "Symlink loop from 'a'"), (KeyError("a\nb"), "p: error: 'a")])
def test_an_error_that_a_user_can_fix_is_one_line(error, words, capsys):
    with pytest.raises(SystemExit, match="2"), errors.main_error("p", KeyError):
        raise error
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("not ours"),
                                   BrokenPipeError(32, "of a worker, not of our reader")], ids=repr)
def test_a_mistake_in_the_code_keeps_its_traceback(error):
    with pytest.raises(type(error)), errors.main_error("p", KeyError):
        raise error


def test_ctrl_c_prints_one_line():
    assert python("raise KeyboardInterrupt") == (130, "p: interrupted\n")


def test_output_is_escaped_where_it_is_not_utf8(capfd):
    said = python("print('\u00b1'); raise OSError('no \u00b1')", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert said == (2, "p: error: no \\xb1\n") and capfd.readouterr().out == "\\xb1\n"


@pytest.mark.parametrize("more, unbuffered", [("", ""), (", OSError", ""), ("", "1")])
def test_a_closed_pipe_prints_no_traceback(more, unbuffered):
    def after(text):
        reads, writes = os.pipe()
        os.close(reads)
        with open(writes, "wb") as nobody:
            return python(text, more, stdout=nobody, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})

    assert after("[print('a line') for i in range(100_000)]") == (130, "")
    assert after("print('a line')") == (130 if unbuffered else 0, "")  # noticed only after all is done
    if not unbuffered:
        assert after("print('a line'); sys.exit(3)") == (3, "")
        assert after("print('a line'); raise errors.ConfigError('no')") == (2, "p: error: no\n")


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


PROGRAMS = sorted({command.split()[0] for command, _ in helpers.table(REFUSED)})
HELP = """
import os, runpy, sys
import matplotlib.pyplot, numpy, pandas, scipy.optimize, scipy.stats, torch  # once, for all
root, *programs = sys.argv[1:]
for program in programs:
    if child := os.fork():
        print(os.waitpid(child, 0)[1], program)
        continue
    sys.stdout, sys.argv = open(os.devnull, "w"), [program, "--help"]
    try:
        if program.startswith("-m "):
            sys.path[0] = root
            runpy.run_module(program[3:], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(program)
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        os._exit(end.code or 0)
    except BaseException as error:
        print(program, error, file=sys.stderr)
    os._exit(1)
"""


@pytest.mark.parametrize("given, kept", [({}, ["3000", "1", None]), ({"GOMP_SPINCOUNT": "7"}, ["7", None, None]),
                                         ({"OMP_WAIT_POLICY": "active"}, [None, None, "active"])])
def test_threads_do_not_spin_for_long_unless_the_environment_says_so(given, kept):
    """Programs import common.start before PyTorch, whose thread library then reads the environment."""
    names = "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"
    code = f"import os, sys, common.start; print([os.environ.get(name) for name in {names}], 'torch' in sys.modules)"
    environment = {key: text for key, text in os.environ.items() if key not in names}
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env={**environment, **given}, text=True)
    assert said == f"{kept} False\n"


def test_programs_print_help_as_files_from_anywhere_and_as_modules(tmp_path):
    """The interpreter puts the file's folder on sys.path, or for a module the current folder."""
    programs = [*(f"{ROOT}/{program}" for program in PROGRAMS), "-m experiments.objectives"]
    command = [sys.executable, "-c", HELP, ROOT, *programs]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"0 {program}" for program in programs], done.stderr
