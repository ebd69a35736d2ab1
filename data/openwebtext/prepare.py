"""OpenWebText as GPT-2 tokens with nanoGPT's split, into this folder: the recipe openwebtext of data/tokens/prepare.py.

8,013,769 documents, shuffled and split by datasets' train_test_split(test_size=0.0005, seed=2357), so losses can be
compared: 9,035,582,198 tokens to train on and 4,434,897 for validation. A line says where these counts differ.

    python data/openwebtext/prepare.py --workers=16        # 25 GB download, 54 GB cache, 18 GB result
    python data/openwebtext/prepare.py --files owt/ --vocab gpt2_vocab      # a machine without network
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from data.tokens import prepare as tokens
from data.writer import run

N_DOCUMENTS = 8_013_769
PUBLISHED = {"train": 9_035_582_198, "val": 4_434_897}  # tokens of all documents


def count_warning(meta):
    """The line to print when the whole of OpenWebText gave other token counts than published, else None."""
    counts = {split: meta["splits"][split]["tokens"] for split in PUBLISHED}
    usual = {"val_fraction": 0.0005, **tokens.RECIPES["openwebtext"]}
    ours = {**meta["recipe"], "tokenizer": f"tiktoken:{meta['tokenizer']}", "source": usual["source"]}
    whole = sum(split["documents"] for split in meta["splits"].values()) == N_DOCUMENTS
    if not whole or any(ours[key] != value for key, value in usual.items()) or counts == PUBLISHED:
        return None
    differ = "; ".join(f"{split}: {counts[split]:,} tokens here, {n:,} published" for split, n in PUBLISHED.items()
                       if counts[split] != n)
    return f"WARNING: THESE ARE NOT THE PUBLISHED TOKEN COUNTS ({differ}): losses cannot be compared with nanoGPT's"


def main():
    found = tokens.main(["openwebtext", *sys.argv[1:]])
    if warning := found and count_warning(found.meta):
        print(warning, file=sys.stderr)


if __name__ == "__main__":
    run(main)
