"""OpenWebText as GPT-2 tokens, with nanoGPT's split and order: the recipe `openwebtext` of data/tokens/prepare.py.

    python data/openwebtext/prepare.py                                          # takes that program's options
    python data/openwebtext/prepare.py --files owt/ --vocab gpt2_vocab          # on a machine without a network
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from data.tokens.prepare import main
from data.writer import run

if __name__ == "__main__":
    sys.argv.insert(1, "openwebtext")
    run(main)
