"""Replay the planted mistakes: each edit in tests/planted/*.json, made in a copy, must make its tests fail.

    python tools/planted_mistakes.py                 # all of them
    python tools/planted_mistakes.py --only=data     # those of tests/planted/data.json

An entry is {"file": path, "old": text that occurs exactly once, "new": text, "tests": arguments of pytest}. First all
these tests must pass unedited. Exit code 1: a mistake was missed. Compiled kernels are shared (LONGHORN_BUILD_DIR).
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

REPO = Path(__file__).resolve().parent.parent


def copy_repository(to):
    """Copy what git tracks, and new files that it does not ignore."""
    listing = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=REPO,
                             capture_output=True, text=True, check=True).stdout
    for name in filter(None, listing.split("\0")):
        if (REPO / name).is_file():  # not a file that was deleted and not yet committed
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, to / name)


def run_tests(folder, arguments):
    """(whether tests were found and all passed, what pytest printed) of `pytest -q -x arguments` in a folder."""
    build = os.environ.get("LONGHORN_BUILD_DIR") or str(REPO / "build")
    environment = os.environ | {"LONGHORN_BUILD_DIR": build, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode == 0, done.stdout + done.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="AREA", default="*", help="the name of one file in tests/planted/")
    args = parser.parse_args()
    entries = [(path.stem, entry) for path in sorted((REPO / "tests" / "planted").glob(f"{args.only}.json"))
               for entry in json.loads(path.read_text())]
    if not entries:
        parser.error(f"no planted mistakes in tests/planted/{args.only}.json")
    for _, entry in entries:
        count = (REPO / entry["file"]).read_text().count(entry["old"])
        if count != 1:
            raise SystemExit(f"{entry['file']}: the old text occurs {count} times, not once: {entry['old']!r}")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        copy_repository(folder)
        for tests in dict.fromkeys(entry["tests"] for _, entry in entries):
            passed, output = run_tests(folder, shlex.split(tests))
            if not passed:
                raise SystemExit(f"pytest {tests} fails without any mistake:\n{output}")
        for area, entry in tqdm(entries, unit="mistake", disable=None):
            path, began = folder / entry["file"], time.perf_counter()
            source = path.read_text()
            path.write_text(source.replace(entry["old"], entry["new"]))
            passed, _ = run_tests(folder, shlex.split(entry["tests"]))
            path.write_text(source)
            missed += passed
            edit = f"{entry['file']}: {entry['old'].strip()[:50]!r} -> {entry['new'].strip()[:50]!r}"
            seconds = time.perf_counter() - began
            tqdm.write(f"{'MISSED' if passed else 'caught'}  {seconds:5.1f} s  {area:10} {edit}")
    print(f"{len(entries) - missed} of {len(entries)} caught")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
