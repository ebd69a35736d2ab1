"""Our operators with backend="fused" run other libraries' kernels and agree with float64 loops, gradients included.

    make test-fused                         # on a CPU: flash-linear-attention's kernels in Triton's interpreter
    python -m pytest tests/test_fused.py    # on a GPU: the same in bfloat16, and mamba-ssm, causal-conv1d, flash-attn

The interpreter gets float16 inputs, because it computes with bfloat16 as if it were an integer.
"""

import builtins
import functools
import os
import sys

import pytest
import torch
from conftest import LIBRARIES
from operators import OPERATORS, bare, distance, double, graded, timed

import families  # noqa: F401
from inspection.self_check import self_check
from kernels import build, fused
from model import LM, ModelConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = 2e-3 * torch.finfo(DTYPE).eps / torch.finfo(torch.float16).eps
LENGTHS = pytest.mark.parametrize("T", (70, 101))

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="no GPU here, and no interpreter: make test-fused runs these kernels on a CPU")


class Step(int):
    """An index of a kernel's loop, which is a tensor for the compiler but a number for the interpreter."""

    def to(self, dtype):
        return self


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """Lets the interpreter run fla's kernels on this CPU. On a GPU, lets the libraries be imported."""
    with pytest.MonkeyPatch.context() as patch:
        if not INTERPRETED:
            for library in LIBRARIES:
                patch.delitem(sys.modules, library, raising=False)
            fused.missing.cache_clear()
            yield
            return
        patch.setattr(fused, "GPU", "cpu")
        patch.setattr(build, "say_once", lambda line: None)
        for op in fused.BY_DEFAULT:
            assert fused.missing(op) is None
        from triton import language
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.interpreter import InterpreterBuilder

        configs, dot = Autotuner.prune_configs, InterpreterBuilder.create_dot
        patch.setattr(Autotuner, "prune_configs", lambda *args: configs(*args)[:1])  # there is nothing to time

        def widened_dot(self, a, b, *rest):
            widen = lambda x: self.cast_impl(x, language.float32) if x.dtype.scalar == language.bfloat16 else x
            return dot(self, widen(a), widen(b), *rest)

        patch.setattr(InterpreterBuilder, "create_dot", widened_dot)  # Mesa's states are bfloat16
        for name, module in list(sys.modules.items()):
            if name.startswith("fla.ops."):
                patch.setattr(module, "range", lambda *bounds: map(Step, builtins.range(*bounds)), raising=False)
        yield


def needs(op):
    """Skip a test if the library of `op` cannot run; in Triton's interpreter all of fla's kernels must run."""
    if not INTERPRETED and fused.missing(op):
        pytest.skip(fused.missing(op))


def beyond(fast, slow, a, half, tolerance=TOLERANCE):
    """{name: error} of outputs and gradients beyond the tolerance. Errors are relative to the norm of the loop's result
    in float64 on the same inputs. half: the arguments in 16 bits."""
    given = {n: v.to(DEVICE, DTYPE if n in half else torch.float32) for n, v in a.items()}
    got = graded(fast, given)
    true = graded(slow, double(given))
    errors = {n: distance(got[n], true[n]) for n in true}
    return {n: error for n, error in errors.items() if not error <= tolerance}


@LENGTHS
@pytest.mark.parametrize("state", (True, False))
@pytest.mark.parametrize("name", [name for name, row in OPERATORS.items() if row.op in fused.BY_DEFAULT])
def test_flash_linear_attention_computes_the_recurrence(name, state, T):
    row = OPERATORS[name]
    needs(row.op)
    a = {n: v.to(DTYPE) for n, v in row.draw(T, B=1, H=2, K=16, V=16).items()}
    half = ("q", "k", "v", "beta")
    tolerance = TOLERANCE * (4 if name == "mesa" else 1)
    assert not beyond(functools.partial(row.run, "fused"), row.true, a if state else bare(row, a), half, tolerance)


@pytest.mark.parametrize("family", ("gla", "retnet", "rwkv", "mamba2", "deltanet", "gated_deltanet", "kda", "mesa"))
def test_a_model_starts_on_these_kernels(family):
    torch.manual_seed(0)
    lm = LM(ModelConfig(pattern=family, n_layer=1, n_head=2, n_embd=32, vocab_size=64, mlp_multiple=16)).to(DEVICE)
    assert f"in {str(DTYPE).removeprefix('torch.')} to " in self_check(lm, DTYPE)


on_gpu = pytest.mark.skipif(INTERPRETED, reason="not written in Triton: needs a GPU")


@on_gpu
@LENGTHS
@pytest.mark.parametrize("name, sizes, how", [
    ("mamba", {"D": 48, "N": 16}, {"keep": False}),
    ("conv", {"D": 48}, {}),
    ("conv", {"D": 48}, {"silu": False}),
    ("attention", {"K": 16, "past": 0}, {}),
    ("window", {"K": 16, "past": 0}, {})], ids=str)
def test_the_other_libraries_compute_their_operators(name, sizes, how, T):
    row = OPERATORS[name]
    needs(row.op)
    a = {n: v for n, v in row.draw(T, **sizes).items() if n not in row.states}
    run = lambda **a: {"y": row.run(**a, **how, backend="fused")["y"]}
    true = lambda keep=False, **a: {"y": row.true(**a)["y"]}
    assert not beyond(run, functools.partial(true, **how), a, timed(row, a))
