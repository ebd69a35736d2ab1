"""Settings of a program: the fields of a dataclass. Type, range, choices, default and help of one are its line.

    python train.py config/longhorn_350m.py --micro_batch_size=8 --compile

    max_iters: Count = 4800  # optimiser steps
    schedule: Literal["cosine", "wsd"] = "cosine"  # of the learning rate

Types are int, float, bool, str, Path and a Literal of strings; a number with a range is Count, Whole, Seed, Positive or
Annotated[float, Range(...)], and may also be its default. The comment at the end of the line is the help.

`load` is for programs with config files. Arguments are read left to right and the later one wins. A config file is
plain Python that assigns to keys and sees the values so far (`batch_tokens = block_size * 64`); `include("laptop.py")`
runs another file of its folder first; helpers start with `_`, modules and functions are ignored. It is executed, so
run only files that you would run as programs. Nothing on the command line is evaluated: `--out_dir=a=b` is the string
`a=b`.

`read` is for all others, whose settings may also be `--key value` and `--other-key`. There tuple[int, ...] is values
joined by commas, list[str] several words, and a field without a default an argument without a key.

Class attributes: with RENAMED = {"old_key": "new_key"} the error for an old key names the new one; with PROGRAMS =
{"task": "program.py"} the error for a config file that sets `task = "task"` names the program to run; ARGUMENTS =
("models",) are further fields without a key; with OTHERS = "words" unknown --key=value are put into `others`, and the
help says `words` about them.
"""

import builtins
import contextlib
import dataclasses
import difflib
import inspect
import math
import numbers
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
import types
import typing
from pathlib import Path
from typing import Annotated

from common.errors import ConfigError, regular

KINDS = {int: "a whole number (int)", float: "a finite number (float)", bool: "true or false (bool)",
         str: "a string of UTF-8 (str)", Path: "a path"}
BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
LARGEST = 2**48


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, or between `above` and `below`, which are left out themselves."""

    least: float = -LARGEST
    most: float = LARGEST
    above: float = -math.inf
    below: float = math.inf

    def broken_by(self, value):
        """The limit that a number does not keep, in words; None if it is in the range, or no number."""
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
    """What a field's line says: `kind` (of KINDS, or a Literal), `choices`, `range`, `many` (tuple, list or None) and
    `default`."""

    def __init__(self, kind, default):
        self.default, self.many = default, None
        if typing.get_origin(kind) in (tuple, list):
            self.many = typing.get_origin(kind)
            kind = typing.get_args(kind)[0]
        self.range = Range()
        if typing.get_origin(kind) is Annotated:
            kind, self.range = typing.get_args(kind)
        self.kind, self.choices = kind, typing.get_args(kind)

    def check(self, name, value):
        """Raises ConfigError for a number outside the range, unless it is the default."""
        for number in value or () if self.many else [value]:
            limit = self.range.broken_by(number)
            if limit and value != self.default:
                if abs(number) >= 10**20:
                    number = f"of {int(number).bit_length()} bits"
                default = f", or {self.default}, its default" if self.range.broken_by(self.default) else ""
                raise ConfigError(f"{name} {number} must be {limit}{default}")


def _settings(config_class):
    kinds = typing.get_type_hints(config_class, include_extras=True)
    return {field.name: Setting(kinds[field.name], field.default) for field in dataclasses.fields(config_class)}


def _instance(config_class, settings, values, **more):
    """The dataclass with these values, and further attributes. Raises ConfigError."""
    try:
        config = config_class(**values)
    except ValueError as error:
        raise ConfigError(error) from error
    for name, setting in settings.items():
        setting.check(name, getattr(config, name))
    vars(config).update(more)  # works for frozen dataclasses too
    return config


# -------------------------------------------------------------------------------------------- programs of config files

def load(config_class, argv, prog=None):
    """Read `argv` (config files ending in .py and --key=value, left to right) into an instance of the dataclass.

    The instance gets two more attributes: `config_files`, the paths read, and `overrides`, {key: value} of every key
    that a file or the command line set. `--help` prints all keys with the config files' values and exits with 0.
    Raises ConfigError for an unknown key, a wrong type, choice or number, an unreadable or failing file, and a
    ValueError raised in the dataclass's __post_init__.
    """
    settings = _settings(config_class)
    values = {name: setting.default for name, setting in settings.items()}
    help_asked = "--help" in argv or "-h" in argv
    config_files, overrides = [], {}
    for argument in argv:
        if argument.endswith(".py") and not argument.startswith("--"):
            config_files.append(argument)
            new = _from_file(config_class, argument, values, settings, argv)
        elif help_asked:
            continue
        elif argument.startswith("--"):
            new = _from_argument(config_class, argument, values, settings)
        else:
            raise ConfigError(f"unexpected argument {argument!r}: give config files (*.py) and --key=value; "
                              "--help lists all keys")
        values.update(new)
        overrides.update(new)
    if help_asked:
        about = "Read left to right, the later one wins; a config file is Python that assigns to the same keys."
        _print_help(config_class, settings, values, f"{prog or _program()} [config.py ...]", about)
    return _instance(config_class, settings, values, config_files=config_files, overrides=overrides)


def _from_argument(config_class, argument, values, settings):
    """{key: value} of --key=value; --key alone sets a bool."""
    key, equals, text = argument[2:].partition("=")
    _check_known(config_class, key, values, "--")
    if not equals:
        if settings[key].kind is not bool:
            raise ConfigError(f"--{key} needs a value, joined by '=': --{key}={values[key]}")
        text = "true"
    return {key: _convert(settings[key], text, f"--{key}=", from_text=True)}


def _from_file(config_class, path, values, settings, argv):
    """{key: value} of what a config file assigns, helpers left out."""
    assigned = _run_file(path, values)
    program = getattr(config_class, "PROGRAMS", {}).get(str(assigned.get("task")))
    if program:
        raise ConfigError(f"{path} has task = {assigned['task']!r}: python {program} {shlex.join(argv)}")
    new = {}
    for key, value in assigned.items():
        _check_known(config_class, key, values, where=f"{path}: ")
        new[key] = _convert(settings[key], value, f"{path}: {key} = ", from_text=False)
    return new


def _run_file(path, values):
    """{name: value} of everything that a config file assigns, except helpers."""
    folder, name = os.path.split(path)
    try:
        source = regular(path).read_bytes()
    except (OSError, ValueError) as error:
        files = []
        if os.path.isdir(folder or "."):
            files = [file for file in os.listdir(folder or ".") if file.endswith(".py")]
        near = _nearest(name, files, os.path.join(folder, ""))
        raise ConfigError(f"{path}: {getattr(error, 'strerror', error)}{near}") from error
    # The current values are built-in names for the file, so that `names` holds only what the file itself assigns.
    known = vars(builtins) | values
    names = {"__builtins__": known, "__name__": "config", "__file__": path}
    known["include"] = lambda other: names.update(_run_file(os.path.join(folder, other), values | names))
    try:
        exec(compile(source, path, "exec", dont_inherit=True), names)  # noqa: S102
    except ConfigError:  # of an included file
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}:{_place(path, error)}") from error
    return {key: value for key, value in names.items() if key in values or not _is_helper(key, value)}


def _place(path, error):
    """'LINE: what went wrong' of an error in a config file."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{error.lineno or 1}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{(lines or [1])[-1]}: {type(error).__name__}: {error}"


def _is_helper(name, value):
    return name.startswith("_") or isinstance(value, types.ModuleType) or callable(value)


def _check_known(config_class, key, known, dashes="", where=""):
    if key in known:
        return
    if renamed := getattr(config_class, "RENAMED", {}).get(key):
        raise ConfigError(f"{where}unknown key '{dashes}{key}': it is now '{dashes}{renamed}'")
    near = _nearest(key.replace("-", "_").lower(), known, dashes)
    helper = "" if near or dashes else "; a helper's name starts with _"
    raise ConfigError(f"{where}unknown key '{dashes}{key}'{near or ';'} --help lists all keys{helper}")


def _nearest(word, words, prefix=""):
    near = difflib.get_close_matches(word, words, n=1)
    return f": did you mean '{prefix}{near[0]}'?" if near else ""


# ------------------------------------------------------------------------------------------------- values and words

def _convert(setting, value, where, from_text):
    """`value` as a setting's kind. Raises ConfigError, starting with `where`. `from_text`: a command-line string."""
    kind, choices = setting.kind, setting.choices
    with contextlib.suppress(ValueError, OverflowError):
        if choices:
            return _choice(value, choices)
        if kind in (str, Path):
            return kind(_string(value, empty=kind is str))
        if kind is bool:
            return _bool(value, from_text)
        return _number(kind, value, from_text)
    shown = value if from_text else repr(value)[:80]
    expected = KINDS.get(kind) or f"one of {', '.join(choices)}"
    raise ConfigError(f"{where}{shown}: expected {expected}{_nearest(str(value)[:80], choices)}")


def _choice(value, choices):
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError


def _string(value, empty):
    if not isinstance(value, str) or "\0" in value or not (value or empty):
        raise ValueError
    value.encode()  # UnicodeError is a ValueError: a name that is not UTF-8 could be saved but not read back
    return value


def _bool(value, from_text):
    if from_text:
        value = BOOLS.get(value.lower())
    if not isinstance(value, bool):
        raise ValueError
    return value


def _number(kind, value, from_text):
    if not from_text and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise ValueError
    if kind is int and (isinstance(value, numbers.Integral) or from_text and re.fullmatch("[+-]?[0-9_]+", value)):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    if kind is float:
        return number
    if not number.is_integer() or abs(number) > 2**53:  # larger floats are not exact
        raise ValueError
    return int(number)


# ------------------------------------------------------------------------------------------------------- other programs

def read(config_class, argv, doc, prog=None):
    """Read `argv` of a program without config files into an instance of the dataclass.

    config_class: or {command: dataclass}, of which the first argument chooses one. doc: the description, for --help.
    The instance also has `command`; `overrides`, {key: value} of what was given; and `others`, the --key=value of
    unknown keys, which only a class with OTHERS takes. `--help` exits with 0. Raises ConfigError as `load` does.
    """
    words, prog, command = list(argv), prog or _program(), None
    help_asked = "--help" in words or "-h" in words
    if isinstance(config_class, dict):
        command, config_class = _command(config_class, words, prog, doc, help_asked)
        prog += f" {command}"
    settings = _settings(config_class)
    needed = [key for key, setting in settings.items() if setting.default is dataclasses.MISSING]
    places = [*needed, *getattr(config_class, "ARGUMENTS", ())]
    if help_asked:
        values = {key: setting.default for key, setting in settings.items()}
        _print_help(config_class, settings, values, " ".join([prog, *places]), doc, places)
    given, others = _sort(words, config_class, settings, list(places))
    values = {}
    for key, texts in given.items():
        where = f"{key} " if key in places else f"--{key}="
        new = [_convert(settings[key], text, where, from_text=True) for text in texts]
        values[key] = tuple(dict.fromkeys(new)) if settings[key].many else new[0]
    for key in needed:
        if key not in values:
            raise ConfigError(f"give the {key}: {_comments(config_class)[0][key]}; --help lists all")
    return _instance(config_class, settings, values, command=command, overrides=values, others=others)


def _command(classes, words, prog, doc, help_asked):
    """(command, its dataclass), the command taken off the words. Prints the help if there is none."""
    if words and words[0] in classes:
        command = words.pop(0)
        return command, classes[command]
    names = ", ".join(classes)
    if help_asked:
        print(f"usage: {prog} COMMAND ...\n\n{doc.strip()}\n\nCOMMAND --help lists its settings; commands: {names}")
        raise SystemExit(0)
    raise ConfigError(f"the first argument must be one of {names}; --help says more")


def _sort(words, config_class, settings, places):
    """({key: [text]}, [--key=value of an unknown key]) of the words; places: keys of arguments without a key."""
    given, others = {}, []
    while words:
        word = words.pop(0)
        key, equals, text = word[2:].partition("=")
        key = key.replace("-", "_")
        if not word.startswith("--"):
            if not places:
                raise ConfigError(f"unexpected argument {word!r}: --help lists all")
            key, texts = places[0], [word]
            if not settings[key].many:
                places.pop(0)
        elif equals and key not in settings and hasattr(config_class, "OTHERS"):
            others.append(word)
            continue
        else:
            _check_known(config_class, key, settings, "--")
            several = settings[key].many is list and not (places and settings[places[0]].many)
            texts = [text] if equals else _following(settings[key], words, several)
        if settings[key].many is tuple:
            texts = [part for text in texts for part in text.split(",") if part]
        if not texts:
            raise ConfigError(f"--{key} needs a value: --{key}=...")
        given[key] = [*given.get(key, ()), *texts] if settings[key].many else texts
    return given, others


def _following(setting, words, several):
    """The words after a --key that are its value, taken off `words`."""
    if setting.kind is bool:
        return ["true"]
    texts = []
    while words and not words[0].startswith("--") and (several or not texts):
        texts.append(words.pop(0))
    return texts


# ----------------------------------------------------------------------------------------------------------------- help

def _program():
    return os.path.basename(sys.argv[0])


def _comments(config_class):
    """{field: the comment at the end of its line, and below} and {field: the `# --- heading` above it}; base classes
    first."""
    meanings, headings = {}, {}
    for cls in reversed(config_class.__mro__):
        field = heading = None
        try:
            lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
        except (OSError, TypeError):  # built in, or typed at a prompt: no source to read
            continue
        for line in lines:
            statement = re.match(r"    (\w+)(:?)", line)  # a field, or the end of the one before
            if line.strip().startswith("# ---"):
                heading = line.strip("#- ")
            elif statement:
                field = statement[1] if statement[2] else None
                if field and heading and field not in meanings:  # a redefined field keeps the base class's heading
                    headings[field] = heading
                    heading = None
            comment = re.search(r"  # ((?!---).*)$", line)
            if field and statement:
                meanings[field] = comment[1] if comment else meanings.get(field, "")
            elif field and comment:
                meanings[field] += " " + comment[1]
    return meanings, headings


def _print_help(config_class, settings, values, usage, about, places=()):
    """Print the usage, what it is about, and a line per setting; ends the program with exit code 0."""
    print(f"usage: {usage} [--key=value ...]\n\n{about.strip()}")
    meanings, headings = _comments(config_class)
    rows = {}  # key: (--key, kind, value), meaning
    for key, value in values.items():
        setting, meaning = settings[key], meanings.get(key, "")
        kind = setting.kind.__name__
        if setting.choices:
            kind, meaning = "choice", f"{meaning} (one of {', '.join(setting.choices)})".strip()
        if setting.many:
            kind += " ..." if setting.many is list else ",..."
        name = key if key in places else f"--{key}"
        shown = "-" if value in (None, (), dataclasses.MISSING) else str(value) or "''"
        rows[key] = (name, kind, shown), meaning
    columns = zip(*(row for row, _ in rows.values()), strict=True)
    widths = [min(max(map(len, column)), 24) for column in columns]
    indent = " " * (sum(widths) + 8)
    width = max(shutil.get_terminal_size().columns, sum(widths) + 30)
    if next(iter(rows), None) not in headings:
        print()
    for key, (row, meaning) in rows.items():
        if key in headings:
            print(f"\n{headings[key]}:")
        left = "  "
        for word, column_width in zip(row, widths, strict=True):
            left += word.ljust(column_width) + "  "
        text = textwrap.fill(meaning, width, initial_indent=left, subsequent_indent=indent, break_on_hyphens=False)
        print(text or left.rstrip())
    raise SystemExit(0)
