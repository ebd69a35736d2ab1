"""What goes wrong in a week of training, and what train.py does about it.

    another process silent    Peers         within timeout_minutes a line says whose answer is missing
    a loss that leaps         roll_back     loss > spike_factor x median of the last 50: back to the last good checkpoint
    one that is not finite    skip          leaves the step out; give_up after max_bad_steps of either in a row
    memory runs out           most_that_fit halves the micro-batch until forward and backward fit
    a data file changes       unchanged     before a step reads it
    a signal                  Stop          finish the step, save, exit
    two runs in one folder    take          the second is refused

The surprise: an error's traceback holds the activations of every frame it names. Memory that ran out is free again only
when the error is forgotten, so the search for a smaller micro-batch begins after the `except` block, not in it.

`run` is train.py's Run, whose state these functions change.

    python -m pytest tests/test_chaos.py          make chaos: the same, for long
"""

import contextlib
import errno
import math
import os
import platform
import shlex
import signal
import statistics
import sys
import threading
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
from configurator import ConfigError
from data.loader import DataError

SPIKE_MEDIAN, SPIKE_LEAST = 50, 10  # losses that a spike is measured by: the last so many, once there are so many
SMALLER = "choose a smaller block_size or model, or --dtype=bfloat16"


class Stopped(RuntimeError):
    """A run that cannot go on by itself; the message, one line, says why, what is saved, and how to go on."""


class Lost(Stopped):
    """Another process is gone or silent: the same command may well succeed, so that the exit code is one to start again by."""

    EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h


def is_spike(loss, recent, factor):
    """Whether a finite loss is above `factor` x the median of the recent ones; never while there are few, or factor is 0."""
    return bool(factor) and len(recent) >= SPIKE_LEAST and math.isfinite(loss) and loss > factor * statistics.median(recent)


class Peers:
    """The other processes of the run: how to join them, and who of them does not answer."""

    store, seconds = None, 5.0  # of the roll call

    @classmethod
    def join(cls, backend, wait):
        """Join them; `wait` is the timeout of whatever is done together. Raises Lost where they do not all come."""
        try:
            store, rank, world = next(dist.rendezvous("env://", timeout=wait))
            cls.store = fresh(store, rank, world, wait)
            own = dist.PrefixStore("group", cls.store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=wait)
        except Stopped:
            raise
        except RuntimeError as error:  # dist's errors are RuntimeErrors, but not all of them are DistErrors
            raise Lost(f"rank {os.environ['RANK']}: not all {os.environ['WORLD_SIZE']} processes met within {wait} "
                       f"({first_line(error)}): start them all, or raise timeout_minutes") from None

    @classmethod
    def are_meant(cls, error):
        """Whether a RuntimeError tells of an exchange between processes that failed."""
        return cls.store is not None and (isinstance(error, dist.DistError) or "gloo" in str(error))

    @classmethod
    def lost(cls, error):
        """A line on an exchange that failed: who says it, and who did not answer. Takes a roll call of some seconds."""
        rank, world, present, reached = dist.get_rank(), dist.get_world_size(), {dist.get_rank()}, []

        def call():
            with contextlib.suppress(RuntimeError):
                cls.store.set(f"here/{rank}", "")
                while len(present) < world:
                    present.update(r for r in range(world) if cls.store.check([f"here/{r}"]))
                    reached.append(True)
                    time.sleep(0.05)

        thread = threading.Thread(target=call, daemon=True)  # a store whose process hangs would not let go of us
        thread.start()
        thread.join(cls.seconds)
        missing = [r for r in range(world) if r not in present] if reached else [0]  # rank 0, or torchrun, holds the store
        who = (f"no answer from rank {', '.join(map(str, missing))} within {cls.seconds:g} s" if missing else
               "all others answer by now")
        return (f"rank {rank} on {platform.node()}: {who} ({first_line(error)}); the run goes on from its last checkpoint with "
                "the same line and --resume=auto, which torchrun --max-restarts gives by itself")


def first_line(error, limit=200):
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:limit]


def leave(error):
    """End this process with the exit code of Lost, once a checkpoint on its way to the disk is there. Without Python's own exit:
    the threads of a broken process group would abort it, now and then."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    with contextlib.suppress(OSError):
        print(f"train.py: error: {error}", file=sys.stderr, flush=True)
    os._exit(Lost.EXIT_CODE)


def fresh(store, rank, world, wait):
    """A part of the store that no earlier attempt wrote to.

    torchrun keeps one store over its restarts, and PyTorch 2.13 puts every attempt's addresses under the same names: who
    reads before the other has written connects to the dead. So each process asks under a name of its own, just made up, and
    rank 0 answers whoever asks, until all who are alive have taken up its answer.
    """
    mine, until = uuid.uuid4().hex, time.monotonic() + wait.total_seconds()
    store.set(f"longhorn/asks/{rank}", mine)
    if rank:
        token = store.get(f"longhorn/{mine}").decode()
        store.set(f"longhorn/{token}/{rank}", "here")
        return dist.PrefixStore(token, store)
    while missing := [r for r in range(1, world) if not store.check([f"longhorn/{mine}/{r}"])]:
        if time.monotonic() > until:
            raise Lost(f"no answer from rank {', '.join(map(str, missing))} within {wait}: start it, or raise timeout_minutes")
        for r in missing:
            if store.check([f"longhorn/asks/{r}"]):
                store.set(f"longhorn/{store.get(f'longhorn/asks/{r}').decode()}", mine)
        time.sleep(0.02)
    return dist.PrefixStore(mine, store)


def out_of_memory(error):
    """Whether an exception says that memory ran out: PyTorch has a class of its own for a GPU's, and words only for a CPU's."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in str(error).lower() for words in ("not enough memory", "can't allocate memory", "out of memory"))


@contextlib.contextmanager
def memory_or(line):
    """`with memory_or("what to do"): ...`: memory that runs out within ends the run with that line."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise Stopped(line) from None


def fits(model, windows, config, autocast, held=0):
    """Whether forward and backward of a micro-batch of so many windows fit in memory, beside `held` bytes for other things."""
    device, parameters, fit = next(model.parameters()).device, list(model.parameters()), True
    try:
        rest = torch.empty(held, dtype=torch.uint8, device=device)
        x = torch.zeros(windows, config.block_size, dtype=torch.long, device=device)
        with autocast:
            loss = model(x, x, loss_only=True)[1]  # as train.py does
        torch.autograd.grad(loss, parameters, allow_unused=True)  # not backward(): other processes are not to hear of it
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        fit = False
    rest = x = loss = None  # noqa: F841  for the next try
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return fit


def most_that_fit(model, windows, config, autocast, optimizer):
    """The largest of windows, windows / 2, windows / 4 ... that fit as a micro-batch; 0 where not even one does."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    held = size + (0 if optimizer.state else 2 * size)  # gradients that add up, and what AdamW will keep
    while windows and not fits(model, windows, config, autocast, held):
        windows //= 2
    return windows


def too_large(run, windows):
    """A line on a micro-batch of so many windows that memory did not hold: what it does hold, and the command line for it."""
    size = run.config.block_size
    text = f"a micro-batch of {windows} x {size} tokens does not fit in memory"
    less = most_that_fit(run.model, windows // 2, run.config, run.autocast, run.optimizer)
    if not less:
        return f"{text}, nor does a smaller one: {SMALLER}"
    return (f"{text}; {less} x {size} does, with {-(-run.per_rank // less)} micro-batches a step and the same result: "
            + again_with(run.world, f"--batch_size={less}", "--resume=auto") + " (--auto_micro_batch finds it by itself)")


def smaller_micro_batch(run, step):
    """Goes on with half the micro-batch where that is wanted and can be done; raises Stopped with `too_large`'s line if not."""
    run.optimizer.zero_grad(set_to_none=True)
    size, auto = min(run.batch_size, run.per_rank), run.config.auto_micro_batch
    if not auto or run.world > 1 or run.batch_size == 1:  # of several processes the others are a step ahead
        raise Stopped(f"step {step}: {too_large(run, size)}")
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    run.batch_size = -(-size // 2)
    run.bar.line(f"step {step}: memory does not hold the micro-batch that it held before: {run.batch_size} from here on")
    run.record("micro_batch", step, batch_size=run.batch_size)


def roll_back(run, step, loss):
    """Take back the weights of the last checkpoint; of the one before it when a spike comes right after the last one."""
    run.settle(wait=True)
    if run.world > 1:
        dist.barrier()  # what the others load is written
    there = [p for p in checkpoint.candidates(run.out) if p.name != checkpoint.BEST]
    median = statistics.median(run.recent)
    said = (f"step {step}: loss {loss:.4f} is above spike_factor {run.config.spike_factor:g} x the median of the last "
            f"{len(run.recent)} steps, {median:.4f}")
    if not there:
        run.bar.line(f"{said}: step skipped, there is no checkpoint to go back to")
        to = None
    else:
        origin, tensors, meta, damaged = checkpoint.load_first(there[min(run.bad, len(there)) - 1:])
        run.restore(tensors, meta)
        to = meta["step"]
        if origin.name != checkpoint.NEWEST:
            run.keeper.newest = None  # it led here
        for line in damaged:
            run.bar.line(f"passed over: {line}")
        run.bar.line(f"{said}: back to the weights of {origin}, step {to}; the batches of the {step - to} steps since are passed "
                     "over")
    if run.world > 1:
        seen = [None] * run.world
        dist.all_gather_object(seen, to)
        if len(set(seen)) > 1:
            raise Stopped(f"step {step}: the ranks went back to checkpoints of different steps ({seen}): out_dir must be the "
                          "same on every node")
    if run.is_main:
        run.record("rollback", step, to_step=to, train_loss=loss, median_loss=median)


def skip(run, step, windows, loss, norm):
    """Count a step that is left out: its loss or its gradient is not finite."""
    overflow = run.scaler.is_enabled() and math.isfinite(loss) and run.scaler.get_scale() > 1  # float16 finding its scale
    run.skipped, run.bad = run.skipped + 1, run.bad + (not overflow)
    run.bar.line(f"step {step}: loss {loss}, gradient norm {norm}: step skipped ({run.bad} in a row)")
    if run.is_main:
        run.record("skipped", step, windows=[int(w) for w in windows[:8]], train_loss=loss, grad_norm=norm)


def give_up(run, step, windows):
    """The end of a run whose last max_bad_steps steps were all left out, or spikes."""
    run.settle(wait=True)
    run.bar.close()
    saved = f"{run.path}, step {run.saved_at}" if run.path.exists() else "none"
    raise Stopped(
        f"stopped at step {step}: loss or gradient not finite, or a spike, {run.bad} times in a row; the last batch began at "
        f"token {int(windows[0]) * run.config.block_size:,} of {run.data.folder / 'train.bin'}; the last good checkpoint is "
        f"{saved}; try a lower learning_rate")


def stamp(tokens):
    """What changes when the file behind a memmap is replaced, cut or written to."""
    try:
        s = os.stat(tokens.filename)
        return s.st_ino, s.st_size, s.st_mtime_ns
    except OSError as error:
        return error.strerror


def unchanged(tokens, stamps):
    """Raises DataError where a split's file is not the one that the run began with: a truncated one would end the process
    without a word, another one would be learned from."""
    now, before = stamp(tokens), stamps[tokens.filename]
    if now != before:
        what = now if isinstance(now, str) else f"{before[1]:,} bytes then, {now[1]:,} now" if now[1] != before[1] else \
            "replaced" if now[0] != before[0] else "written to"
        raise DataError(f"{tokens.filename} was changed under the running job ({what}): put back the file that was there, or "
                        "prepare it again, and go on from the last checkpoint with --resume=auto")


def again_with(world, *changes):
    """The command line that goes on from here with some settings changed."""
    names = tuple(change.partition("=")[0] for change in changes)
    if world > 1:
        return "the same torchrun line with " + " ".join(changes)
    return shlex.join([sys.executable, *(a for a in sys.argv if a.partition("=")[0] not in names), *changes])


def say(text):
    """Print a line, if that can be done: what standard output goes to may be a file on the full disk."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


class Stop:
    """Turns the first SIGTERM, SIGUSR1 (Slurm's warning) or SIGINT into a request to finish the step. A SIGINT after that ends
    the process at once, whatever it is doing: a thread hears of it, since Python's own handlers wait for a collective to return.
    """

    def __init__(self):
        self.signal = None
        heard, tell = os.pipe()
        os.set_blocking(tell, False)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self.ask)
        threading.Thread(target=self.listen, args=(heard,), daemon=True).start()

    def ask(self, number, frame):
        self.signal = self.signal or number

    def listen(self, heard):
        asked = False
        while numbers := os.read(heard, 1):
            if asked and numbers[0] == signal.SIGINT:
                with contextlib.suppress(OSError):
                    os.write(2, b"interrupted at once: nothing saved since the last checkpoint\n")
                os._exit(130)  # an exit would wait for a checkpoint that is being written, and for other processes
            asked = asked or numbers[0] in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", 0))


def take(out):
    """Lock an out_dir for this process, however it ends: two runs in one folder would mix their records."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = open(out.parent / f".{out.name}.lock", "w")
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not a Unix
        pass
    except BlockingIOError:
        raise ConfigError(f"another run writes to {out}: wait for it, or choose another out_dir") from None
    except OSError as error:  # some network file systems have no locks
        say(f"{out} cannot be locked ({error.strerror}): see to it that no other run writes there")
    return lock


@contextlib.contextmanager
def writing_to(out):
    """`with writing_to(out): ...`: what the disk refuses within becomes a ConfigError, one line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write to {out} ({error.strerror}): choose another out_dir") from None


def keep_earlier(out):
    """Move an earlier run's folder aside: nothing is overwritten. Into itself, where it is a mount point and has to stay."""
    if not (out / "log.jsonl").exists():
        return
    number = next(n for n in range(1, 10**6) if not Path(f"{out}.{n}").exists() and not (out / f"earlier.{n}").exists())
    kept = Path(f"{out}.{number}")
    try:
        os.rename(out, kept)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        kept = out / f"earlier.{number}"
        kept.mkdir()
        for entry in list(out.iterdir()):
            if not entry.name.startswith("earlier."):
                os.rename(entry, kept / entry.name)
    print(f"the earlier run is kept as {kept}", flush=True)
