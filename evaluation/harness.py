"""The lm-evaluation-harness's interface to this repository's models: log-likelihoods.

    loglikelihood(context, answer)   sum over the answer's tokens of log p(token | context and earlier tokens)
    loglikelihood_rolling(text)      the same for a whole text after an end-of-text token (Text.eot_token)

Requests are sorted by length, and a batch holds up to `batch_tokens` tokens. If the state has a constant size, a
context's state is computed once for all its answers, batched with other contexts of the same length. Texts of any
length are then read in pieces, in constant memory. Attention reads context and answer as one sequence; texts longer
than a piece go through its growing cache. Models of packed documents start from an empty state after an end-of-text
token, as in training. So the separator before a text affects only the text's first token. Texts are truncated only by
`max_length`; `longer` counts sequences longer than the training block.

evaluate.py is the program.
"""

import importlib.metadata
import itertools
import logging
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from lm_eval import evaluator, utils
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from common.errors import ConfigError
from common.torch_private import map_tensors
from inspection.counting import state_size
from model import tensors_of
from runtime import distributed

logging.getLogger("lm_eval").setLevel(logging.ERROR)
VERSION = importlib.metadata.version("lm_eval")
LOGITS = 2**27  # maximum number of logits per call: half a gigabyte


class HarnessLM(TemplateLM):
    """lm: an LM in evaluation mode; text: its tokenizer, a data.tokenizer.Text.

    batch_tokens: maximum tokens per forward pass; max_length: context limit in tokens, 0: no limit; dtype: autocast's
    dtype. Under torchrun every process scores a part of the requests.
    """

    def __init__(self, lm, text, batch_tokens=8192, max_length=0, dtype=torch.float32):
        super().__init__()
        self.lm = lm
        self.text = text
        self.max_length = max_length
        self.dtype = dtype
        self.batch_tokens = max(1, min(batch_tokens, LOGITS // lm.config.vocab_size))
        self._device = lm.embed.weight.device
        self._rank = distributed.rank()
        self._world_size = distributed.world_size()
        self.has_state = all(branch.has_state for _, branch in lm.branches())
        # no tensor grows, and each has a row per sequence: states of contexts of any length can be batched
        self.constant_state = (self.has_state and state_size(lm, 1) == state_size(lm, 2)
                               and all(a.dim() > 1 for a in tensors_of(lm.initial_state(1))))
        self.packs = lm.config.documents == "pack" and lm.config.end_of_text >= 0
        self.longest = self.longer = 0  # tokens of the longest sequence; sequences longer than the training block

    # ------------------------------------------------------------------------------------- the harness's interface

    @property
    def eot_token_id(self):
        return self.lm.config.end_of_text if self.packs else self.text.eot_token

    @property
    def tokenizer_name(self):  # a key of the harness's cache of requests
        return f"{self.text.name} {self.text.table_sha256}"

    def all_gather(self, tensor):
        return torch.tensor(distributed.all_gather(tensor.tolist()))

    def gather_object(self, value, dst=0):
        return distributed.all_gather(value)

    def barrier(self):
        distributed.barrier()

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.text.encode(string)

    def _loglikelihood_tokens(self, requests, **kwargs):
        return self.score([(context, answer) for _, context, answer in requests])

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        windows = [self.windows(self.text.encode(request.args[0])) for request in requests]
        scores = iter(self.score([window for of_text in windows for window in of_text]))
        return [math.fsum(next(scores)[0] for _ in of_text) for of_text in windows]

    def windows(self, tokens):
        """[(context, tokens to predict)] for a text: just one, or with max_length the harness's disjoint windows."""
        if not self.max_length:
            return [([self.eot_token_id], tokens)]
        pairs = utils.get_rolling_token_windows(tokens, self.eot_token_id, self.max_length, context_len=1)
        return list(map(utils.make_disjoint_window, pairs))

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError("load_tasks refuses tasks that generate")

    # ------------------------------------------------------------------------------------------------- likelihoods

    def see(self, context, answer):
        """The context to read: never empty, truncated on the left to max_length. Also counts long sequences."""
        context = list(context) or [self.eot_token_id]
        if self.max_length:
            context = context[-max(1, self.max_length + 1 - len(answer)) :]
        length = len(context) + len(answer) - 1
        self.longest = max(self.longest, length)
        self.longer += length > self.lm.config.block_size
        return context

    @torch.inference_mode()
    def score(self, pairs):
        """Score [(context, answer)], token ids: [(log-likelihood in nats, True if each token is the most likely)]."""
        answers = {}  # context: places in `pairs`
        for i, (context, answer) in enumerate(pairs):
            if answer:  # may be empty: tokenizers can merge the whole answer into the context
                answers.setdefault(tuple(self.see(context, answer)), []).append(i)
        scores = {}
        shared = [context for context, members in answers.items() if self.constant_state and len(members) > 1]
        for _, same in itertools.groupby(sorted(shared, key=len), len):
            for batch in self.batches(same, len):
                rows = []  # (row of the batch, place in `pairs`)
                for row, context in enumerate(batch):
                    rows += [(row, i) for i in answers.pop(context)]
                rows.sort(key=lambda row: -len(pairs[row[1]][1]))
                index = torch.tensor([row for row, _ in rows], device=self.device)
                state = on_rows(self.state_before_last(batch), index)
                scores |= self.follow([([batch[row][-1], *pairs[i][1]], 1, i) for row, i in rows], state)
        alone = []
        for context, members in answers.items():
            alone += [([*context, *pairs[i][1]], len(context), i) for i in members]
        for batch in self.batches(alone, lambda row: len(row[0])):
            scores |= self.follow(batch)
        return [scores.get(i, (0.0, True)) for i in range(len(pairs))]

    def batches(self, rows, length):
        """Yields lists of rows, longest first, with at most batch_tokens tokens each after padding."""
        rows = sorted(rows, key=length, reverse=True)
        while rows:
            size = max(1, self.batch_tokens // length(rows[0]))
            yield rows[:size]
            rows = rows[size:]

    def state_before_last(self, contexts):
        """The state before the last token of each context, from which answers start. Contexts have the same length."""
        state = self.lm.initial_state(len(contexts))
        step = max(1, self.batch_tokens // len(contexts))
        last = len(contexts[0]) - 1
        for begin in range(0, last, step):
            end = min(begin + step, last)
            _, state = self.call([context[begin:end] for context in contexts], state, last_only=True)
        return state

    def call(self, rows, state=None, **how):
        """(logits, next state) for token lists, padded on the right to the longest."""
        width = max(map(len, rows))
        padding = int(self.lm.config.end_of_text == 0)  # a token that ends no document
        idx = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], device=self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            out = self.lm(idx, state=state, **how)
        return out[0], None if state is None else out[2]

    def follow(self, rows, state=None):
        """{i: (log-likelihood, greedy)} of the tokens from `start` on, for rows (tokens, start >= 1, i), longest first.

        state: the rows' state before their first token; None: the rows start a text.
        """
        nats = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        greedy = torch.ones(len(rows), dtype=torch.bool, device=self.device)
        longest = len(rows[0][0])
        begin = 0
        while reading := [row for row in rows if len(row[0]) - 1 > begin]:  # the last token is only predicted
            left = len(reading)
            piece = max(1, self.batch_tokens // left) if self.has_state else longest
            end = begin + piece
            if state is not None:
                state = on_rows(state, slice(left))
            elif longest - 1 > piece:
                state = self.lm.initial_state(left)
            given = [tokens[begin:min(end, len(tokens) - 1)] for tokens, _, _ in reading]
            logits, state = self.call(given, state)  # (left, T, vocab_size)
            targets = torch.full(logits.shape[:2], -1)  # -1: not scored
            for row, (tokens, start, _) in enumerate(reading):
                first = max(start, begin + 1)
                scored = torch.tensor(tokens[first:end + 1], dtype=torch.int64)
                place = first - begin - 1
                targets[row, place:place + len(scored)] = scored
            targets = targets.to(self.device)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1, reduction="none")
            nats[:left] -= loss.view(targets.shape).double().sum(1)
            greedy[:left] &= ((logits.argmax(-1) == targets) | (targets == -1)).all(1)
            begin = end
        members = [i for _, _, i in rows]
        return dict(zip(members, zip(nats.tolist(), greedy.tolist(), strict=True), strict=True))


def on_rows(state, rows):
    """Select rows (a slice or an index tensor) of a state, however nested in lists and tuples."""
    return map_tensors(lambda a: a[rows], state)


# --------------------------------------------------------------------------------------------------------------- tasks

def load_tasks(names, include=None):
    """Load the harness's tasks for `evaluate`, by names, paths of task files, or their content as dicts.

    include: a folder with task files (*.yaml). Raises ConfigError for an unknown name, or data that cannot be loaded.
    """
    words = [name for name in names if isinstance(name, str)]
    is_known = lambda name: name in manager.all_tasks or Path(name).is_file()
    manager = TaskManager(include_path=include, include_defaults=False)
    if not all(map(is_known, words)):
        # only if needed: reading the harness's own thousands of tasks takes ten seconds
        manager = TaskManager(include_path=include)
    for name in words:
        if not is_known(name):
            near = utils.pattern_match([f"*{name.split('_')[0]}*"], manager.all_tasks)[:5]
            raise ConfigError(f"there is no task {name!r}" + (f" (there are {', '.join(near)})" if near else "")
                              + ": `lm_eval ls tasks` lists all, --include=FOLDER adds your own")
    loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        try:
            loaded_task = manager.load([name])
        except Exception as error:  # the datasets library raises a dozen kinds, and a task file may hold anything
            raise ConfigError(f"task {name if name in words else name['task']}: its data or file cannot be read "
                              f"({type(error).__name__}: {' '.join(str(error).split())[:200]})") from None
        for key, value in loaded_task.items():
            loaded[key].update(value)
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE == "generate_until":
            raise ConfigError(f"task {name} is scored by what a model generates: only likelihood tasks are "
                              "supported, such as multiple_choice and loglikelihood_rolling")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def evaluate(lm, tasks, limit=None):
    """Evaluate tasks from `load_tasks`: {"results": {task: {metric: value, metric_stderr: value, ...}}, "versions":
    {task: ...}}; None on all ranks but 0.

    limit: maximum documents per task. Each task also gets `documents`; `chance`, the accuracy of guessing; and
    `perplexity`, exp of the mean loss per token of the right answers given their contexts.
    """
    for task in tasks["tasks"].values():
        task._instances = None
    output = evaluator.evaluate(lm, tasks, limit=limit or None, bootstrap_iters=1000)
    if output is None:
        return None
    results = {}
    for name, values in output["results"].items():
        results[name] = {}
        for key, value in values.items():
            if isinstance(value, (int, float)):
                results[name][key.removesuffix(",none").replace(",", "_")] = value
    for name, samples in output["samples"].items():
        results[name] |= right_answers(lm, tasks["tasks"][name], samples)
    return {"results": results, "versions": {name: v for name, v in output["versions"].items() if v is not None}}


def right_answers(lm, task, samples):
    """{"documents", "chance", "perplexity"} of a task; see `evaluate`."""
    kind = task.get_config("output_type")
    nats = []
    tokens = 0
    for sample in samples:
        gold = 0 if kind == "loglikelihood" else None
        if kind == "multiple_choice":
            gold = task.doc_to_text(sample["doc"]) if task.multiple_input else sample["target"]
            if isinstance(gold, str):
                gold = (task.doc_to_choice(sample["doc"]) + [gold]).index(gold)
        if isinstance(gold, int) and 0 <= gold < len(sample["resps"]):  # several may be right, or none
            context, answer = sample["arguments"][gold]
            nats.append(-sample["resps"][gold][0][0])
            tokens += len(lm._encode_pair(context, answer)[1] if context else lm.tok_encode(answer))
    scores = {"documents": len(samples)}
    if kind == "multiple_choice":
        scores["chance"] = math.fsum(1 / len(task.doc_to_choice(sample["doc"])) for sample in samples) / len(samples)
    if tokens:
        scores["perplexity"] = math.exp(math.fsum(nats) / tokens)
    return scores
