"""How long training pauses for a checkpoint, written in the foreground and in the background.

    python bench/checkpoint.py                                       # config/longhorn_laptop.py and longhorn_120m.py
    python bench/checkpoint.py config/longhorn_350m.py --runs=3      # 4.4 GB each, and as much again in memory
    python bench/checkpoint.py --save                                # results/checkpoint_cpu.json, or _cuda.json

    pause    until CheckpointManager.save returns: the whole write, or only the copy to memory
    on disk  until the file is flushed and renamed

In the background the pause does not depend on the disk; the time until the file is on disk does, and varies from run to
run. Both modes alternate on the same state (weights and AdamW's two moments), in the same folder.
"""

import argparse
import datetime
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import torch  # noqa: E402

import checkpoint  # noqa: E402
import configurator  # noqa: E402
from bench.measure import refuse_uncommitted, spread  # noqa: E402
from model import LM  # noqa: E402
from records import environment, write_json  # noqa: E402
from train import TrainConfig  # noqa: E402

CONFIGS = ["config/longhorn_laptop.py", "config/longhorn_120m.py"]
MODES = {"foreground": False, "background": True}  # CheckpointManager's `background`


def state_of(config, device):
    """What train.py saves after the first step of this model: weights, AdamW's moments, random states."""
    config.vocab_size = config.vocab_size or 256
    torch.manual_seed(config.seed)
    model = LM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": [optimizer.state_dict()], "rng": checkpoint.rng_state()}


def measure(state, folder, runs):
    """{mode: {"pause", "on_disk": seconds of each run}}. Raises OSError where the disk refuses the file."""
    found = {mode: {"pause": [], "on_disk": []} for mode in MODES}
    managers = {}
    for mode, background in MODES.items():
        (folder / mode).mkdir()
        managers[mode] = checkpoint.CheckpointManager(folder / mode, keep=2, background=background)
    for step in range(runs + 1):
        for mode, manager in managers.items():
            began = time.perf_counter()
            manager.save(state, {"step": step})
            pause = time.perf_counter() - began
            _, error = manager.result(wait=True)
            if error:
                raise error
            if step:  # the first allocates the memory for the copies, which later ones reuse
                found[mode]["pause"].append(pause)
                found[mode]["on_disk"].append(time.perf_counter() - began)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=CONFIGS, metavar="config/NAME.py",
                        help="models to save (default: two)")
    parser.add_argument("--runs", type=int, default=7, help="measurements of each mode (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="on the disk to measure (%(default)s/)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", action="store_true", help="write results/checkpoint_<device>.json")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs {args.runs}: at least 1")
    device, rows = torch.device(args.device), []
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    out = REPO / "results" / f"checkpoint_{device.type}.json" if args.save else None
    refuse_uncommitted(out, "no --save")
    args.folder.mkdir(parents=True, exist_ok=True)
    for path in args.configs:
        state = state_of(configurator.load(TrainConfig, [path]), device)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            found = measure(state, Path(folder), args.runs)
            size = (Path(folder) / next(iter(MODES)) / checkpoint.NEWEST).stat().st_size
        spreads = {mode: {what: spread(seconds) for what, seconds in times.items()} for mode, times in found.items()}
        rows.append({"config": path, "bytes": size, **spreads})
        for mode in MODES:
            pause, disk = (spreads[mode][what] for what in ("pause", "on_disk"))
            low, high = pause["quartile_seconds"]
            print(f"{Path(path).stem:20} {size / 1e6:8.1f} MB  {mode:10} pause {1e3 * pause['median_seconds']:8.1f} ms "
                  f"({1e3 * low:.1f} to {1e3 * high:.1f}), on disk after {1e3 * disk['median_seconds']:8.1f} ms",
                  flush=True)
    if out is not None:
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        write_json(out, {"benchmark": "checkpoint", "date": date, "environment": environment(),
                         "device_name": device_name, "rows": rows})
        print(f"record: {out.relative_to(REPO)}")


if __name__ == "__main__":
    with configurator.main_error("bench/checkpoint.py", OSError):
        main()
