"""Checkpoints: written whole or not at all, checked when loaded, never unpickled.

    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "rng": rng_state()}
    tensors, skeleton = flatten(state)
    save("out/run/checkpoint.safetensors", tensors, {"step": 10, "skeleton": skeleton})
    tensors, meta = load("out/run/checkpoint.safetensors")
    state = unflatten(tensors, meta["skeleton"])

A checkpoint is a safetensors file. The tensors are stored as bytes, everything else as JSON in the header. The header
also holds the file's length and a CRC-32 of the whole file, computed with the CRC's own 8 digits as zeros. CRC-32
detects torn writes and bad disks, at 4 GB/s on one core. It is not a signature: protect the folder.

We read the file with the safetensors library, but write it ourselves. When killed, the library leaves a file with a
random name behind, and it does not report a full disk as an OSError.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import random
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import safetensors
import torch

from common.errors import ConfigError, regular
from common.files import replacing
from common.tokenizer_table import vocabulary
from runtime.records import MOVING

VERSION = 1
NEWEST = "checkpoint.safetensors"
BEST = "best.safetensors"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
          torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"}
CRC = '"crc32":"%08x"'
IMPORT = "python export.py --from_hf={0} --out_dir=RUN"
DOWNLOAD = ("to import a model from the hub, download it first: hf download {0} --local-dir=FOLDER, then "
            + IMPORT.format("FOLDER"))
# errors that reading a damaged or foreign file can raise
MALFORMED = ValueError, LookupError, TypeError, AttributeError, RecursionError, safetensors.SafetensorError


class CheckpointError(ConfigError):
    """Raised for an unusable checkpoint. The message is one line: the file, what is wrong, how to fix it."""


def in_order(tensors):
    """Return {name: tensor} in file order: largest elements first, so that every tensor is aligned."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def save(path, tensors, meta, kind="longhorn checkpoint", values=None):
    """Write {name: tensor} and JSON-able `meta` to `path`. At any moment, `path` holds the old file or the new one.

    `kind`: the header's "format". `values`: an iterator over the tensors to write, `in_order`, so that a sharded tensor
    is gathered only when it is written. Tensors may be on any device, strided or shared; each is stored in full. Only
    one process may write to a path at a time. Raises TypeError for values that cannot be stored, OSError if the write
    fails.
    """
    tensors = in_order(tensors)
    header = _header(path, tensors, meta, kind)
    with replacing(path) as tmp, open(tmp, "wb") as f:
        crc = zlib.crc32(header)
        f.write(header)
        for t in values or tensors.values():
            t = t.detach().cpu().contiguous()
            # reshape(-1) would keep the odd stride of a single element, which view() rejects
            buffer = t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy()  # (bytes,)
            crc = zlib.crc32(buffer, crc)
            f.write(buffer)
        f.seek(0)
        f.write(header.replace((CRC % 0).encode(), (CRC % crc).encode(), 1))


def _header(path, tensors, meta, kind):
    """Return a safetensors header with the file's length, and with zeros in place of the CRC-32."""
    about = {"format": kind, "version": str(VERSION), "bytes": "0" * 16, "crc32": "0" * 8, "meta": json.dumps(meta)}
    entries = {"__metadata__": about}
    end = 0
    for name, t in tensors.items():
        if t.dtype not in DTYPES or t.layout != torch.strided or t.is_meta or name in entries:
            raise TypeError(f"{path}: cannot store {name!r} ({t.dtype})")
        start = end
        end += t.nbytes
        entries[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    text = text.replace("0" * 16, f"{8 + len(text) + end:016d}", 1)
    return len(text).to_bytes(8, "little") + text.encode()


def load(path, prefix=""):
    """Read a checkpoint: ({name: tensor}, meta). Every byte is checked before any tensor is created.

    `prefix`: load only the tensors whose names start with it. Raises CheckpointError if the file is missing, cut short,
    damaged, of another kind or of an unknown format version, or if its meta is not a dict.
    """
    try:
        with open(regular(path), "rb") as f:
            size = os.fstat(f.fileno()).st_size
            start, header = _read_header(f)
            crc = header["crc32"]
            actual = zlib.crc32(start.replace(f'"crc32":"{crc}"'.encode(), (CRC % 0).encode(), 1))
            while chunk := f.read(1 << 22):
                actual = zlib.crc32(chunk, actual)
        version = int(header["version"])
        total = int(header["bytes"])
        if version != VERSION:
            wrong = f"format version {version} is unknown (this code reads {VERSION}): use the code that wrote it"
        elif size != total:
            wrong = f"{'cut short' if size < total else 'too long'}: {size} bytes, but its header says {total}"
        elif f"{actual:08x}" != crc:
            wrong = f"damaged (checksum {actual:08x}, saved as {crc}); use an earlier checkpoint-STEP next to it"
        else:
            with safetensors.safe_open(path, "pt") as f:  # cloned: the library's tensors are views of the mapped file
                tensors = {name: f.get_tensor(name).clone() for name in f.keys() if name.startswith(prefix)}
            meta = json.loads(header["meta"])
            wrong = former_setting(meta.get("config"))
            if not wrong:
                return tensors, meta
    except OSError as error:
        hint = f": {none_here(Path(path).parent)}" if isinstance(error, FileNotFoundError) else ""
        raise CheckpointError(f"{path}: {error.strerror or error}{hint}") from error
    except MALFORMED as error:
        raise CheckpointError(f"{path}: cut short, damaged, or not a checkpoint of this project (torch.save's pickles "
                              "could run code and are never opened)") from error
    raise CheckpointError(f"{path}: {wrong}")


def none_here(place):
    """Return a line: `place` has no checkpoint, and these are the newest runs with one, beside it and in out/."""
    there = [path for folder in (place.parent, Path("out")) for path in folder.glob(f"*/{NEWEST}") if path.is_file()]
    newest = sorted({path.resolve(): path for path in there}.values(), key=os.path.getmtime, reverse=True)
    runs = ", ".join(str(path.parent) for path in newest[:3])
    return "no checkpoint was saved here" + (f" (the newest are in {runs})" if runs else "")


def former_setting(settings):
    """Return an error line if a setting that no longer exists was not at its default, else None."""
    if isinstance(settings, dict) and settings.get("as_released"):
        return (f"as_released={settings['as_released']} is no longer a setting; the models rwkv_released, "
                "retnet_released and gla_released replace it: use the commit that config.json names")


def _read_header(f):
    """Return (the bytes before the tensors, __metadata__) of an open file."""
    length = f.read(8)
    text = f.read(min(int.from_bytes(length, "little"), os.fstat(f.fileno()).st_size))
    return length + text, json.loads(text)["__metadata__"]


def identity(path):
    """Return a checkpoint's (CRC-32, meta) without reading its gigabytes of tensors. The CRC-32 identifies the
    checkpoint. Raises CheckpointError."""
    try:
        with open(regular(path), "rb") as f:
            header = _read_header(f)[1]
            return header["crc32"], json.loads(header["meta"])
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{path}: not readable as a checkpoint ({error})") from error


def _earlier(folder):
    """Return {step: path} of the folder's checkpoint-STEP files, latest step first."""
    names = ((re.fullmatch(r"checkpoint-(\d+)\.safetensors", path.name), path) for path in Path(folder).glob("*"))
    return dict(sorted(((int(name[1]), path) for name, path in names if name), reverse=True))


def candidates(folder):
    """Return the checkpoints that a run can resume from: first the newest, then earlier ones, then the best."""
    folder = Path(folder)
    if (folder / MOVING).exists():  # move_aside was killed, so the remaining files are not a run
        return []
    paths = [folder / NEWEST, *_earlier(folder).values(), folder / BEST]
    return [path for path in paths if path.exists()]


def steps(folder):
    """Return {step: path} of a run's checkpoints. The best is listed only if no other checkpoint has its step. The
    files may be damaged: `load` checks that."""
    paths = {}
    for path in candidates(folder):
        with contextlib.suppress(*MALFORMED):
            paths.setdefault(identity(path)[1]["step"] + 0, path)
    return paths


def load_first(paths, weights=False):
    """Load the first intact checkpoint in `paths`: (path, tensors, meta, [a line for each file skipped]).

    With `weights` the tensors are the model's state_dict only. Raises CheckpointError if no file is intact. Without
    `weights` it also rejects an imported model, which has no optimiser state to resume from.
    """
    errors = []
    for path in paths:
        try:
            tensors, meta = load(path, prefix="model." if weights else "")  # a third of the file
        except CheckpointError as error:
            errors.append(str(error))
            continue
        if weights:
            with fitting(path):
                tensors = unflatten(tensors, dict(meta["skeleton"]["dict"])["model"])
        elif "imported_from" in meta:
            raise CheckpointError(f"{path}: imported from {meta['imported_from']}, so it has weights but no optimizer "
                                  "state: to train it, use --init_from with another out_dir")
        return path, tensors, meta, errors
    raise CheckpointError("; ".join(errors))


class Initial:
    """The checkpoint whose weights a run starts from (init_from) or evaluates (eval_only).

    fields: the dataclass fields of the model's settings. If neither a config file nor the command line sets a field,
    its value comes from the checkpoint; with eval_only, so does the dataset. A resuming run takes these values from its
    own checkpoint, and loads no weights here. Raises ConfigError.
    """

    def __init__(self, config, fields=()):
        self.config = config
        self.path = None
        self.taken = []
        self.changed = []
        if not (config.init_from or config.eval_only):
            return
        resumes = config.resume != "never" and not config.eval_only
        own = list(steps(config.out_dir).values()) if resumes else []
        if own:
            self.meta = identity(own[0])[1]
        else:
            self.path, self.weights, self.meta, self.damaged = load_first(self.places(), weights=True)
        with fitting(self.path or own[0]):
            settings = self.meta.get("config", {})
            if config.eval_only and "dataset" in settings:  # an imported model's checkpoint has no dataset
                fields = [*fields, *(field for field in dataclasses.fields(config) if field.name == "dataset")]
            for name, value in settings_of(settings, fields).items():
                now = getattr(config, name)
                if value == now or name == "backend":  # the backend depends on the machine
                    continue
                if name in config.overrides:
                    self.changed.append(f"{name} was {value!r}, is {now!r}")
                else:
                    setattr(config, name, value)
                    self.taken.append(f"{name}={value}")

    def places(self):
        """Return the paths to try. Raises ConfigError if there are none, or if init_from is in out_dir."""
        place = Path(self.config.init_from or self.config.out_dir)
        paths = [place] if place.is_file() else candidates(place)
        if not paths:
            hint = f"{none_here(place)}: give a run's folder"
            if place.is_dir():
                hint += "; a model in Hugging Face's format must be imported first: " + IMPORT.format(place)
            elif not place.is_absolute() and not str(place).startswith("out/"):
                hint += "; " + DOWNLOAD.format(place)
            raise ConfigError(f"{place}: {hint}")
        if not self.config.eval_only and paths[0].parent.resolve() == Path(self.config.out_dir).resolve():
            raise ConfigError(f"init_from={place} is in out_dir, where this run's checkpoints go: choose another "
                              "out_dir")
        return paths

    def load(self, model, data):
        """Load the weights, if there are any, and return a line about them. Raises ConfigError if they do not fit."""
        if not self.path:
            return ""
        config = self.config
        origin = self.path
        with fitting(origin):
            for key, shown in ("table", table_in_words), ("tokenizer", repr):
                trained = self.meta.get(key)
                given = data.meta.get(key)
                if trained and vocabulary(trained) == vocabulary(given):  # under whatever name
                    break
                if trained and given:
                    raise ConfigError(f"{origin}: these weights were trained with another vocabulary than that of "
                                      f"{config.dataset} ({key} {shown(trained)}, not {shown(given)}): give a "
                                      "--dataset that uses it")
            step = self.meta["step"] + 0  # TypeError unless it is a number
            if wrong := misfit(self.weights, model):
                if self.changed:
                    self.changed.append("leave these settings out, also of config files, to use the checkpoint's")
                raise ConfigError("; ".join([f"{origin}: its weights do not fit this model: {wrong}", *self.changed]))
            model.load_state_dict(self.weights)
        self.weights = None
        taken = [f"taken from it: {', '.join(self.taken)}"] if self.taken else []
        skipped = [f"skipped: {line}" for line in self.damaged]
        scored = [f"scored on {config.dataset}"] if config.eval_only else []
        return "; ".join([*skipped, f"weights from {origin} (step {step})", *taken, *self.changed, *scored])


def table_in_words(table):
    """Describe a tokenizer's table by its size and hash."""
    return f"{len(table)} characters of sha256 {hashlib.sha256(table.encode()).hexdigest()[:12]}"


def settings_of(settings, fields):
    """Return {name: value} for these dataclass fields: the checkpoint's setting, or else the field's default. Raises
    TypeError for a value of the wrong type."""
    given = {}
    for field in fields:
        value = settings.get(field.name, field.default)
        if type(value) is not type(field.default):  # isinstance would take True for 1
            raise TypeError(f"its {field.name} is {str(value)[:80]!r}")
        given[field.name] = value
    return given


class CheckpointManager:
    """Saves a run's checkpoints, of which at least one is always intact.

    checkpoint.safetensors        the newest
    checkpoint-500.safetensors    an earlier one; `keep` checkpoints in all are kept, plus `kept_steps`
    best.safetensors              the one with the lowest validation loss
    """

    def __init__(self, folder, keep=2, kept_steps=()):
        self.folder = Path(folder)
        self.keep = keep
        self.kept_steps = {*kept_steps}
        self.newest_step = None  # step of checkpoint.safetensors, if that is intact
        self.best = None  # [loss, step] of best.safetensors

    def on_resume(self, path, meta):
        """Continue from the checkpoint `path`: link and delete what a kill right after its write left undone."""
        self.best = meta["best"]
        if self.best and self.best[1] == meta["step"]:
            _link(path, self.folder / BEST)
        if path.name == NEWEST:
            self.newest_step = meta["step"]
            self._delete_old(self.newest_step)

    def _delete_old(self, newest_step):
        """Delete checkpoints that are too old. If the run went back to an earlier step, also delete later ones."""
        there = _earlier(self.folder)
        kept = [step for step in there if step < newest_step][:self.keep - 1]
        for step in there.keys() - {*kept} - self.kept_steps:
            there[step].unlink(missing_ok=True)

    def save(self, tensors, meta, loss=None, values=None):
        """Save `tensors` and `meta`, which has "step". `loss`: validation loss. `values`: see the function save.

        Raises TypeError for values that cannot be stored, OSError if the write fails. Earlier checkpoints stay.
        """
        newest = self.folder / NEWEST
        step = meta["step"]
        is_best = loss is not None and math.isfinite(loss) and (self.best is None or loss < self.best[0])
        best = [loss, step] if is_best else self.best
        if self.newest_step is not None and newest.exists():
            _link(newest, self.folder / f"checkpoint-{self.newest_step}.safetensors")
        save(newest, tensors, {**meta, "best": best}, values=values)
        self.newest_step = step
        if is_best:
            _link(newest, self.folder / BEST)
        self.best = best
        self._delete_old(step)


def _link(path, name):
    """Hard-link `name` to the file at `path`, or copy it if the file system has no hard links."""
    with replacing(name) as tmp:
        try:
            os.link(path, tmp)
        except OSError:
            shutil.copyfile(path, tmp)


def flatten(state):
    """Split nested dicts, lists and tuples of tensors, numbers, strings and None into ({name: tensor}, JSON skeleton).

    Lossless, except that subclasses come back as plain types and tied tensors as copies. Raises TypeError for any other
    value, and says where it is.
    """
    tensors = {}
    return tensors, _pack(state, "", tensors)


def _pack(x, name, tensors):
    """Return the skeleton of x, whose name is `name`, and add its tensors to `tensors`."""
    below = lambda key: f"{name}.{key}" if name else str(key)
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, torch.Tensor):
        name = name.encode("ascii", "backslashreplace").decode()
        while name in tensors or name in ("", "__metadata__"):
            name += "'"
        tensors[name] = x
        return {"tensor": name}
    if isinstance(x, tuple):
        return {"tuple": _pack(list(x), name, tensors)}
    if isinstance(x, list):
        return [_pack(v, below(i), tensors) for i, v in enumerate(x)]
    if isinstance(x, dict):
        return {"dict": [[_pack(k, below("key"), tensors), _pack(v, below(k), tensors)] for k, v in x.items()]}
    raise TypeError(f"{name or 'state'}: cannot store a {type(x).__name__} in a checkpoint")


def unflatten(tensors, skeleton):
    """Undo `flatten`. Call it inside `fitting`: a tensor may be missing, or the skeleton malformed."""
    if isinstance(skeleton, list):
        return [unflatten(tensors, part) for part in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if "tensor" in skeleton:
        return tensors[skeleton["tensor"]]
    if "tuple" in skeleton:
        return tuple(unflatten(tensors, skeleton["tuple"]))
    return {unflatten(tensors, key): unflatten(tensors, value) for key, value in skeleton["dict"]}


@contextlib.contextmanager
def fitting(path):
    """`with fitting(path): model.load_state_dict(...)` raises CheckpointError if the state does not fit."""
    try:
        yield
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except (*MALFORMED, RuntimeError, OverflowError, SyntaxError) as error:
        words = " ".join(str(error).split()) or type(error).__name__  # load_state_dict's first line is a heading
        raise CheckpointError(f"{path}: does not fit this run ({words[:200]})") from error


def misfit(weights, model):
    """Return a line about the first tensor in the state_dict `weights` that does not fit the model, or None. Values
    from get_extra_state are not compared, since they may have any type and shape."""
    saved = _shapes(weights)
    expected = _shapes(model.state_dict())
    for name in {**expected, **saved}:
        before = saved.get(name, "missing")
        now = expected.get(name, "missing")
        if before != now:
            return f"{name} is {before} in the checkpoint, {now} in the model"


def _shapes(state):
    return {name: tuple(t.shape) for name, t in state.items() if "_extra_state" not in name}


def rng_state():
    """Return the state of every random generator, for `flatten`: Python, NumPy, and PyTorch on the CPU and this
    process's GPU. Without a GPU the list "cuda" is empty. All ranks draw the same numbers, so rank 0's state serves
    for all."""
    name, key, *rest = np.random.get_state()
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": (name, torch.from_numpy(key), *rest),
            "torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state):
    """Restore what `rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
