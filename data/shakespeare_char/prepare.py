"""Tiny Shakespeare as characters, as in nanoGPT: 1.1 MB, the first 90% for training, the rest held out.

The tokens are the 65 characters that occur; "table" in meta.json lists them. The text is ASCII, so a token is also a
byte. Other texts and tokenizers: data/tokens/prepare.py --files my.txt --tokenizer=chars.

    python data/shakespeare_char/prepare.py                          # downloads the text and checks its sha256
    python data/shakespeare_char/prepare.py --file input.txt         # uses your copy, also checked
"""

import dataclasses
import hashlib
import shlex
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
import configurator
from common.errors import regular
from data.prepared import DataError, describe
from data.tokenizer import Text
from data.writer import finish, finished, preparing, run, write_split

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # 1,115,394 bytes
TRAIN_FRACTION = 0.9


def download(url=URL, seconds=30):
    """The bytes at `url`. Raises DataError if it cannot be reached."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return answer.read()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot download {url} ({error}): download it elsewhere and pass it as --file") from None


def prepare(out, file=None, force=False):
    """Write the dataset to `out`, unless it is already there. Returns Tokens. Raises DataError, OSError."""
    with preparing(out) as folder:
        if not force and (tokens := finished(folder, SHA256)):
            return tokens
        content = regular(file).read_bytes() if file else download()
        source = str(file or URL)
        actual = hashlib.sha256(content).hexdigest()
        if actual != SHA256:
            raise DataError(
                f"{source} ({len(content):,} bytes) is not Tiny Shakespeare: sha256 {actual[:12]}..., expected "
                f"{SHA256[:12]}...: download it again, or prepare another text with data/tokens/prepare.py --files"
            )
        text = content.decode()
        characters = Text("char", "".join(sorted(set(text))))  # token i is character table[i]
        cut = int(TRAIN_FRACTION * len(text))
        splits = {}
        for split, part in {"train": text[:cut], "val": text[cut:]}.items():
            ids = characters.encode_ordinary(part)
            splits[split] = write_split(folder / f"{split}.bin", [ids], characters.n_vocab)
        meta = {
            "dataset": "shakespeare_char",
            "vocab_size": characters.n_vocab,
            "tokenizer": characters.name,
            "table": characters.table,
            "bytes_per_token": 1,
            "splits": splits,
            "how": shlex.join(["python", *sys.argv]),
            "recipe": {"source": source, "source_sha256": SHA256, "train_fraction": TRAIN_FRACTION},
            "inputs": SHA256,
        }
        return finish(folder, meta)


@dataclass
class Options:
    file: Path = None  # a local copy of the text, instead of downloading it
    out: Path = Path(__file__).parent  # folder to write
    force: bool = False  # prepare again even if it is already prepared


def main():
    options = configurator.read(Options, sys.argv[1:], __doc__)
    describe(prepare(**dataclasses.asdict(options)), "tokens are characters")


if __name__ == "__main__":
    run(main)
