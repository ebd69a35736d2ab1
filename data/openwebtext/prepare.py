"""OpenWebText as GPT-2 tokens, in nanoGPT's split and order: the recipe of that name of data/tokens/prepare.py.

    python data/openwebtext/prepare.py                                                   # takes all of its options
    python data/openwebtext/prepare.py --files owt/ --vocab gpt2_vocab                   # a machine without network
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from data.tokens.prepare import main
from data.writer import run

if __name__ == "__main__":
    sys.argv.insert(1, "openwebtext")
    run(main)
