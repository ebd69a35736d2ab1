"""The default dataset in 2,048 tokens learned from its training files: data/pystdlib/prepare.py --tokenizer=bpe:2048.

    python data/pystdlib_bpe/prepare.py                                    # half a minute; takes that program's options
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from data.pystdlib.prepare import main
from data.writer import run

if __name__ == "__main__":
    sys.argv[1:1] = ["--tokenizer=bpe:2048", "--out", str(Path(sys.argv[0]).parent)]
    run(main)
