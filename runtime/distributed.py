"""A run's processes: devices, torchrun's process group, training steps across processes, unresponsive processes.

    torchrun --standalone --nproc_per_node=8 train.py config/longhorn_350m.py
    torchrun --standalone --nproc_per_node=8 train.py config/longhorn_1b3.py --parallel=fsdp --recompute=every_other

ddp keeps a copy of the model on every process. fsdp keeps a shard of every parameter, gradient and optimiser state on
each process, and gathers a layer when it is needed (PyTorch's FSDP2). hsdp shards within each machine and keeps a copy
on every machine. For fsdp and hsdp, a model only needs `layers`, a list of modules.

Collectives time out after timeout_minutes. Every process then prints one line that names the ranks that did not answer,
and exits with code 75 (EX_TEMPFAIL). `torchrun --max-restarts` restarts them all.
"""

import contextlib
import ctypes
import datetime
import functools
import gc
import itertools
import math
import os
import platform
import shlex
import sys
import threading
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from common.errors import ConfigError, env_int, main_error, printable
from common.torch_private import allow_graphs, average_gradients
from kernels.ops import same_documents
from runtime import checkpoint as saved
from runtime import records

EXIT_RETRYABLE = 75  # EX_TEMPFAIL of sysexits.h
ROLL_CALL_SECONDS = 5.0
M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
M_MMAP_THRESHOLD = -3
STORE = None  # the process group's store; after an error it shows which ranks are alive


class Lost(RuntimeError):
    """Raised if another process is gone or silent. The same command may succeed next time, so the exit code is
    EXIT_RETRYABLE."""


def launch(prog, main):
    """Run main(argv) as a program; errors become one line and an exit code. Returns the exit code."""
    with main_error(prog):
        records.files_at_start = records.code_identity()["code_files"]
        try:
            code = main(sys.argv[1:])
            leave()
            return code
        except Lost as error:
            exit_retryable(prog, error)
        except RuntimeError as error:
            if STORE is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            exit_retryable(prog, who_is_missing(error))


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def say(line):
    """Print a line on rank 0, unless it is empty."""
    if line and rank() == 0:
        with contextlib.suppress(OSError):  # stdout may go to a file on a full disk
            print(printable(line), flush=True)


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def named_device(name):
    """Return the torch.device for "auto", "cpu", "cuda" (this process's GPU) or "cuda:1". Raises ConfigError if it is
    missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{env_int('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.zeros(1, device=device).item()  # "meta" is a known device, but holds no numbers
    except (RuntimeError, AssertionError, ValueError, ImportError, AttributeError):
        raise ConfigError(f"device {name!r} is unknown or missing: use --device=cpu; cuda, cuda:1 ... need a GPU "
                          "and a CUDA build of torch") from None
    return device


def open_device(config):
    """Return this process's device. If torchrun started the process, also join the process group.

    Reads config.device, config.timeout_minutes and, if there is one, config.parallel. Raises ConfigError for a missing
    device, Lost if not all processes join.
    """
    device = named_device(config.device)
    world = env_int("WORLD_SIZE", 1, least=1)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    else:
        keep_freed_memory(getattr(config, "parallel", "ddp") == "ddp")
    if world > 1:
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            per_process = (os.cpu_count() or 1) // env_int("LOCAL_WORLD_SIZE", world, least=1)
            torch.set_num_threads(max(1, per_process))
        join("nccl" if device.type == "cuda" else "gloo", datetime.timedelta(minutes=config.timeout_minutes))
    return device


def machine(device):
    """Describe the device that this process computes on, for config.json."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": str(device), "device_name": name, "threads": torch.get_num_threads()}


def memory_bytes(device):
    """Total memory of a GPU, or of this machine for "cpu", in bytes."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pick_dtype(name, device):
    """Return the dtype for autocast; 'auto' means bfloat16 on hardware that multiplies it natively, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    with contextlib.suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
        if "avx512_bf16" in flags or "amx_bf16" in flags:
            return torch.bfloat16
    return torch.float32


def keep_freed_memory(keep=True):
    """Keep freed activations in the process. If they went back to the OS, every step would cost a page fault per 4 KB.
    keep=False returns them, for sharded models, which gather layers many times per step."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    if not keep:
        mallopt(M_MMAP_THRESHOLD, 1 << 18)
    elif mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25):  # the limit before glibc 2.35
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def join(backend, wait):
    """Join the process group; `wait` (timedelta) is the timeout of every collective. Raises Lost or ConfigError."""
    global STORE
    env_int("RANK", 0, most=env_int("WORLD_SIZE", 1) - 1)
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=wait))
        STORE = new_store_prefix(store, rank, world, wait)
        group = dist.PrefixStore("group", STORE)
        dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=wait)
    except Lost:
        raise
    except ValueError as error:
        raise ConfigError(f"{first_line(error)}: start all processes with torchrun") from None
    except RuntimeError as error:  # all of dist's errors are RuntimeErrors, but not all are DistErrors
        raise Lost(f"rank {os.environ['RANK']}: not all {os.environ['WORLD_SIZE']} processes met within {wait} "
                   f"({first_line(error)}): start them all, or raise timeout_minutes") from None


def new_store_prefix(store, rank, world, wait):
    """Return a PrefixStore whose prefix no earlier attempt has used.

    torchrun keeps one store across restarts, and PyTorch 2.13 stores every attempt's addresses under the same names. A
    process that reads too early would connect to a dead process. So every process asks under a fresh name, and rank 0
    answers until every process has read the answer.
    """
    name = uuid.uuid4().hex
    until = time.monotonic() + wait.total_seconds()
    store.set(f"longhorn/asks/{rank}", name)
    if rank:
        prefix = store.get(f"longhorn/{name}").decode()
        store.set(f"longhorn/{prefix}/{rank}", "here")
        return dist.PrefixStore(prefix, store)
    while missing := [r for r in range(1, world) if not store.check([f"longhorn/{name}/{r}"])]:
        if time.monotonic() > until:
            raise Lost(f"no answer from rank {listed(missing)} within {wait}: start it, or raise timeout_minutes")
        for r in missing:
            if store.check([f"longhorn/asks/{r}"]):
                store.set(f"longhorn/{store.get(f'longhorn/asks/{r}').decode()}", name)
        time.sleep(0.02)
    return dist.PrefixStore(name, store)


# ------------------------------------------------------------------------------------ compiling, recomputing, sharding

def prepare_layers(model, config):
    """Apply torch.compile and activation recomputation layer by layer. A model without `layers` counts as one layer."""
    layers = getattr(model, "layers", [model])
    if config.compile:
        allow_graphs(64)
        say("compiling in the first step takes a minute, or many if a model loops over time in Python; "
            "--compile=false starts at once")
    for i, layer in enumerate(layers):
        if config.compile:
            layer.forward = torch.compile(layer.forward)
        if config.recompute == "block" or config.recompute == "every_other" and i % 2 == 0:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False,
                                              context_fn=same_documents)


def shard(model, config, device):
    """Apply FSDP2's fully_shard. Each layer is gathered whole and in float32; everything else belongs to the root.

    With hooks around the whole layer, torch.compile makes one graph of it. Hooks around each linear map could gather in
    bfloat16, but would cut the layer into seven graphs. Gathering the whole layer in bfloat16 would round the scan's
    own parameters. Raises ConfigError if the model or the number of processes does not allow sharding.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = open_mesh(config, device)
    layers = getattr(model, "layers", [])
    try:
        for i, layer in enumerate(layers):  # keep the last layer gathered: the backward needs it first
            fully_shard(layer, mesh=mesh, reshard_after_forward=i + 1 < len(layers))
        fully_shard(model, mesh=mesh)
    except ValueError as error:
        raise ConfigError(f"parallel={config.parallel}: this model cannot be sharded ({first_line(error)}): change "
                          "the model, or use --parallel=ddp") from None


def open_mesh(config, device):
    """Return the DeviceMesh for fully_shard, of shape (processes), or for hsdp (machines, processes per machine)."""
    from torch.distributed.device_mesh import DeviceMesh

    world = world_size()
    if world == 1:
        raise ConfigError(f"parallel={config.parallel} needs several processes: start train.py with torchrun "
                          "--nproc_per_node=8, or use --parallel=ddp for a single process")
    if config.parallel == "fsdp":
        return DeviceMesh.from_group(dist.group.WORLD, device.type)
    local = env_int("LOCAL_WORLD_SIZE", world, least=1)
    if world == local or world % local:
        raise ConfigError(f"parallel=hsdp needs several machines with the same number of processes, not "
                          f"{world} processes, {local} of them on this one: use --parallel=fsdp")
    ranks = torch.arange(world).view(-1, local)
    wait = datetime.timedelta(minutes=config.timeout_minutes)
    groups = [dist.new_subgroups_by_enumeration(lists.tolist(), timeout=wait)[0] for lists in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("dp_replicate", "dp_shard"))


def whole(t):
    """Gather t if it is sharded, else return it unchanged. All processes must call this."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def cut_like(t, like):
    """Shard `t` the way `like` is sharded. Return `t` itself if `like` is whole or has another shape."""
    if not hasattr(like, "full_tensor") or t.shape != like.shape:
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def in_step(batches, device, sharded):
    """Yields (x, y, True) for this process's batches. A sharded model's forward needs every process. A process that has
    run out of batches therefore yields dummies (x, y, False) until all are done."""
    if not sharded:
        yield from ((*batch, True) for batch in batches)
        return
    batches = iter(batches)
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    while True:
        batch = next(batches, None)
        if not sum_over_ranks(torch.tensor(float(batch is not None)), device):
            return
        yield (token, token, False) if batch is None else (*batch, True)


# ---------------------------------------------------------------------------------------------------- the training step

def parallelize(model, config, data):
    """Prepare the model for the training loop: compile, recompute, and shard it or wrap it in DDP, as configured."""
    device = next(model.parameters()).device
    prepare_layers(model, config)
    if config.parallel != "ddp":
        shard(model, config, device)
        return model
    if world_size() == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    ids = [device.index] if device.type == "cuda" else None
    forward = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    # DDP reorders its buckets after its first synchronised backward, and gradients added in another order differ in
    # the last bit. A resumed run must be bit-identical, so this first backward must not belong to a step.
    x, y, _ = next(iter(data.micro_batches(0, rank(), world_size(), config.micro_batch_size)))
    with autocast(config, device):
        first_loss = forward(x, y, loss_only=True)[1]
    first_loss.backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise ConfigError(f"the loss does not depend on the parameters {', '.join(unused[:3])}"
                          f"{', ...' * (len(unused) > 3)}: several processes cannot train such a model; use them in "
                          "forward, remove them, or set their requires_grad to False")
    model.zero_grad(set_to_none=True)
    return forward


def micro_batches(forward, config, data, step, signals):
    """Yields this process's micro-batches (x, y, weight). Only the last backward averages gradients over processes.
    Raises ConfigError after the first step if a weight is not the micro-batch's share of the targets (see `train`).

    A run with one process drops the step when asked to stop: it sets signals.dropped and restores the random
    generators. If the model has buffers, it finishes the step, since the forward may have changed them.
    """
    before = saved.rng_state()
    may_drop = world_size() == 1 and next(forward.buffers(), None) is None
    batches = data.micro_batches(step, rank(), world_size(), config.micro_batch_size)
    shares = []
    for batch, following in itertools.pairwise(itertools.chain(batches, [None])):
        if signals.requested and may_drop:
            saved.set_rng_state(before)
            signals.dropped = True
            return
        if step == 0:
            _, y, weight = batch
            shares.append((weight, targets_in(y) if weight else 0))
        if config.parallel == "hsdp":  # sum shards after every micro-batch: whole gradients would be large
            forward.set_requires_all_reduce(following is None)
        elif config.parallel == "ddp" and world_size() > 1:
            average_gradients(forward, following is None)
        yield batch
    if step == 0:
        check_shares(shares, next(forward.parameters()).device)


def targets_in(y):
    """Return the number of targets: integers other than -1, or rows of floats."""
    integers = torch.is_tensor(y) and not y.is_floating_point()
    return int((y != -1).sum()) if integers else len(y)


def check_shares(shares, device):
    """Raises ConfigError for a wrong weight. shares: (weight, targets) of each of this process's micro-batches."""
    counted = torch.tensor(float(sum(targets for _, targets in shares)))
    total = float(sum_over_ranks(counted, device))
    for weight, targets in shares:
        if not math.isclose(weight, targets * world_size() / max(total, 1), rel_tol=1e-3):
            raise ConfigError(f"micro_batches: weight {weight:g} for {targets} of {total:g} targets in the step on "
                              f"{world_size()} processes: it must be targets x processes / targets in the step")


def autocast(config, device):
    dtype = getattr(torch, config.dtype)
    return torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32)


def agree(loss, grad_norm, signals):
    """Return (mean loss over processes, gradient norm) as floats. The same all-reduce sets signals.stopping if any
    process was asked to stop, so that all of them stop after the same step."""
    shared = torch.stack([loss / world_size(), torch.tensor(float(signals.requested), device=loss.device)])
    if world_size() > 1:
        dist.all_reduce(shared)
    signals.stopping = shared[1].item() > 0
    return shared[0].item(), whole(grad_norm).item()


# ----------------------------------------------------------------------------------------- unresponsive processes

def who_is_missing(error):
    """Return a line about a failed collective: this rank, and the ranks that do not answer. Takes a few seconds."""
    this_rank = rank()
    missing = [0]  # rank 0, or torchrun, holds the store: if it cannot be read, rank 0 is missing

    def call():
        with contextlib.suppress(RuntimeError):
            STORE.set(f"here/{this_rank}", "")
            while missing:
                missing[:] = [r for r in range(world_size()) if not STORE.check([f"here/{r}"])]
                time.sleep(0.05)

    thread = threading.Thread(target=call, daemon=True)  # if the store's process hangs, calls never return
    thread.start()
    thread.join(ROLL_CALL_SECONDS)
    who = "all others answer again"
    if missing:
        who = f"no answer from rank {listed(missing)} within {ROLL_CALL_SECONDS:g} s"
    return (f"rank {this_rank} on {platform.node()}: {who} ({first_line(error)}); continue from the last checkpoint "
            "with the same command and --resume=auto; torchrun --max-restarts does that by itself")


def listed(ranks):
    return ", ".join(map(str, ranks))


def first_line(error):
    """Return the first line of an error's message, at most 200 characters of it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def exit_retryable(prog, error):
    """End this process with EXIT_RETRYABLE. We bypass Python's own exit, because the threads of a broken process group
    sometimes abort it."""
    with contextlib.suppress(OSError):
        print(f"{prog}: error: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_RETRYABLE)


def resume_command(*changes):
    """The command line that continues this run with some settings changed."""
    if world_size() > 1:
        return "the same torchrun command with " + " ".join(changes)
    given = tuple(change.partition("=")[0] + "=" for change in changes)
    kept = [argument for argument in sys.argv if not argument.startswith(given)]
    return shlex.join([sys.executable, *kept, *changes])


def leave():
    """Destroy the process group once nothing refers to DistributedDataParallel any more. If DDP were the group's last
    owner, it would deadlock: it waits for gloo's threads while it holds the GIL, which they need."""
    if dist.is_initialized():
        barrier()  # otherwise a process could be aborted while its gloo threads still write to another one
        gc.collect()  # an exception's reference cycle may keep main's frame alive
        dist.destroy_process_group()


def all_gather(value):
    """The values of all processes, ordered by rank."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def barrier():
    if world_size() > 1:
        dist.barrier()


def sum_over_ranks(a, device):
    """The sum of a small tensor over all processes, on the CPU."""
    if world_size() > 1:
        a = a.to(device)
        dist.all_reduce(a)
    return a.cpu()
