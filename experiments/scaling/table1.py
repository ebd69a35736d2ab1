"""The old name of sweep.py: `run --preset=laptop --models=a,b ...` is `sweep.py laptop a b ...`.

    python experiments/scaling/table1.py run --preset=laptop --models=longhorn,mamba
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.scaling import sweep  # noqa: E402
from runtime.errors import main_error  # noqa: E402


def translated(argv):
    """The arguments of `table1.py run` translated for sweep.py."""
    if argv[:1] != ["run"]:
        return argv
    given = dict(a.split("=", 1) for a in argv if a.startswith(("--preset=", "--models=")))
    rest = [a for a in argv[1:] if a.partition("=")[0] not in given]
    return [given.get("--preset", "laptop"), *filter(None, given.get("--models", "").split(",")), *rest]


if __name__ == "__main__":
    with main_error("table1.py"):
        sys.exit(sweep.main(translated(sys.argv[1:])))
