"""Random config files and logs give one line of error, never a crash.

    python -m pytest tests/test_fuzz.py       make chaos: a thousand examples of each
"""

import json
import os
import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import configurator
from common import errors
from runtime import records
from train import TrainConfig

CHAOS = bool(os.environ.get("LONGHORN_CHAOS"))

few = settings(deadline=None, max_examples=1000 if CHAOS else 40, database=None,
               suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
WORDS = r"""
n_layer  learning_rate  x  _y  =  ==  1  1e999  -1  'a'  True  (  )  []  {  :  \  #  lambda: 0  1/0  10**5000  [0] * 3
import os  def f(): pass  del n_layer  n_layer = n_layer  n_layer = 10**5000  raise SystemExit  global n_layer  return
yield  float('nan')
"""
words = st.text(max_size=20) | st.sampled_from([*re.split(r"\s\s+|\n", WORDS.strip()), "\n", "\n ", "\0", "\ufeff"])


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
def test_any_log_is_read_as_far_as_it_is_valid(tmp_path, content):
    (tmp_path / "log.jsonl").write_bytes(content)
    events = records.read_log(tmp_path)
    assert all(isinstance(e["step"], int) for e in events)
    records.read_log(tmp_path, "train")
    records.Log(tmp_path, 5)
    assert [e["step"] for e in records.read_log(tmp_path)] == [e["step"] for e in events if e["step"] <= 5]
