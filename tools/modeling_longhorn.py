"""The modelling code of an exported folder, for transformers; export.py copies it there with the sources it needs.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)  # to read the model's config
    model.generate(**tokenizer("def main():", return_tensors="pt"), max_new_tokens=40)

SOURCES holds model.py, mixers.py, families/ and everything that they import from the repository, as it was at the
export. They run in plain PyTorch, which reads prompts slowly. If the repository is on sys.path and its native kernels
are unchanged, those kernels are compiled and used. The cache for generation is the model's own state. Rows of a batch
may be padded on either side.
"""

import hashlib
import importlib
import importlib.abc
import importlib.util
import re
import sys
from pathlib import Path

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

SOURCES = {}  # path in the repository: text
NATIVE = {}  # path of a native source in the repository: sha256


def repository():
    """The folder on sys.path that has the native kernels in NATIVE, or None."""
    for folder in sys.path:
        folder = Path(folder or ".").resolve()
        found = {}
        for path in NATIVE:
            if (folder / path).is_file():
                found[path] = hashlib.sha256((folder / path).read_bytes()).hexdigest()
        if found and found == NATIVE:
            return folder
    return None


class Sources(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports SOURCES as a package named by a hash of them. All folders in a process with equal sources share it.

    Their imports of each other are rewritten to this package, and its name becomes the namespace of their operators.
    """

    def __init__(self, package, root):
        self.package = package
        self.root = root
        self.names = "|".join(sorted({path.partition("/")[0].removesuffix(".py") for path in SOURCES}))

    def find_spec(self, fullname, path=None, target=None):
        inside = fullname.startswith(f"{self.package}.") and self.path(fullname) in SOURCES
        if fullname != self.package and not inside:
            return None
        is_package = fullname == self.package or self.path(fullname).endswith("__init__.py")
        return importlib.util.spec_from_loader(fullname, self, is_package=is_package)

    def path(self, fullname):
        path = fullname.removeprefix(self.package).lstrip(".").replace(".", "/")
        return f"{path}/__init__.py" if f"{path}/__init__.py" in SOURCES else f"{path}.py"

    def get_filename(self, fullname):
        return str(self.root / ("__init__.py" if fullname == self.package else self.path(fullname)))

    def get_data(self, path):
        text = SOURCES.get(Path(path).relative_to(self.root).as_posix(), "")
        text = re.sub(rf"(?m)^(\s*)from ({self.names})\b", rf"\1from {self.package}.\2", text)
        text = re.sub(r"(?m)^(\s*)import ([\w ,.]+)", self.imports, text)
        return text.replace('"longhorn::', f'"{self.package}::').encode()

    def imports(self, line):
        """Rewrite `import a, b.c as d` to import our own modules from the package."""
        parts = []
        for part in map(str.strip, line[2].split(",")):
            name = part.split(" ")[0]
            top = re.split(r"[ .]", part)[0]
            if not re.fullmatch(self.names, top):
                parts.append(f"import {part}")
            elif " as " in part:
                parts.append(f"import {self.package}.{part}")
            else:
                parts.append(f"import {self.package}.{name}; from {self.package} import {top}")
        return line[1] + "; ".join(parts)


def load_sources():
    """(model.py in SOURCES as a module, the backend for its operators)."""
    package = "longhorn_" + hashlib.sha256(repr(sorted(SOURCES.items())).encode()).hexdigest()[:12]
    root = repository()
    if package not in sys.modules:
        sys.meta_path.insert(0, Sources(package, root or Path(__file__).resolve().parent / package))
    backend = "torch" if root is None else ""
    importlib.import_module(f"{package}.mixers")
    for path in SOURCES:
        if path.startswith("families/"):
            importlib.import_module(f"{package}.{path[:-3].removesuffix('/__init__').replace('/', '.')}")
    return importlib.import_module(f"{package}.model"), backend


class LonghornConfig(PretrainedConfig):
    """The settings of model.py's ModelConfig, under their own names."""

    model_type = "longhorn"
    attribute_map = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
                     "max_position_embeddings": "block_size"}

    def __init__(self, **settings):
        for name, default in vars(load_sources()[0].ModelConfig()).items():
            if name != "backend":  # depends on the machine
                setattr(self, name, settings.pop(name, default))
        self.backend = settings.pop("backend", "")  # torch, if it was trained in plain PyTorch
        padding = settings.pop("pad_token_id", None)  # may be an id beyond the vocabulary, and transformers would warn
        super().__init__(**settings)
        self.pad_token_id = padding


class State:
    """The cache for generation: the model's own state.

    groups: [(rows of the batch, their state)]. Rows that have read equally many tokens share a group; if the state has
    a constant size, all rows do. last: (B, 1, vocab_size), each row's logits after its last token. seen: tokens read,
    padding included. Reading tokens makes a new State, so an old one can be continued in several ways.
    """

    is_compileable = False  # generate() looks at this

    def __init__(self, groups, last, seen):
        self.groups = groups
        self.last = last
        self.seen = seen

    def get_seq_length(self, layer_idx=0):
        return self.seen

    def reorder_cache(self, beam_idx):
        groups = []
        for rows, state in self.groups:
            new = []
            old = []  # places in the new batch, and in this group
            for i, row in enumerate(beam_idx.tolist()):
                if row in rows:
                    new.append(i)
                    old.append(rows.index(row))
            if new:
                groups.append((new, on_rows(state, old)))
        self.groups = groups
        self.last = self.last[beam_idx.to(self.last.device)]

    def divided(self, counts, alone):
        """Divide the groups so that all rows of a group read the same number n of tokens next. Yields (rows, their
        state, n). alone: each row is its own group."""
        for rows, state in self.groups:
            places = {}  # (tokens to read, row if alone): places in this group
            for place, row in enumerate(rows):
                places.setdefault((counts[row], row if alone else 0), []).append(place)
            for (n, _), some in sorted(places.items()):
                yield [rows[place] for place in some], on_rows(state, some), n


def on_rows(state, rows):
    """These rows (a list) of a state, however nested."""
    if isinstance(state, (list, tuple)):
        return type(state)(on_rows(part, rows) for part in state)
    return state[rows] if getattr(state, "ndim", 0) > 0 else state


def joined(states):
    """One state with the rows of several."""
    if isinstance(states[0], (list, tuple)):
        return type(states[0])(joined(parts) for parts in zip(*states, strict=True))
    return torch.cat(states)


class LonghornForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LonghornConfig
    base_model_prefix = "model"
    _is_stateful = True

    def __init__(self, config):
        super().__init__(config)
        module, backend = load_sources()
        settings = {name: getattr(config, name) for name in vars(module.ModelConfig()) if name != "backend"}
        with torch.device("cpu"):  # on transformers' "meta", tensors that no file holds would get no values
            self.model = module.LM(module.ModelConfig(**settings, backend=config.backend or backend))
        saved = self.state_dict()
        self.unsaved = {name: buffer.clone() for name, buffer in self.named_buffers() if name not in saved}
        first = {}  # parameter: the first of its names
        of = {name: first.setdefault(p, name) for name, p in self.named_parameters(remove_duplicate=False)}
        self._tied_weights_keys = {name: source for name, source in of.items() if name != source}
        self.post_init()

    def state_dict(self, *args, **how):
        """The state_dict without the results of get_extra_state, which are for training."""
        state = super().state_dict(*args, **how)
        for name in [name for name in state if name.endswith("_extra_state")]:
            del state[name]
        return state

    def get_expanded_tied_weights_keys(self, all_submodels=False):
        return dict(self._tied_weights_keys)  # transformers would look at the config's tie_word_embeddings

    @torch.no_grad()
    def _init_weights(self, module):
        """Restore the buffers that no file holds: from_pretrained drops their values. LM initialises its own weights.
        """
        for name, buffer in self.named_buffers() if self.unsaved else []:
            if name in self.unsaved:
                buffer.copy_(self.unsaved[name])

    def get_input_embeddings(self):
        return self.model.embed

    def set_input_embeddings(self, embed):
        self.model.embed = embed

    def get_output_embeddings(self):
        return None  # the LM ties its head itself, if at all

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, labels=None,
                logits_to_keep=0, return_dict=None, **how):
        """logits (B, T, vocab_size); labels (B, T), -100 at positions without a loss, are shifted by one here.

        Padding (attention_mask is 0) is skipped wherever it is, and repeats the logits of the last token before it.
        logits_to_keep: the number of last positions to return (0: all), or indices.
        """
        real = torch.ones_like(input_ids, dtype=torch.bool)  # (B, T)
        if attention_mask is not None:
            real = attention_mask[:, -input_ids.shape[1]:].to(input_ids.device) != 0
        counts = real.sum(1)
        at = real.long().cumsum(1)  # (B, T): tokens read up to each position
        given = self.tokens_first(input_ids, real)
        last_only = isinstance(logits_to_keep, int) and logits_to_keep == 1 and labels is None
        cache = None
        if use_cache or isinstance(past_key_values, State):
            before = past_key_values if isinstance(past_key_values, State) else None
            logits, cache = self.through_state(given, counts.tolist(), before, last_only)
        else:
            logits = self.whole(given, counts, last_only)
        if logits.shape[1] > 1:  # after 0, 1, 2 ... of each row's tokens
            at = at[:, -1:] if last_only else at
            logits = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))
        loss = None
        if labels is not None:
            more = {key: how[key] for key in ("num_items_in_batch",) if key in how}
            loss = self.loss_function(logits, labels, self.config.vocab_size, **more)
        if not last_only:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = logits[:, keep]
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        as_dict = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def tokens_first(self, given, real):
        """(B, T): each row's tokens first, then its padding."""
        order = (~real).long().argsort(dim=1, stable=True)
        pad = getattr(self.config, "pad_token_id", None)
        if pad is not None and pad >= self.config.vocab_size:  # an id that the embedding lacks
            real = real & (given != pad)
        unread = int(self.config.end_of_text == 0)  # any token that ends no document
        return given.masked_fill(~real, unread).gather(1, order)

    def whole(self, given, counts, last_only):
        """Logits (B, 1 + N, vocab_size) after 0 .. N tokens of each row; the first are arbitrary. With last_only, and
        if all rows have N tokens, only the logits after the last token: (B, 1, vocab_size)."""
        N = max(1, int(counts.max()))
        if last_only and bool((counts == N).all()):
            return self.model(given[:, :N], last_only=True)[0]
        logits = self.model(given[:, :N])[0]  # (B, N, vocab_size)
        return torch.cat([logits[:, :1], logits], 1)

    def through_state(self, given, counts, before, last_only):
        """(logits, the next State) for rows whose first `counts` entries of `given` are tokens. With last_only the
        logits are (B, 1, vocab_size), after each row's last token; else (B, 1 + N, vocab_size), after 0 .. N tokens."""
        B = len(given)
        empty = self.model.initial_state(len(given))
        if before is None:
            none = self.model.embed.weight.new_zeros(B, 1, self.config.vocab_size)
            before = State([(list(range(B)), empty)], none, 0)
        grows = any(0 in a.shape or a.dim() < 2 for a in load_sources()[0].tensors_of(empty))
        alone = grows and self.config.documents == "pack"  # rows of a cache cannot end documents at different places
        last = before.last.clone()
        after = []
        logits = last.repeat(1, 1 + max(1, *counts), 1)
        for rows, state, n in before.divided(counts, alone):
            if n:
                read, _, state = self.model(given[rows, :n], state=state, last_only=last_only)
                last[rows] = read[:, -1:].to(last.dtype)
                if not last_only:
                    logits[rows, 1:n + 1] = read.to(last.dtype)
            after.append((rows, state))
        if not grows and len(after) > 1:
            rows = [row for some, _ in after for row in some]
            after = [(rows, joined([state for _, state in after]))]
        return last if last_only else logits, State(after, last, before.seen + given.shape[1])

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # `forward` makes its own

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, use_cache=True,
                                      next_sequence_length=None, **_):
        past = past_key_values if isinstance(past_key_values, State) else None
        inputs = {"attention_mask": attention_mask, "past_key_values": past, "use_cache": use_cache,
                  "logits_to_keep": 1}
        total = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
        new = next_sequence_length or (total - past.seen if past is not None and total > past.seen else 0)
        return {**inputs, "input_ids": input_ids[:, -new:]}  # 0: all
