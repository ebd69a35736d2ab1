"""What a checkpoint costs training: how long it stands still, written at once and in the background.

    python bench/checkpoint.py                                       # config/longhorn_laptop.py and longhorn_120m.py
    python bench/checkpoint.py config/longhorn_350m.py --runs=3      # 4.4 GB a checkpoint, and as much again in memory
    python bench/checkpoint.py --save                                # results/checkpoint_cpu.json, or _cuda.json

    pause    until Keeper.save returns: all of the write, or the copy to memory alone
    on disk  until the file is flushed and renamed

The surprise: the pause of the background's way does not depend on the disk at all; when the file is there does, and differs from
run to run. Both ways take turns on the same state, weights and AdamW's two moments, in the same folder.
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
from train import TrainConfig, device_name  # noqa: E402

CONFIGS = ["config/longhorn_laptop.py", "config/longhorn_120m.py"]
WAYS = {"at once": False, "in the background": True}


def state_of(config, device):
    """What train.py saves of a model that has taken its first step."""
    config.vocab_size = config.vocab_size or 256
    torch.manual_seed(config.seed)
    model = LM(config).to(device)
    optimizer = torch.optim.AdamW(model.optimizer_groups(config.weight_decay), lr=1e-3, fused=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": checkpoint.rng_state()}


def measure(state, folder, runs):
    """{way: {"pause", "on_disk": seconds of each run}}. Raises OSError where the disk does not take it."""
    found = {way: {"pause": [], "on_disk": []} for way in WAYS}
    keepers = {}
    for way, background in WAYS.items():
        (folder / way).mkdir()
        keepers[way] = checkpoint.Keeper(folder / way, keep=2, background=background)
    for step in range(runs + 1):
        for way, keeper in keepers.items():
            began = time.perf_counter()
            keeper.save(state, {"step": step})
            pause = time.perf_counter() - began
            _, error = keeper.result(wait=True)
            if error:
                raise error
            if step:  # the first makes the copies that the later ones write to
                found[way]["pause"].append(pause)
                found[way]["on_disk"].append(time.perf_counter() - began)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=CONFIGS, metavar="config/NAME.py", help="models to save (default: two)")
    parser.add_argument("--runs", type=int, default=7, help="of each way (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="on the disk to measure (%(default)s/)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", action="store_true", help="write results/checkpoint_<device>.json")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs {args.runs}: at least 1")
    device, rows = torch.device(args.device), []
    out = REPO / "results" / f"checkpoint_{device.type}.json" if args.save else None
    refuse_uncommitted(out, "no --save")
    args.folder.mkdir(parents=True, exist_ok=True)
    for path in args.configs:
        state = state_of(configurator.load(TrainConfig, [path]), device)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            found = measure(state, Path(folder), args.runs)
            size = (Path(folder) / next(iter(WAYS)) / checkpoint.NEWEST).stat().st_size
        rows.append({"config": path, "bytes": size, **{way: {what: spread(s) for what, s in times.items()}
                                                       for way, times in found.items()}})
        for way in WAYS:
            pause, disk = (rows[-1][way][what] for what in ("pause", "on_disk"))
            low, high = pause["quartile_seconds"]
            print(f"{Path(path).stem:20} {size / 1e6:8.1f} MB  {way:18} pause {1e3 * pause['median_seconds']:8.1f} ms "
                  f"({1e3 * low:.1f} to {1e3 * high:.1f}), on disk after {1e3 * disk['median_seconds']:8.1f} ms", flush=True)
    if out is not None:
        write_json(out, {"benchmark": "checkpoint", "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
                         "environment": environment(), "device_name": device_name(device), "rows": rows})
        print(f"record: {out.relative_to(REPO)}")


if __name__ == "__main__":
    with configurator.main_error("bench/checkpoint.py", OSError):
        main()
