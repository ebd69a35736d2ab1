"""The driver that the programs for scaling, recall, images, extrapolation and edits share.

An experiment states its settings and its cells (runner.py). This module has the commands, the plan, the loop over runs
without a final record, the report and the exit code.
"""

import inspect
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import configurator
from common.errors import ConfigError, main_error, printable
from configurator import Whole
from evaluation.tasks import table
from experiments.pages import human
from experiments.records import check_packages
from experiments.sweeps import runner
from runtime.records import is_finished

YEAR = 365 * 86400  # seconds


@dataclass
class Where:
    """Settings of where cells run."""

    # --- where the runs go
    jobs: Whole = 0  # runs at a time; 0: one per core or GPU, on a cluster all
    cluster: str = ""  # slurm, ray or ray:HOST:PORT; empty: this machine
    cluster_args: str = ""  # options of sbatch (partition=gpu,gpus=1,time=240), or of Ray's actors (num_cpus=4)


@dataclass
class Run(Where):
    """Settings of a command that runs cells and reports."""

    # --- folder and plan
    out: Path = None  # folder of the sweep, in out/ unless it is given
    dry_run: bool = False  # print the plan and stop
    accept_code: tuple[str, ...] = ()  # compare runs of this other code with the rest; the report says so

    OTHERS = "any other --key=value goes to every run"


@dataclass
class Report:
    """Settings of `report`, which reads only records."""

    folder: Path  # the sweep's folder, or the .json that a report wrote
    out: Path = None  # name of the files without endings (report, in the folder)
    accept_code: tuple[str, ...] = ()  # compare runs of this other code with the rest; the report says so


class Experiment:
    """One command of an experiment, with its settings `args`.

    A subclass sets the attributes below, defines plan(), and overrides whatever else differs. A command that runs cells
    also has `folder`, the `cells` that ran, and the `failed` ones, {name: reason}.
    """

    script = ""  # its path in the repository
    settings = {}  # {command: dataclass}, or one dataclass
    program = "train.py"  # what runs a cell
    name = ""  # name of its folder in out/, from its settings
    columns = ()  # of the plan's table: the parts of a cell's place that distinguish kinds of runs
    estimated = ""  # printed after the estimated hours
    too_long = "this takes years here"  # printed if it takes years
    per_gpu = nproc = 1  # cells on a GPU, processes of a cell
    write = None  # pages.report of its kind and page
    sets = ()  # settings that it gives each run, so a command may not
    see = ""  # the settings to use instead

    @classmethod
    def main(cls, argv):
        """Run a command line; returns its exit code."""
        with main_error(Path(cls.script).name):
            return cls(argv).obey()

    def __init__(self, argv):
        about = inspect.getmodule(type(self)).__doc__
        self.args = configurator.read(self.settings, argv, about, Path(self.script).name)
        self.cells = []
        self.failed = {}

    def obey(self):
        self.check_set(self.args.others)
        if self.args.command == "report":
            return say_written(self.report(self.args.folder, self.args.out))
        try:
            return self.run()
        except KeyboardInterrupt as stopped:
            raise ConfigError(f"stopped: {stopped or 'the same command resumes'}") from None

    def check_set(self, argv):
        """Raises ConfigError for settings of a run that the command may not give."""
        for key in runner.settings(argv):
            if key in self.sets:
                raise ConfigError(f"{' '.join(argv)}: the sweep sets {key}; see {self.see}")

    def plan(self):
        """The cells of the command. Raises ConfigError for settings that do not make a run."""
        raise NotImplementedError

    def report(self, folder, out=None):
        """Write the report of the records in a folder or file; returns {kind: path}."""
        return self.write(folder, out, self.args.accept_code)

    def place(self):
        """The folder of the sweep."""
        return self.args.out or runner.REPO / "out" / self.name.format(**vars(self.args))

    def about(self):
        """What the plan says about the whole sweep."""
        return {}

    def run(self):
        """Plan, run and report; returns the exit code."""
        args = self.args
        self.folder = self.place()
        jobs, gpus, where = runner.placement(args, self.nproc, self.per_gpu)
        planned = self.plan()
        runner.say_changed_code(self.folder, args.accept_code)
        diff = runner.uncommitted()  # before anything runs
        self.diffs = [diff] if diff else []
        self.say_plan(planned, jobs, where)
        if args.dry_run:
            self.say_commands([c for c in planned if not is_finished(self.folder / c.name)])
            return 0
        with runner.driver(args, self.folder, jobs, self.nproc, gpus) as self.engine:
            self.work(planned)
            self.finish()
        return say_failed(self.failed, self.cells)

    def work(self, planned):
        """Run the cells."""
        self.go(planned)

    def go(self, cells):
        """Add cells to the plan, and run those without a final record."""
        runner.write_plan(self.folder, cells, **self.about(), uncommitted=self.diffs)
        self.cells += cells
        self.failed |= runner.run_cells(cells, self.folder, self.engine, self.program)

    def finish(self):
        """Report, once all cells have run; if the packages for it are missing, print the command that makes it
        later."""
        try:
            check_packages()
        except ConfigError as error:
            print(f"the records are kept, but there is no report: {error}; then: python {self.script} report "
                  f"{self.folder}")
        else:
            say_written(self.report(self.folder))

    def say_plan(self, cells, jobs, where):
        """Print the plan: how many runs of each kind, and how long all take; jobs: runs at a time, 0: all."""
        say_kinds(cells, self.columns)
        flops = sum(c.at.get("flops", 0) for c in cells)
        work = f", {flops:.2g} FLOPs" if flops else ""
        each = f" by {self.nproc} processes each" if self.nproc > 1 else ""
        print(f"{len(cells)} runs{work} on {where}, {jobs or 'all'} at a time{each}")
        seconds = sum(c.seconds for c in cells)
        if seconds and "CPU" in where:
            print(f"about {runner.hours(seconds / jobs)}{self.estimated}" if seconds < jobs * YEAR else self.too_long)

    def say_commands(self, cells):
        """Print the command that the sweep would begin with: that of the first unfinished cell."""
        if not cells:
            print("nothing was run; all runs are finished")
            return
        command = cells[0].command(self.folder, self.nproc, self.program)
        print(f"nothing was run; it would begin with:\npython {shlex.join(command[1:])}")


def say_kinds(cells, columns):
    """Print a table of the kinds of cells, which differ in `columns` of their place, and the number of runs of each
    kind."""
    kinds = Counter(tuple(c.at[key] for key in columns) for c in cells)
    rows = [[*columns, "runs"]]
    for kind, runs in kinds.items():
        rows.append([value if isinstance(value, str) else human(value, 4) for value in (*kind, runs)])
    print(table(rows))


def say_written(paths):
    for path in paths.values():
        print(f"wrote {path}")
    return 0


def say_failed(failed, cells):
    """Print the failures, as the last lines of a sweep; return its exit code."""
    for name, why in failed.items():
        print(printable(f"FAILED {name}: {why}"))
    if failed:
        print(f"{len(failed)} of {len(cells)} runs failed and are not in the report; the same command tries them again")
    return 1 if failed else 0
