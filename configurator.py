"""A program's settings are the fields of a dataclass. A field's line gives its type, range, choices, default and help.

    python train.py config/longhorn_350m.py --micro_batch_size=8 --compile

    max_iters: Count = 4800  # optimiser steps
    schedule: Literal["cosine", "wsd"] = "cosine"  # learning-rate schedule

A value may also be the next word, `--micro_batch_size 8`, and a key may have dashes, `--micro-batch-size=8`.

Types are int, float, bool, str, Path and a Literal of strings. A number with a range is Count, Whole, Seed, Positive or
Annotated[float, Range(...)]; its default may lie outside the range. The comment at the end of the line is the help.

`load` is for programs with config files. It reads arguments left to right, and later values win. A config file is plain
Python that assigns to keys and sees the values so far (`batch_tokens = block_size * 64`). `include("laptop.py")` runs
another file from the same folder first. Names that start with `_`, modules and functions are ignored. Config files are
executed, so use only files that you would run as programs. Nothing on the command line is evaluated: `--out_dir=a=b` is
the string `a=b`.

`read` is for all other programs. There tuple[int, ...] takes values joined by commas, list[str] takes several words,
and a field without a default is an argument without a key.

Class attributes:

    RENAMED = {"old_key": "new_key"}   a table of common/old_names.py: the error for an old key says what to type
    PROGRAMS = {"task": "program.py"}  the error for a config file with `task = "task"` names the program to run
    ARGUMENTS = ("models",)            further fields to give without a key
    OTHERS = "words"                   unknown --key=value go to `others`, and the help describes them by `words`
    FIRST = ("model",)                 fields on top of the help; the others follow under their `# --- heading`
"""

import builtins
import contextlib
import dataclasses
import functools
import math
import numbers
import os
import shlex
import sys
import traceback
import types
import typing
from pathlib import Path
from typing import Annotated

from common import old_names, program_help
from common.errors import ConfigError, regular

KINDS = {int: "a whole number (int)", float: "a finite number (float)", bool: "true or false (bool)",
         str: "a string of UTF-8 (str)", Path: "a path"}
BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
HELP = {"--help", "-h"}
LARGEST = 2**48


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, and strictly between `above` and `below`."""

    least: float = -LARGEST
    most: float = LARGEST
    above: float = -math.inf
    below: float = math.inf

    def broken_by(self, value):
        """The limit that a value breaks, in words; None if it is in range or not a number."""
        if not isinstance(value, (int, float)):
            return None
        if value < self.least:
            return f"at least {self.least:,}"
        if value > self.most:
            return f"at most {self.most:,}"
        if value <= self.above:
            return f"above {self.above:,}"
        if value >= self.below:
            return f"below {self.below:,}"
        return None


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(above=0, below=1)]
Probability = Annotated[float, Range(0, 1)]
Minutes = Annotated[float, Range(above=0, most=1e6)]
Seconds = Annotated[float, Range(1)]


class Setting:
    """A field's declaration: `kind` (one of KINDS, or a Literal), `choices`, `range`, `many` (tuple, list or None) and
    `default`."""

    def __init__(self, kind, default):
        self.default = default
        self.many = None
        if typing.get_origin(kind) in (tuple, list):
            self.many = typing.get_origin(kind)
            kind = typing.get_args(kind)[0]
        self.range = Range()
        if typing.get_origin(kind) is Annotated:
            kind, self.range = typing.get_args(kind)
        self.kind = kind
        self.choices = typing.get_args(kind)

    def check(self, name, value):
        """Raises ConfigError for a number outside the range, unless it is the default."""
        for number in value or () if self.many else [value]:
            limit = self.range.broken_by(number)
            if limit and value != self.default:
                default = f", or {self.default}, its default" if self.range.broken_by(self.default) else ""
                raise ConfigError(f"{name} {number} must be {limit}{default}")


@functools.cache
def settings(config_class):
    """{field: Setting} of a dataclass."""
    kinds = typing.get_type_hints(config_class, include_extras=True)
    return {field.name: Setting(kinds[field.name], field.default) for field in dataclasses.fields(config_class)}


# ------------------------------------------------------------------------------------------------------- command lines

LEFT_TO_RIGHT = "Arguments are read left to right; later values win. Config files are Python that sets the same keys."


def load(config_class, argv, prog=None, doc=LEFT_TO_RIGHT):
    """Read `argv` (config files ending in .py and --key=value, left to right) into an instance of the dataclass.

    The instance gets two more attributes: `config_files`, the paths read, and `overrides`, {key: value} of every key
    that a file or the command line set. `--help` prints all keys with the config files' values and exits with 0.
    Raises one ConfigError for all unknown keys, wrong types and wrong choices. Also raises it for a number out of
    range, a file that is unreadable or fails, and a ValueError in the dataclass's __post_init__.
    """
    return read(config_class, argv, doc, prog, with_files=True)


def read(config_class, argv, doc, prog=None, with_files=False):
    """Read `argv` of a program without config files into an instance of the dataclass.

    config_class: a dataclass, or {command: dataclass} if the first argument is a command. doc: the description for
    --help. The instance also has `overrides`, `command`, and `others`: the unknown --key=value, which only a class with
    OTHERS accepts. Raises ConfigError as `load` does.
    """
    words = list(argv)
    prog = prog or os.path.basename(sys.argv[0])
    command = None
    if isinstance(config_class, dict):
        command = _command(config_class, words, prog, doc)
        config_class = config_class[command]
        prog = f"{prog} {command}"
    reader = Reader(config_class, words)
    files, others = reader.read_words(words, with_files)
    usage = [prog, *reader.usage, *(["[config.py ...]"] if with_files else [])]
    return reader.finish(" ".join(usage), doc, command=command, others=others, config_files=files)


def _command(classes, words, prog, doc):
    """Remove the command from `words` and return it. Without one, print the help or raise ConfigError."""
    if words and words[0] in classes:
        return words.pop(0)
    names = ", ".join(classes)
    if HELP & {*words}:
        print(f"usage: {prog} COMMAND ...\n\n{doc.strip()}\n\nCOMMAND --help lists its settings; commands: {names}")
        raise SystemExit(0)
    raise ConfigError(f"the first argument must be one of {names}; --help says more")


class Reader:
    """Reads values for the dataclass's fields from a command line and from config files."""

    def __init__(self, config_class, argv):
        self.config_class = config_class
        self.argv = list(argv)
        self.help_asked = bool(HELP & {*argv})
        self.settings = settings(config_class)
        self.values = {name: setting.default for name, setting in self.settings.items()}
        self.overrides = {}
        self.mistakes = []  # see old_names.check
        self.hint = ""  # printed after the mistakes
        self.needed = [key for key, value in self.values.items() if value is dataclasses.MISSING]
        more = getattr(config_class, "ARGUMENTS", ())
        self.places = [*self.needed, *more]  # fields given without a key
        self.usage = [*self.needed, *(f"[{key}]" for key in more)]

    def read_words(self, words, with_files=False):
        """Read the words of a command line. Return its config files, and the --key=value for `others`."""
        words = [word for word in words if word not in HELP]
        places = list(self.places)
        files = []
        others = []
        while words:
            word = words.pop(0)
            key, equals, text = word[2:].partition("=")
            key = key.replace("-", "_")
            several = places and self.settings[places[0]].many  # a tuple or list takes all remaining words
            if word.startswith("--"):
                texts = [text] if equals else self.following(key, words, alone=several)
                if equals and key not in self.settings and hasattr(self.config_class, "OTHERS"):
                    others.append(word)
                elif not self.help_asked:
                    self.read_key(key, texts)
            elif with_files and (word.endswith(".py") or word.startswith("-") or not places):
                files.append(word)
                self.read_file(word)
            elif self.help_asked:
                continue
            elif places:
                self.read_key(places[0] if several else places.pop(0), [word])
            else:
                raise ConfigError(f"unexpected argument {word!r}: --help lists all keys")
        return files, others

    def set(self, key, value):
        self.values[key] = self.overrides[key] = value

    def is_foreign(self, where, key, value):
        """Note the mistake and return True if there is no such key or its value belongs to another program."""
        row = old_names.row_of(self, key, value)
        setting = self.settings.get(key)
        if setting and (row is None or not setting.choices and os.path.exists(str(value))):
            return False
        self.mistakes.append((where, key, value, row))
        return True

    def convert(self, where, key, value, start):
        """Convert the value to the key's kind. If that fails, note the mistake and return None."""
        try:
            return _convert(self.settings[key], value, start, from_text=not where)
        except ConfigError as error:
            self.mistakes.append((where, None, str(error), None))

    def read_key(self, key, texts):
        """Set a key from the texts that follow it. A bool without a value becomes true."""
        if self.is_foreign("", key, " ".join(texts) or "true"):
            return
        setting = self.settings[key]
        if setting.kind is bool and not texts:
            texts = ["true"]
        if setting.many is tuple:
            texts = [part for text in texts for part in text.split(",") if part]
        if not texts:
            raise ConfigError(f"--{key} needs a value: --{key}={self.values[key] or '...'}")
        start = f"{key} " if key in self.places else f"--{key}="
        new = [self.convert("", key, text, start) for text in texts]
        if setting.many:
            self.set(key, tuple(dict.fromkeys([*self.overrides.get(key, ()), *new])))
        else:
            self.set(key, new[0])

    def following(self, key, words, alone):
        """Remove the value of a --key from `words` and return it: all words up to the next --key for a list, but at
        most one if `alone` or for any other key."""
        texts = []
        setting = self.settings.get(key)
        several = setting and setting.many is list and not alone
        if setting is None or setting.kind is not bool or (words and words[0].lower() in BOOLS):
            while words and not words[0].startswith("--") and (several or not texts):
                texts.append(words.pop(0))
        return texts

    def read_file(self, path):
        """Set the keys that a config file assigns. Its helpers are ignored."""
        row = old_names.row_of(self, "config-file", path.removesuffix(".py"))  # no key has a dash
        if row and not os.path.exists(path):
            raise ConfigError(f"{path}: {row}")
        if not path.endswith(".py"):
            near = _near(path) or old_names.nearest(path.partition("=")[0].strip("-"), self.settings, "--")
            near = near or ": give config files (*.py) and --key=value; --help lists all keys"
            raise ConfigError(f"unexpected argument {path!r}{near}")
        assigned = _run_file(path, self.values)
        program = getattr(self.config_class, "PROGRAMS", {}).get(str(assigned.get("task")))
        if program:
            raise ConfigError(f"{path} has task = {assigned['task']!r}: python {program} {shlex.join(self.argv)}")
        for key, value in assigned.items():
            if not self.is_foreign(f"{path}: ", key, value):
                self.set(key, self.convert(f"{path}: ", key, value, f"{key} = "))

    def finish(self, usage, about, **more):
        """Return the dataclass with its values, `overrides` and further attributes. If help was asked for, print it and
        exit."""
        old_names.check(self)
        if self.help_asked:
            program_help.show(usage, about, self)
            raise SystemExit(0)
        for key in self.needed:
            if key not in self.overrides:
                meanings, _ = program_help.comments(self.config_class)
                raise ConfigError(f"give the {key}: {meanings[key]}; --help lists all keys")
        try:
            config = self.config_class(**self.values)
        except ValueError as error:
            raise ConfigError(error) from error
        for name, setting in self.settings.items():
            setting.check(name, getattr(config, name))
        vars(config).update(overrides=self.overrides, **more)  # works for frozen dataclasses too
        return config


# --------------------------------------------------------------------------------------------- config files and values

def _run_file(path, values):
    """Run a config file, and return {name: value} of everything that it assigns, except helpers."""
    folder = os.path.dirname(path)
    try:
        source = regular(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', error)}{_near(path)}") from error
    # The current values are built-in names for the file, so `names` holds only names that the file itself assigns.
    known = vars(builtins) | values
    names = {"__builtins__": known, "__name__": "config", "__file__": path}
    known["include"] = lambda other: names.update(_run_file(os.path.join(folder, other), values | names))
    try:
        exec(compile(source, path, "exec", dont_inherit=True), names)  # noqa: S102
    except ConfigError:  # raised by an included file
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}:{_place(path, error)}") from error
    assigned = {}
    for key, value in names.items():
        is_helper = key.startswith("_") or isinstance(value, types.ModuleType) or callable(value)
        if key in values or not is_helper:
            assigned[key] = value
    try:
        str(assigned)
    except Exception as error:  # an integer of more than 4300 digits, say
        raise ConfigError(f"{path}: a value cannot be shown ({error})") from error
    return assigned


def _near(path):
    """Guess which config file was meant: one in the path's folder or, if it names no folder, here or in config/."""
    folder, name = os.path.split(path.removesuffix(".py"))
    guesses = (old_names.nearest(name, [file.stem for file in Path(place).glob("*.py")], os.path.join(place, ""), ".py")
               for place in ([folder] if folder else ["", "config"]))
    return next(filter(None, guesses), "")


def _place(path, error):
    """'LINE: what went wrong', for an error in a config file."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{error.lineno or 1}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{(lines or [1])[-1]}: {type(error).__name__}: {error}"


def _convert(setting, value, where, from_text):
    """Convert `value` to a setting's kind. Raises a ConfigError that starts with `where`. from_text: `value` is a
    command-line string."""
    kind = setting.kind
    choices = setting.choices
    with contextlib.suppress(ValueError, OverflowError):
        if choices:
            if value in choices:
                return value
        elif kind is bool:
            given = BOOLS.get(value.lower()) if from_text else value
            if isinstance(given, bool):
                return given
        elif kind in (int, float):
            if from_text or isinstance(value, numbers.Real) and not isinstance(value, bool):
                return _number(kind, value)
        elif isinstance(value, str) and "\0" not in value and (value or kind is str):
            value.encode()  # UnicodeError is a ValueError: a name that is not UTF-8 could be saved but not read back
            if value.startswith("~/"):  # the shell leaves --out_dir=~/run as it is
                value = os.path.expanduser(value)
            return kind(value)
    shown = value if from_text else repr(value)[:80]
    expected = KINDS.get(kind) or f"one of {', '.join(choices)}"
    raise ConfigError(f"{where}{shown}: expected {expected}{old_names.nearest(str(value)[:80], choices)}")


def _number(kind, value):
    """Convert to a finite number. Raises ValueError or OverflowError for anything else, and for an int above 2^53 or
    with a fraction."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    if kind is float:
        return number
    if not number.is_integer() or abs(number) > 2**53:
        raise ValueError
    return int(number)
