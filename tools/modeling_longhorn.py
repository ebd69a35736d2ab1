"""The modelling code of an exported folder, for transformers; export.py copies it there with the sources it needs.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.generate(**AutoTokenizer.from_pretrained(folder)("def main():", return_tensors="pt"), max_new_tokens=40)

SOURCES holds model.py, mixers.py and everything that they import from the repository, as of the export. They run in
plain PyTorch, which reads prompts slowly; if the repository is on sys.path and its native kernels are unchanged, these
are compiled and used. The cache for generation is the model's own state.
"""

import hashlib
import importlib
import importlib.abc
import importlib.util
import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

SOURCES = {}  # path in the repository: text
NATIVE = {}  # path of a native source in the repository: sha256


def repository():
    """The folder on sys.path that has the native kernels in NATIVE, or None."""
    for folder in (Path(path or ".").resolve() for path in sys.path):
        files = {path: folder / path for path in NATIVE}
        if files and all(file.is_file() for file in files.values()):
            if all(hashlib.sha256(file.read_bytes()).hexdigest() == NATIVE[path] for path, file in files.items()):
                return folder
    return None


class Sources(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports SOURCES as a package named by their content, which all folders with equal sources share in a process.

    The package's name is added to their imports of each other, and replaces the namespace of their operators.
    """

    def __init__(self, package, root):
        self.package, self.root = package, root
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
        text = re.sub(rf"(?m)^(\s*)import ({self.names})$", rf"\1from {self.package} import \2", text)
        return text.replace('"longhorn::', f'"{self.package}::').encode()


def load_sources():
    """(model.py in SOURCES as a module, the backend for its operators)."""
    package = "longhorn_" + hashlib.sha256(repr(sorted(SOURCES.items())).encode()).hexdigest()[:12]
    root = repository()
    if package not in sys.modules:
        sys.meta_path.insert(0, Sources(package, root or Path(__file__).resolve().parent / package))
    backend = "torch" if root is None else ""
    importlib.import_module(f"{package}.mixers")  # all families
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
        super().__init__(**settings)


class State:
    """The cache for generation: the model's state (constant in size for recurrent families)."""

    def __init__(self, layers, seen):
        self.layers, self.seen = layers, seen

    def get_seq_length(self, layer_idx=0):
        return self.seen

    def reorder_cache(self, beam_idx):
        self.layers = on_rows(self.layers, beam_idx)


def on_rows(state, rows):
    if isinstance(state, (list, tuple)):
        return type(state)(on_rows(part, rows) for part in state)
    return state[rows.to(state.device)] if getattr(state, "ndim", 0) > 1 else state


class LonghornForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LonghornConfig
    base_model_prefix = "model"
    _is_stateful = True

    def __init__(self, config):
        super().__init__(config)
        module, backend = load_sources()
        settings = {name: getattr(config, name) for name in vars(module.ModelConfig()) if name != "backend"}
        with torch.device("cpu"):  # transformers' "meta" would leave tensors without values that no file holds
            self.model = module.LM(module.ModelConfig(**settings, backend=config.backend or backend))
        saved = self.state_dict()
        self.unsaved = {name: buffer.clone() for name, buffer in self.named_buffers() if name not in saved}
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """LM initialises its own weights; but from_pretrained drops the values of buffers that no file holds."""
        for name, buffer in self.named_buffers() if self.unsaved else []:
            if name in self.unsaved:
                buffer.copy_(self.unsaved[name])

    def get_input_embeddings(self):
        return self.model.embed

    def set_input_embeddings(self, embed):
        self.model.embed = embed

    def get_output_embeddings(self):
        return None  # the head is the embedding

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False, labels=None,
                logits_to_keep=0, return_dict=True, **_):
        """logits (B, T, vocab_size); labels (B, T), -100 at positions without a loss, are shifted by one here.

        Padding is harmless only on the right. Raises ValueError for left padding.
        """
        if attention_mask is not None and (attention_mask[:, 0] == 0).any():
            raise ValueError("texts are padded on the left, and this model would read the padding: pad on the right, "
                             "or give texts of equal length")
        state = past_key_values.layers if isinstance(past_key_values, State) else None
        seen = past_key_values.seen if isinstance(past_key_values, State) else 0
        if use_cache and state is None:
            state = self.model.initial_state(len(input_ids))
        logits, _, *after = self.model(input_ids, state=state, last_only=logits_to_keep == 1)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        cache = State(after[0], seen + input_ids.shape[1]) if after else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # `forward` makes its own

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, use_cache=True, **_):
        if attention_mask is not None and (attention_mask == 0).any():
            raise ValueError("texts are padded, and this model would read the padding: generate from texts of equal "
                             "length")
        seen = past_key_values.seen if isinstance(past_key_values, State) else 0
        return {"input_ids": input_ids[:, seen:], "past_key_values": past_key_values, "use_cache": use_cache,
                "logits_to_keep": 1}
