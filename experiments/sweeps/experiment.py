"""The one driver: what scaling, recall, images, extrapolation and edits have alike as programs.

An experiment states its cells (runner.py) and its options. Here stand the command line, the plan, the run of what has
no final record yet, the report and the exit code.
"""

import argparse
import inspect
import shlex
from pathlib import Path

from common.errors import ConfigError, main_error
from experiments.records import check_packages
from experiments.sweeps import runner
from runtime.records import is_finished

EXACT = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}  # --seed is a run's


class Experiment:
    """One command of an experiment: its `args`, and `extra`, the settings that go to every run.

    A subclass has the attributes below, plan(), report(), and what else differs. Of a command that runs cells there
    are also `folder`, and `cells`, `failed` {name: reason} of those that ran.
    """

    script = ""  # its path in the repository
    program = "train.py"  # what runs a cell
    name = ""  # of its folder in out/, by its options
    usual = None  # the folder that `report` reads if none is given
    out = "folder of the sweep"  # what --out names
    at_a_time = "one per core or GPU"
    per_gpu = nproc = 1  # cells on a GPU, processes of a cell
    sets = ()  # settings that it gives each run, which a command may not
    see = ""  # the options for them

    @classmethod
    def main(cls, argv):
        """Run a command line; returns its exit code."""
        with main_error(Path(cls.script).name):
            return cls(argv).obey()

    def __init__(self, argv):
        self.args, self.extra = self.parser().parse_known_args(argv)
        self.cells = []
        self.failed = {}

    def obey(self):
        takes_settings = self.args.command not in ("report", "eval")
        for e in self.extra:
            if not takes_settings or not e.startswith("--") or "=" not in e:
                raise ConfigError(f"unknown option {e}: see --help; settings of a run are given as --key=value")
            if e[2:].split("=")[0] in self.sets:
                raise ConfigError(f"{e}: the sweep sets that; see {self.see}")
        if self.args.command == "report":
            return say_written(self.report(self.args.folder, self.args.out))
        try:
            return self.run()
        except KeyboardInterrupt as stopped:
            raise ConfigError(f"stopped: {stopped or 'the same command resumes'}") from None

    # ---------------------------------------------------------------------------------------------------- command line

    def parser(self):
        """The parser of its commands, `run` and `report`."""
        about = inspect.getmodule(type(self)).__doc__
        top = argparse.ArgumentParser(Path(self.script).name, description=about, **EXACT)
        commands = top.add_subparsers(dest="command", required=True)
        self.add_commands(commands)
        for command in commands.choices.values():
            command.add_argument("--accept_code", "--accept-code", type=runner.names, default=(), metavar="HASH,HASH",
                                 help="compare runs of this other code with the rest; the report says so")
        return top

    def add_commands(self, commands):
        run = commands.add_parser("run", help="run what has no final record yet, then report", **EXACT,
                                  epilog="any other --key=value goes to every run")
        self.add_run_options(run)
        show = commands.add_parser("report", help="pages and figure again, from the records alone", **EXACT)
        show.add_argument("folder", type=Path, nargs="?" if self.usual else None, default=self.usual,
                          help="of the sweep, or the .json that a report wrote (%(default)s)")
        show.add_argument("--out", type=Path, help="name of the files without endings (report, in the folder)")

    def add_run_options(self, run):
        """The options of a command that runs cells. A subclass adds its own."""
        add_options(run, self.at_a_time)
        run.add_argument("--out", type=Path, help=f"{self.out} (out/{self.name})")
        run.add_argument("--dry-run", "--dry_run", action="store_true", help="print the plan and stop")

    # ------------------------------------------------------------------------------------------------------------- run

    def plan(self):
        """The cells that the command stands for. Raises ConfigError for what does not make a run."""
        raise NotImplementedError

    def report(self, folder, out=None):
        """Write the report of the records in a folder or file; returns {kind: path}."""
        raise NotImplementedError

    def place(self):
        """The folder of the sweep."""
        return self.args.out or runner.REPO / "out" / self.name.format(**vars(self.args))

    def run(self):
        """Plan, run and report; returns the exit code."""
        args = self.args
        self.folder = self.place()
        jobs, gpus, where = runner.placement(args, self.nproc, self.per_gpu)
        planned = self.plan()
        runner.say_changed_code(self.folder, args.accept_code)
        self.say_plan(planned, jobs, where)
        if args.dry_run:
            self.say_commands([c for c in planned if not is_finished(self.folder / c.name)])
            return 0
        with runner.driver(args, self.folder, jobs, self.nproc, gpus) as self.engine:
            self.go(planned)
            self.finish()
        return say_failed(self.failed, self.cells)

    def about(self):
        """What the plan says of the whole sweep."""
        return {}

    def go(self, cells):
        """Add cells to the plan, and run what has no final record yet."""
        runner.write_plan(self.folder, cells, **self.about())
        self.cells += cells
        self.failed |= runner.run_cells(cells, self.folder, self.engine, self.program)

    def finish(self):
        """Report, once all cells have run; without the packages for it, print the command that makes it later."""
        try:
            check_packages()
        except ConfigError as error:
            print(f"the records are kept, but there is no report: {error}; then: python {self.script} report "
                  f"{self.folder}")
        else:
            say_written(self.report(self.folder))

    def say_plan(self, cells, jobs, where):
        """Print what would run; jobs: at a time, 0: all."""
        print(f"{len(cells)} runs on {where}, {jobs or 'all'} at a time")

    def say_commands(self, cells):
        """Print the command that the sweep would begin with, of the cells that are not finished."""
        if not cells:
            print("nothing was run; all of it is finished")
            return
        command = cells[0].command(self.folder, self.nproc, self.program)
        print(f"nothing was run; it would begin with:\npython {shlex.join(command[1:])}")


def add_options(parser, at_a_time):
    """Options of where cells run; at_a_time: the default of --jobs on this machine, in words."""
    parser.add_argument("--jobs", type=int, default=0, help=f"runs at a time (default: {at_a_time}; on a cluster: all)")
    parser.add_argument("--cluster", default="", metavar="slurm|ray|ray:HOST:PORT", help="where (this machine)")
    parser.add_argument("--cluster_args", "--cluster-args", default="", metavar="KEY=VALUE,...", help="options of "
                        "sbatch (partition=gpu,gpus=1,time=240), or of Ray's actors (num_cpus=4,num_gpus=1)")


def say_written(paths):
    for path in paths.values():
        print(f"wrote {path}")
    return 0


def say_failed(failed, cells):
    """Print the failures, last of all that a sweep prints; return its exit code."""
    for name, why in failed.items():
        print(f"FAILED {name}: {why}")
    if failed:
        print(f"{len(failed)} of {len(cells)} runs failed: holes in the report; the same command tries them again")
    return 1 if failed else 0
