"""Random config files, logs and arguments of the scan give one line of error, never a crash.

    python -m pytest tests/test_fuzz.py       make chaos: a thousand examples of each
"""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import configurator
from common import errors
from kernels.scan import longhorn_scan, longhorn_scan_ref
from runtime import records
from train import TrainConfig

ROOT = Path(configurator.__file__).resolve().parent
CHAOS = bool(os.environ.get("LONGHORN_CHAOS"))

few = settings(deadline=None, max_examples=1000 if CHAOS else 40, database=None,
               suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
words = st.one_of(st.text(max_size=20), st.sampled_from(
    ["n_layer", "learning_rate", "x", "_y", "=", "==", "1", "1e999", "-1", "'a'", "True", "(", ")", "[]", "{", ":",
     "\n", "\n ", "import os", "def f(): pass", "del n_layer", "n_layer = n_layer", "raise SystemExit", "1/0", "\0",
     "\\", "#", "\ufeff", "lambda: 0", "global n_layer", "return", "yield", "float('nan')",
     "10**5000", "n_layer = 10**5000", "[0] * 3"]))


@few
@given(st.lists(words, max_size=8).map(" ".join).map(str.encode) | st.binary(max_size=60))
def test_any_config_file_gives_a_config_or_one_line(tmp_path, source):
    (tmp_path / "c.py").write_bytes(source)
    try:
        configurator.load(TrainConfig, [str(tmp_path / "c.py")])
    except errors.ConfigError as error:
        assert str(error) and len(str(error).splitlines()) == 1


lines = st.one_of(
    st.binary(max_size=30), st.text(max_size=20).map(str.encode),
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
                 lambda s: st.lists(s, max_size=3)
                 | st.dictionaries(st.sampled_from(["event", "step", "x"]), s, max_size=3),
                 max_leaves=6).map(lambda x: json.dumps(x).encode()))


@few
@given(st.lists(lines, max_size=5).map(b"\n".join))
def test_any_log_is_read_as_far_as_it_is_one(tmp_path, content):
    (tmp_path / "log.jsonl").write_bytes(content)
    events = records.read_log(tmp_path)
    assert all(isinstance(e["step"], int) for e in events)
    records.read_log(tmp_path, "train")
    records.Log(tmp_path, 5)
    assert [e["step"] for e in records.read_log(tmp_path)] == [e["step"] for e in events if e["step"] <= 5]


VIEWS = {"as is": lambda t: t, "turned": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
         "expanded": lambda t: t[:1].expand_as(t), "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2]}
NUMBERS = (0.0, 1.0, -1.0, 1e30, -1e30, 1e-40, math.inf, -math.inf, math.nan)
KINDS = (*[torch.float32] * 3, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64)
sizes = st.tuples(*[st.integers(0, 5)] * 3)
views = st.sampled_from(list(VIEWS))
shapes = st.one_of(sizes, st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple))
full = lambda shape, dtype, value, view: VIEWS[view](torch.full(shape, value, dtype=torch.float64).to(dtype))
tensors = st.builds(full, shapes, st.sampled_from(KINDS), st.sampled_from(NUMBERS), views)
odd = st.dictionaries(st.sampled_from(["x", "dt", "k", "q", "D", "z", "dt_bias", "h0"]), st.none() | tensors,
                      max_size=2)


@few
@given(sizes, st.integers(0, 4), odd, st.booleans(), views, st.sampled_from(NUMBERS),
       st.none() | st.lists(st.integers(-1, 6), max_size=4))
def test_any_arguments_of_the_scan_give_its_result_or_a_ValueError(shape, N, others, exact, view, value, cuts):
    (B, T, D), view = shape, VIEWS[view]
    g = torch.Generator().manual_seed(0)
    a = {"x": view(torch.randn(B, T, D, generator=g)) * value, "dt": view(torch.randn(B, T, D, generator=g)),
         "k": view(torch.randn(B, T, N, generator=g)), "q": view(torch.randn(B, T, N, generator=g)), **others}
    a["cu_seqlens"] = None if cuts is None else torch.tensor(cuts, dtype=torch.int64)
    try:
        y, hT = longhorn_scan(**a, return_state=True, exact=exact)
    except ValueError as error:
        assert str(error).startswith("scan: ")
        with pytest.raises(ValueError):
            longhorn_scan_ref(**a, return_state=True, exact=exact)
        return
    assert y.shape == a["x"].shape and hT.dtype in (torch.float32, torch.float64)
    usual = lambda t: t.isfinite().all() and t.abs().max() < 1e3 and t.dtype == torch.float32
    if all(t is None or not t.is_floating_point() or usual(t) for t in a.values()):
        torch.testing.assert_close(y, longhorn_scan_ref(**a, exact=exact), rtol=1e-4, atol=1e-4)
