"""evaluate.py: scores of tasks equal direct computations. All files are local."""

import functools
import json
import math
import multiprocessing
import re
import shutil
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import byte_level_bpe, make_run, refused, run_program, table, tiny
from torch import nn

import evaluate
import families  # noqa: F401
from data.prepared import DataError
from data.pystdlib import prepare as pystdlib
from data.tokenizer import Text
from evaluation import tasks
from model import FAMILIES, LM
from runtime import records

harness = tasks.import_harness()
pytestmark = pytest.mark.usefixtures("one_thread")
run = functools.partial(run_program, lambda: evaluate.launch("evaluate.py", evaluate.main))
TASKS = ["my_choice", "my_text"]


@torch.no_grad()
def direct(lm, context, answer):
    """(log-likelihood, greedy) from one pass over all tokens."""
    logp = lm(torch.tensor([context + answer]))[0].double().log_softmax(-1)[0, len(context) - 1:-1]
    return logp[range(len(answer)), answer].sum().item(), logp.argmax(-1).tolist() == answer


def assert_same(scores, expected):
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert [nats for nats, _ in scores] == pytest.approx([nats for nats, _ in expected], rel=1e-5)


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


class NoState(nn.Module):
    """The mean of all values so far: a mixer that keeps no state."""

    def __init__(self, config, layer):
        super().__init__()
        self.v = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        return self.v(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


@pytest.mark.parametrize("family, documents", table("""
no_state  join
longhorn  join
longhorn  pack
mesa      pack
rwkv4     join
llama     pack
swa       join
longhorn,llama  pack
"""))
def test_likelihoods_are_those_of_one_pass_in_any_batch_and_order(family, documents, monkeypatch):
    monkeypatch.setitem(FAMILIES, "no_state", [NoState])
    lm = tiny("longhorn", pattern=family, documents=documents, end_of_text=0)
    draw = lambda n: torch.randint(256, (n,)).tolist()
    pairs = [(context, draw(n)) for length, sizes in [(1, [1, 4, 4, 24]), (2, [3]), (7, [1, 1, 1]), (30, [60, 1]),
                                                      (90, [2, 5, 40])]
             for context in [draw(length)] for n in sizes]
    best = lm(torch.tensor([pairs[-1][0]]))[0][0, -1].argmax().item()
    pairs += [(pairs[-1][0], [best]), ([0], draw(300))]  # a greedy answer; a text
    if documents == "pack":  # documents that end in contexts and answers
        two = [5, 0, 7, 8]
        ends = [6, 0]
        pairs[:0] = [([0], draw(5)), ([0], draw(9)), (two, [1, 2]), (two, [1, 0, 2, 0, 3]), (ends, [3, 4]), (ends, [3])]
    expected = [direct(lm, *pair) for pair in pairs]
    assert any(greedy for _, greedy in expected)
    call = harness.HarnessLM.call

    def within_a_batch(self, rows, *args, **how):
        assert len(rows) == 1 or len(rows) * max(map(len, rows)) <= self.batch_tokens
        return call(self, rows, *args, **how)

    monkeypatch.setattr(harness.HarnessLM, "call", within_a_batch)
    for batch_tokens in (16, 8192):
        adapter = harness.HarnessLM(lm, Text("bytes"), batch_tokens)
        assert adapter.constant_state == (family in FAMILIES and family not in ("llama", "swa", "no_state"))
        order = torch.randperm(len(pairs)).tolist()
        assert_same(adapter.score([pairs[i] for i in order]), [expected[i] for i in order])
        assert (adapter.longest, adapter.longer) == (300, 7)  # a text of 24 tokens fits the training block


@pytest.mark.parametrize("family", ["longhorn", "llama"])
def test_a_long_text_is_read_whole_in_pieces(family, monkeypatch):
    lm = tiny(family)
    text = "".join(chr(33 + i % 89) for i in range(10_000))
    expected, _ = direct(lm, [0], list(text.encode()))
    lengths = []
    forward = LM.forward
    seen = lambda self, idx, **how: lengths.append(idx.shape[1]) or forward(self, idx, **how)
    monkeypatch.setattr(LM, "forward", seen)
    adapter = harness.HarnessLM(lm, Text("bytes"), 1024)
    assert adapter.loglikelihood_rolling(requests((text,), ("ab",)))[0] == pytest.approx(expected, rel=1e-5)
    assert max(lengths) <= 1024 and adapter.longest == 10_000
    adapter = harness.HarnessLM(lm, Text("bytes"), 1024, max_length=24)  # disjoint windows, as for other models
    tokens = list(text.encode())[:60]
    windows = [([0], tokens[:24]), (tokens[23:24], tokens[24:48]), (tokens[35:48], tokens[48:60])]
    nats = sum(direct(lm, *window)[0] for window in windows)
    assert adapter.loglikelihood_rolling(requests((text[:60],)))[0] == pytest.approx(nats, rel=1e-5)


def test_contexts_are_cut_as_in_the_harness():
    """Trailing space moves to the answer; an empty or blank context is read as the token that ends texts."""
    lm = tiny()
    adapter = harness.HarnessLM(lm, Text("bytes"))
    given = [("a b", " c"), ("a b  ", "c"), ("", "é"), ("  \n", "x"), ("long " * 30, "answer"), ("a b", " cd")]
    read = [("a b", " c"), ("a b", "  c"), ("\0", "é"), ("\0", "  \nx"), (("long " * 30).strip(), " answer"),
            ("a b", " cd")]
    expected = [direct(lm, *(list(part.encode()) for part in pair)) for pair in read]
    assert_same(adapter.loglikelihood(requests(*given)), expected)
    short = harness.HarnessLM(lm, Text("bytes"), max_length=10)
    assert_same(short.loglikelihood(requests(("long " * 30, "answer"))), [direct(lm, list(b"long"), list(b" answer"))])


# ---------------------------------------------------------------------------------------- the harness, on local files

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Task files with local data: multiple choice, a text, and generation, which is refused."""
    folder = tmp_path_factory.mktemp("my_tasks")

    def write(name, kind, rows, metrics, aggregation="mean", text="{{question}}", **more):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {"task": name, "dataset_path": "json", "test_split": "test", "output_type": kind, "doc_to_text": text,
                "dataset_kwargs": {"data_files": {"test": f"{folder}/{name}.jsonl"}}, "metadata": {"version": 3},
                "metric_list": [{"metric": m, "aggregation": aggregation, "higher_is_better": True} for m in metrics]}
        (folder / f"{name}.yaml").write_text(json.dumps({**task, **more}))  # JSON is YAML

    rows = [{"question": f"q {i}" * (i + 1), "choices": ["yes", "nö" * (i % 4 + 1), "may be"][:3 - (i < 3)],
             "answer": i % 3 % (3 - (i < 3))} for i in range(13)]
    write("my_choice", "multiple_choice", rows, ["acc", "acc_norm"], doc_to_choice="choices", doc_to_target="answer")
    texts = [{"text": "wörter " * 9}, {"text": "x"}]
    write("my_text", "loglikelihood_rolling", texts, ["bits_per_byte"], "bits_per_byte", "", doc_to_target="{{text}}")
    write("my_writing", "generate_until", rows, ["exact_match"], doc_to_target="answer")
    return folder


def recorded(out):
    return json.loads((out / "eval_tasks.json").read_text())


def choices_by_hand(lm, folder):
    """The metrics of my_choice. The perplexity is over the tokens of the right answers: here bytes, with the space
    before each answer."""
    rows = [json.loads(line) for line in (folder / "my_choice.jsonl").read_text().splitlines()]
    right = right_norm = nats = tokens = chance = 0
    for row in rows:
        context = list(row["question"].encode())
        scores = [direct(lm, context, list(f" {choice}".encode()))[0] for choice in row["choices"]]
        per_character = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        right += scores.index(max(scores)) == row["answer"]
        right_norm += per_character.index(max(per_character)) == row["answer"]
        nats -= scores[row["answer"]]
        tokens += len(f" {row['choices'][row['answer']]}".encode())
        chance += 1 / len(row["choices"])
    n = len(rows)
    return {"acc": right / n, "acc_norm": right_norm / n, "perplexity": math.exp(nats / tokens), "chance": chance / n,
            "acc_stderr": math.sqrt(right / n * (1 - right / n) / (n - 1)), "documents": n}


def test_tasks_of_ones_own_score_as_computed_by_hand(folder, tmp_path):
    lm = tiny()
    out = make_run(tmp_path / "run", lm)
    said = run(out, tasks=",".join(TASKS), include=folder).out
    record = recorded(out)
    assert (record["step"], record["tokens"], record["tokenizer"], record["dtype"]) == (7, 700, "bytes", "float32")
    assert record["versions"] == dict.fromkeys(TASKS, 3) and record["harness"]
    expected = choices_by_hand(lm, folder)
    found = record["results"]["my_choice"]
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert len({expected["acc"], expected["acc_norm"], expected["chance"]}) == 3
    texts = [json.loads(line)["text"].encode() for line in (folder / "my_text.jsonl").read_text().splitlines()]
    nats = -sum(direct(lm, [0], list(text))[0] for text in texts)
    bits = record["results"]["my_text"]["bits_per_byte"]
    assert bits == pytest.approx(nats / math.log(2) / sum(map(len, texts)), rel=1e-5)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| my_")]
    acc, error, chance = (f"{100 * expected[key]:.2f}" for key in ("acc", "acc_stderr", "chance"))
    assert ["my_choice", "acc", acc, error, chance, "13"] in cells  # shares in percent
    assert ["my_text", "bits_per_byte", f"{bits:.4f}", "", "", "2"] in cells
    assert f"longer than the training block of 24 tokens, up to {record['longest']:,}" in said
    kept = shutil.copy(out / "checkpoint.safetensors", out / "checkpoint-500.safetensors")
    run(kept, tasks="my_text", include=folder)
    again = json.loads((out / "eval_tasks-checkpoint-500.json").read_text())
    assert again["results"] == {"my_text": record["results"]["my_text"]} and recorded(out) == record
    result = run(out, tasks="my_writing", include=folder)
    assert result.code == 2 and "task my_writing is scored by what a model generates" in result.err


def test_scores_of_another_checkpoint_are_not_mixed_in(folder, tmp_path, monkeypatch):
    """With other weights, seed, code or settings the record starts anew, even at the same step in the same folder."""
    out = tmp_path / "run"

    def scored(name, lm=None, settings=None, **meta):
        kept = (out / "eval_tasks.json").read_bytes() if out.exists() else b""
        if lm:
            shutil.rmtree(out, ignore_errors=True)
            make_run(out, lm, **meta)
            (out / "eval_tasks.json").write_bytes(kept)
        assert run(out, tasks=name, include=folder, **settings or {}).code == 0
        return set(recorded(out)["results"])

    lm = tiny()
    assert scored("my_text", lm) == {"my_text"} and scored("my_choice") == {"my_text", "my_choice"}
    whole = recorded(out)["results"]
    for settings in ({"dtype": "bfloat16"}, {"limit": 1}, {"max_length": 9}):
        assert scored("my_text", settings=settings) == {"my_text"}
        assert recorded(out)["results"]["my_text"] != whole["my_text"]
    lm.embed.weight.data[0, 0] += 1e-3
    assert scored("my_text", lm) == {"my_text"}
    assert scored("my_text", lm, code_versions=["v2abc"]) == {"my_text"}
    assert recorded(out)["checkpoint"]["code"] == "v2abc"
    assert scored("my_choice") == {"my_text", "my_choice"}
    now = records.code_identity()
    edited = {**now, "code_files": {**now["code_files"], "model.py": "0" * 12}}
    monkeypatch.setattr(records, "code_identity", lambda: edited)
    assert scored("my_choice") == {"my_choice"}  # of the same checkpoint, but with an edited model.py
    lm = tiny(vocab_size=512)
    for texts in ["a b"], ["c d e f"] * 99:  # another tokenizer of the same name, which the checkpoint does not know
        byte_level_bpe(tmp_path, texts)
        settings = {"tokenizer": f"hf:{tmp_path}"}
        assert scored("my_text", lm, settings, tokenizer=None) == {"my_text"}
        assert scored("my_choice", settings=settings) == {"my_text", "my_choice"}
    records.move_aside(out)
    assert not [path for path in out.iterdir() if path.is_file()]


def score(folder):
    return harness.evaluate(harness.HarnessLM(tiny(), Text("bytes")), harness.load_tasks(TASKS, str(folder)))


def score_in_group(store, folder, rank):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return score(folder)


def test_two_processes_score_as_one(folder, tmp_path):
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        outputs = pool.map(functools.partial(score_in_group, tmp_path / "store", folder), (0, 1), timeout=600)
        (first, second) = outputs
        one = score(folder)
    assert second is None and first["versions"] == one["versions"]
    for name, values in one["results"].items():
        assert first["results"][name] == pytest.approx(values, rel=1e-6)


# What is typed beside --include, and words of the refusal.
REFUSED = """
none                           no checkpoint
run --tasks=my_chioce          no task 'my_chioce' (there are my_choice
run --tasks=,                  no tasks
run --tasks=my_text            Couldn't reach the Hub at all
run --tokenizer=tiktoken:gpt2  is 'bytes', not 'gpt2'
unknown                        set --tokenizer
less                           256 tokens, the model 100
"""


def test_mistakes_get_one_line(folder, tmp_path, monkeypatch):
    manager = functools.partial(harness.TaskManager, include_defaults=False)  # reading the harness's own takes 10 s
    monkeypatch.setattr(harness, "TaskManager", manager)
    offline = mock.Mock(side_effect=ConnectionError("Couldn't reach the Hub\nat all"))
    monkeypatch.setattr("datasets.load_dataset", offline)
    monkeypatch.chdir(tmp_path)
    make_run(Path("run"))
    make_run(Path("unknown"), tokenizer=None)
    make_run(Path("less"), tiny(vocab_size=100))
    for typed, words in table(REFUSED):
        refused(run(*typed.split(), include=folder), words)
    refused(run("run", include="none"), "include none")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(run("run"), "make eval")


# --------------------------------------------------------------------------------------------------- the embedded tasks

@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A data/pystdlib prepared from some files of the standard library."""
    source = tmp_path_factory.mktemp("source")
    root = tmp_path_factory.mktemp("root")
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]:
        (source / path.name).write_bytes(path.read_bytes())
    pystdlib.prepare(root / "data" / "pystdlib", stdlib=source, val_fraction=0.3)
    return root


def test_the_questions_have_one_right_answer(library):
    files = tasks.held_out_files(data := library / "data" / "pystdlib")
    for task in tasks.EMBEDDED:
        make = lambda task=task: list(tasks.embedded(task, data, 60)["custom_dataset"]()["test"])
        questions = make()
        assert questions == make() and len(questions) == 60 and {q["answer"] for q in questions} == {0, 1, 2, 3}
        for q in questions:
            right = q["choices"][q["answer"]]
            assert any(q["context"] + right in text for text in files) and len(set(q["choices"])) == 4
            if task == "pystdlib_identifier":
                assert {*q["choices"]} & {*re.findall(r"\w+", q["context"])} == {right}
                assert len(q["context"]) <= 600 and all(abs(len(c) - len(right)) <= 2 for c in q["choices"])
            else:
                assert {len(c) for c in q["choices"]} == {60} and q["context"].endswith("\n")
                assert len(q["context"]) == 400 and not any(c in q["context"] for c in q["choices"])
    with pytest.raises(DataError, match="not prepared"):
        tasks.embedded(task, library)


def test_an_embedded_task_scores_as_computed_by_hand(library, tmp_path, monkeypatch):
    """An answer follows its question without a space in between, and the likeliest answer wins."""
    monkeypatch.setattr(evaluate, "ROOT", library)
    lm = tiny()
    assert run(out := make_run(tmp_path / "run", lm), limit=6).code == 0
    for task, results in recorded(out)["results"].items():
        right = 0
        for q in tasks.embedded(task, library / "data" / "pystdlib", 6)["custom_dataset"]()["test"]:
            spaces = len(q["context"]) - len(q["context"].rstrip())
            cut = len(q["context"]) - spaces
            scores = [direct(lm, list(q["context"][:cut].encode()), list((q["context"][cut:] + c).encode()))[0]
                      for c in q["choices"]]
            right += scores.index(max(scores)) == q["answer"]
        assert results["acc"] == right / 6 and results["chance"] == 0.25
    assert [task["task"] for task in tasks.named(task, library / "data" / "pystdlib")] == [task]


def test_table_2_has_our_row_beside_the_papers():
    values = {"acc": 0.25, "acc_norm": 0.5, "acc_stderr": 0.01, "acc_norm_stderr": 0.02}
    page = re.sub(" +", " ", tasks.table2("mine", dict.fromkeys(tasks.PAPER, values)))
    assert "| PIQA acc | Hella acc_norm | Wino acc |" in page and "| ARC-c acc_norm |" in page
    assert "| mine | 25.00 | 50.00 | 25.00 | 25.00 | 50.00 | 50.00 | 25.00 | 25.00 | 34.38 |\n" in page
    assert "| standard error | 1.00 | 2.00 |" in page and "swapped" in page
    for paper, mean in ("LLaMA", 53.03), ("GLA", 51.07), ("Mamba", 52.25), ("Longhorn", 52.35):  # its last column
        assert re.search(rf"\| {paper} \(paper\) .* {mean} \|\n", page)
    assert tasks.named(" paper, mine", "no folder") == [*tasks.PAPER, "mine"]
