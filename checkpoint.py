"""Checkpoints: saved whole or not at all, checked when loaded, nothing unpickled.

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng_state()}
    tensors, skeleton = flatten(state)
    save("out/run/checkpoint.safetensors", tensors, {"step": 10, "skeleton": skeleton})
    tensors, meta = load("out/run/checkpoint.safetensors")
    state = unflatten(tensors, meta["skeleton"])

A run's folder holds several, kept by `Keeper` and written while training goes on:

    checkpoint.safetensors          the newest
    checkpoint-500.safetensors      the one before it, saved after step 500; as many of these as are to be kept
    best.safetensors                of all that were saved, the one with the lowest validation loss

A checkpoint is a safetensors file that any safetensors reader opens: tensors as bytes, the rest as JSON in its header.
The header also holds the file's length and a CRC-32 over every byte of the file (its own 8 digits read as zeros).
CRC-32 because the enemy is a torn write or a bad disk: it finds any damage within 32 bits, all else but for one in
4 billion, at 4 GB/s on one core where blake2b does 0.9. It is no signature: trust the folder, not the sum.

The surprise: we write the format ourselves and read it with the library. safetensors 0.8 writes to a file of its own
random name and renames that: a kill leaves it behind, unrecognisable, the mode is 0600, and a full disk is no OSError.
"""
import contextlib
import errno
import json
import math
import os
import random
import re
import shutil
import threading
import zlib
from pathlib import Path

import numpy as np
import safetensors
import torch

from records import sync_folder

VERSION = 1
NEWEST, BEST = "checkpoint.safetensors", "best.safetensors"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
          torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"}
START = '{"__metadata__":{"format":"longhorn checkpoint","version":"%d","bytes":"%016d","crc32":"%08x",'
HEAD = re.compile(rb'\{"__metadata__":\{"format":"longhorn checkpoint","version":"(\d+)",'
                  rb'"bytes":"(\d{16})","crc32":"([0-9a-f]{8})",')


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one line: the file, what is wrong, the way out."""


def save(path, tensors, meta):
    """Write {name: tensor} and JSON-able `meta` to `path`, so that `path` is at any moment the old file or the new.

    Written beside (`path.tmp-<pid>`), flushed to disk, renamed over, folder flushed. Tensors of any device, stride or
    sharing are copied to the CPU one at a time, each in full. One writer to a path at a time.
    Raises TypeError for what cannot be stored, OSError for the disk's refusals; then the old file is untouched.
    """
    path = os.fspath(path)
    for name, t in tensors.items():
        if not isinstance(name, str) or name == "__metadata__" or re.search("[\ud800-\udfff]", name):
            raise TypeError(f"{path}: cannot store a tensor under the name {name!r}")
        if not isinstance(t, torch.Tensor) or t.dtype not in DTYPES or t.layout != torch.strided or t.is_meta:
            what = f"{t.dtype}, {t.layout}, on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
            raise TypeError(f"{path}: cannot store {name!r}: {what}")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    entries, end = {}, 0
    for name in order:
        t = tensors[name]
        start, end = end, end + t.numel() * t.element_size()
        entries[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    rest = f'"meta":{json.dumps(json.dumps(meta))}}}' + "".join(
        f",{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries.items()) + "}"
    rest += " " * (-(len(START % (VERSION, 0, 0)) + len(rest)) % 8)
    header = lambda crc: (START % (VERSION, total, crc) + rest).encode("ascii")
    length = len(START % (VERSION, 0, 0)) + len(rest)
    total = 8 + length + end
    _remove_leftovers(path)
    tmp = f"{path}.tmp-{os.getpid()}"
    try:
        with open(tmp, "wb") as f:
            crc = zlib.crc32(length.to_bytes(8, "little") + header(0))
            f.write(length.to_bytes(8, "little") + header(0))
            for name in order:
                t = tensors[name].detach().cpu().contiguous()
                # not reshape(-1): it leaves a lone element its odd stride, and view() then refuses
                buffer = t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy()  # (bytes,)
                crc = zlib.crc32(buffer, crc)
                f.write(buffer)
            f.seek(8)
            f.write(header(crc))
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)
        raise
    sync_folder(os.path.dirname(path) or ".")  # the rename itself is on disk only now


def load(path, device="cpu", beginning=""):
    """Read a checkpoint: ({name: tensor on `device`}, meta). Every byte is checked before a tensor is made.

    With `beginning`, of the tensors only those whose name begins so.
    Raises CheckpointError, one line, for a file that is missing, cut short, damaged, of another kind (pickles of
    torch.save among them: never unpickled), of an unknown format version, or whose meta is no dict.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            first = f.read(8 + 256)
            _check_kind(path, first, size)
            version, total, crc = HEAD.match(first, 8).groups()
            if int(version) != VERSION:
                raise CheckpointError(f"{path}: format version {int(version)} is unknown here (this code reads "
                                      f"{VERSION}): load it with the code that wrote it")
            if size != int(total):
                raise CheckpointError(f"{path}: {'cut short' if size < int(total) else 'too long'}: {size} bytes where "
                                      f"its header says {int(total)}; use an earlier checkpoint")
            at = HEAD.match(first, 8).start(3)
            found = zlib.crc32(first[:at] + b"0" * 8 + first[at + 8:])
            while chunk := f.read(1 << 22):
                found = zlib.crc32(chunk, found)
            if found != int(crc, 16):
                raise CheckpointError(f"{path}: checksum mismatch ({found:08x} where {int(crc, 16):08x} was saved): "
                                      "the file is damaged; use an earlier checkpoint")
        with safetensors.safe_open(path, "pt", device=str(device)) as f:
            # cloned: on the CPU the library's tensors are windows onto the file, which may change under us
            tensors = {name: f.get_tensor(name).clone() for name in f.keys() if name.startswith(beginning)}
            return tensors, _read_meta(path, f.metadata())
    except OSError as error:
        hint = ": no checkpoint was saved here" if error.errno == errno.ENOENT else ""
        raise CheckpointError(f"{path}: {error.strerror or error}{hint}") from error
    except (safetensors.SafetensorError, TypeError) as error:  # TypeError: a shape beyond 64 bits
        raise CheckpointError(f"{path}: not readable as safetensors: {' '.join(str(error).split())}") from error


def _read_meta(path, header):
    try:
        meta = json.loads(header["meta"])
    except (KeyError, ValueError, RecursionError):  # the sum is right, so it was written so
        meta = None
    if not isinstance(meta, dict):
        raise CheckpointError(f"{path}: not a checkpoint of this project (its header holds no meta that can be read)")
    return meta


def _check_kind(path, first, size):
    if first[:4] == b"PK\x03\x04" or first[:1] == b"\x80" and first[8:9] != b"{":
        raise CheckpointError(f"{path}: a pickle (written by torch.save?), which could run code when loaded: refused, "
                              "not opened; checkpoints of this project are safetensors files")
    if not HEAD.match(first, 8):
        start = (START % (VERSION, 0, 0)).encode()[:30]
        if size < 8 + len(START % (VERSION, 0, 0)) and first[8:38] == start[:max(size - 8, 0)]:
            raise CheckpointError(f"{path}: cut short: {size} bytes, not even a header; use an earlier checkpoint")
        raise CheckpointError(f"{path}: not a checkpoint of this project (or its header is damaged)")


def _remove_leftovers(path):
    """Delete `path.tmp-<pid>` of processes that were killed while writing: each may be as large as a checkpoint."""
    folder, name = os.path.split(path)
    for entry in os.listdir(folder or "."):
        pid = entry.removeprefix(name + ".tmp-")
        if pid != entry and pid.isdecimal():
            try:
                os.kill(int(pid), 0)  # signal 0 asks only whether the process lives
            except (ProcessLookupError, OverflowError):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, entry))
            except PermissionError:
                pass  # alive, another user's


def _second_name(path, name):
    """Give the file at `path` a second name, in place of what bears it; where there are no hard links, a copy."""
    _remove_leftovers(name)
    tmp = f"{name}.tmp-{os.getpid()}"
    try:
        try:
            os.link(path, tmp)
        except OSError:
            with open(path, "rb") as source, open(tmp, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 22)
                copy.flush()
                os.fsync(copy.fileno())
        os.replace(tmp, name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)  # a rename between two names of one file leaves both
    sync_folder(os.path.dirname(name) or ".")


def _earlier(folder):
    """{step: path} of the checkpoints before the newest."""
    found = ((re.fullmatch(r"checkpoint-(\d+)\.safetensors", p.name), p) for p in Path(folder).glob("checkpoint-*.safetensors"))
    return {int(match[1]): p for match, p in found if match}


def candidates(folder):
    """The checkpoints to go on from, in that order: the newest, those before it, and the best."""
    earlier = _earlier(folder)
    found = [Path(folder) / NEWEST, *(earlier[step] for step in sorted(earlier, reverse=True)), Path(folder) / BEST]
    return [path for path in found if path.exists()]


def load_first(paths, weights=False):
    """Load the first of `paths` that is whole: (path, tensors, meta, [a line on each that had to be passed over]).

    With `weights` the tensors are the model's state_dict alone. Raises CheckpointError where none is whole; and, but for its
    weights, where that is an imported model: there is no run to go on with.
    """
    errors = []
    for path in paths:
        try:
            tensors, meta = load(path, beginning="model." if weights else "")  # a third of what is there
        except CheckpointError as error:
            errors.append(str(error))
            continue
        if weights:
            with fitting(path):
                tensors = unflatten(tensors, dict(meta["skeleton"]["dict"])["model"])
        elif "imported_from" in meta:
            raise CheckpointError(f"{path}: imported from {meta['imported_from']}, weights without an optimiser's state, for "
                                  "sample.py, export.py and --init_from: no run can be resumed from it; choose another out_dir")
        return path, tensors, meta, errors
    raise CheckpointError(errors[0] + (f" (the {len(errors) - 1} others here cannot be read either)" if errors[1:] else ""))


class Keeper:
    """Saves the checkpoints of one run's folder, keeps the last `keep` of them and the best, and deletes the others.

    With `background`, `save` returns when the tensors are copied to memory of its own (as much again as a checkpoint), and
    a thread writes them; then `result` says how it ended. A good checkpoint stands under some name at every moment.
    """

    def __init__(self, folder, keep=2, background=True):
        self.folder, self.keep, self.background = Path(folder), keep, background
        self.newest = None  # step of checkpoint.safetensors, where that is a good one
        self.best = None  # [loss, step] of best.safetensors
        self.thread, self.ended, self.copies = None, None, {}

    def went_on_from(self, path, meta):
        """Tell it which checkpoint the run was resumed from."""
        self.newest, self.best = meta["step"] if path.name == NEWEST else None, meta.get("best")
        if self.best and self.best[1] == meta["step"] and path.name != BEST:
            _second_name(path, self.folder / BEST)  # the kill may have come between the two
        if self.newest is not None:
            self._delete_others(self.newest)  # or here

    def _delete_others(self, step):
        """Keep of the earlier checkpoints those that belong beside the newest, of this step."""
        earlier = _earlier(self.folder)
        kept = sorted(s for s in earlier if s < step)[-(self.keep - 1):] if self.keep > 1 else []
        for s, path in earlier.items():
            if s not in kept:  # too old; or beyond this step, from before the run fell back
                path.unlink(missing_ok=True)

    def save(self, state, meta, loss=None, first=lambda: None):
        """Save `state` (see flatten) and `meta`, which has "step"; `loss` is the validation loss of this state, if known.

        Waits for the write before it, whose `result` should have been asked for. `first` is called before anything is
        written. Raises TypeError for what cannot be stored.
        """
        self._join()
        tensors, skeleton = flatten(state)
        is_best = loss is not None and math.isfinite(loss) and (self.best is None or loss < self.best[0])
        best = [loss, meta["step"]] if is_best else self.best
        meta = {**meta, "skeleton": skeleton, "best": best}
        if not self.background:
            return self._write(tensors, meta, is_best, first)
        try:
            for name, t in tensors.items():
                copy = self.copies.get(name)
                if copy is None or copy.shape != t.shape or copy.dtype != t.dtype:
                    copy = self.copies[name] = torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
                copy.copy_(t.detach(), non_blocking=True)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            copies = {n: self.copies[n] for n in tensors}
            self.thread = threading.Thread(target=self._write, args=(copies, meta, is_best, first), name="checkpoint")
            self.thread.start()  # no daemon: an error elsewhere does not cut a write short
        except (RuntimeError, MemoryError):  # no memory for the copies, or for a thread: then without them
            self.thread, self.copies = None, {}
            self._write(tensors, meta, is_best, first)

    def _write(self, tensors, meta, is_best, first):
        newest, step = self.folder / NEWEST, meta["step"]
        try:
            first()
            if self.keep > 1 and self.newest is not None and newest.exists():
                _second_name(newest, self.folder / f"checkpoint-{self.newest}.safetensors")
            save(newest, tensors, meta)
            self.newest = step
            if is_best:
                _second_name(newest, self.folder / BEST)
            self.best = meta["best"]
            self._delete_others(step)
            self.ended = step, None
        except Exception as error:
            self.ended = step, error

    def _join(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def result(self, wait=False):
        """(step, None or the OSError) of the last write, once; None while it goes on. With `wait`, waits for its end."""
        if wait:
            self._join()
        if self.thread is not None and self.thread.is_alive():
            return None
        ended, self.ended = self.ended, None
        if ended and ended[1] is not None and not isinstance(ended[1], OSError):
            raise ended[1]
        return ended


def flatten(state):
    """Take nested dicts, lists and tuples apart into ({name: tensor}, skeleton); the skeleton is JSON-able.

    Lossless for tensors, numpy arrays of numbers, int, float (inf and nan too), bool, None, str, and dict keys of
    these. A dict or tuple of a subclass comes back plain, tied tensors come back as copies.
    Raises TypeError, naming the place, for anything else: nothing is ever pickled.
    """
    tensors = {}

    def put(tensor, where):
        name = ".".join(str(key).encode("ascii", "backslashreplace").decode() for key in where)
        while name in tensors or name in ("", "__metadata__"):
            name += "'"
        tensors[name] = tensor
        return name

    def pack(x, where):
        if isinstance(x, (np.bool_, np.integer, np.floating)):
            x = x.item()
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, torch.Tensor):
            return {"tensor": put(x, where)}
        if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
            data = torch.frombuffer(bytearray(x.tobytes()), dtype=torch.uint8) if x.size else torch.empty(0).byte()
            return {"array": put(data, where), "dtype": x.dtype.str, "shape": list(x.shape)}
        if isinstance(x, list):
            return [pack(v, (*where, i)) for i, v in enumerate(x)]
        if isinstance(x, tuple):
            return {"tuple": [pack(v, (*where, i)) for i, v in enumerate(x)]}
        if isinstance(x, dict):
            return {"dict": [[pack(k, (*where, "key")), pack(v, (*where, k))] for k, v in x.items()]}
        raise TypeError(f"{'.'.join(map(str, where)) or 'state'}: cannot store a {type(x).__name__} in a checkpoint")

    return tensors, pack(state, ())


def unflatten(tensors, skeleton):
    """The state that `flatten` took apart. Raises CheckpointError if a tensor is missing or the skeleton is foreign."""
    def build(x):
        if isinstance(x, list):
            return [build(v) for v in x]
        if not isinstance(x, dict):
            return x
        if "tensor" in x:
            return tensors[x["tensor"]]
        if "array" in x:
            data = tensors[x["array"]].cpu().numpy().tobytes()
            return np.frombuffer(data, np.dtype(x["dtype"])).reshape(x["shape"]).copy()
        return tuple(map(build, x["tuple"])) if "tuple" in x else {build(k): build(v) for k, v in x["dict"]}

    try:
        return build(skeleton)
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError) as error:  # SyntaxError: np.dtype
        raise CheckpointError(f"checkpoint and skeleton do not fit: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def fitting(path):
    """`with fitting(path): model.load_state_dict(...)`: putting a state back that does not fit raises CheckpointError, one line.

    Memory that runs out is no misfit, and passes.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        words = " ".join(str(error).split()) or type(error).__name__  # the first line of load_state_dict's says nothing
        raise CheckpointError(f"{path}: does not fit this run ({words[:200]})") from error


def misfit(weights, model):
    """Where a state_dict does not fit a model: a line on the first tensor that differs; None where it does."""
    wanted = model.state_dict()
    for name in {**wanted, **weights}:
        there, here = (str(tuple(state[name].shape)) if name in state else "missing" for state in (weights, wanted))
        if there != here:
            return f"{name} is {there} there, {here} here"


def rng_state():
    """State of every random generator here, for flatten: python, numpy, torch's CPU and each CUDA device."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_rng_state(state):
    """Put back what `rng_state` took. Of the CUDA devices, those that both machines have."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available():
        for i, s in enumerate(state["cuda"][:torch.cuda.device_count()]):
            torch.cuda.set_rng_state(s.cpu(), i)
