"""Settings of a program: the fields of a dataclass, from config files and --key=value.

    python train.py config/longhorn_350m.py --micro_batch_size=8 --compile

Defaults and types (int, float, bool, str, a Literal of strings) are the dataclass's; the comment at the end of a
field's line is its help. Arguments are read left to right and the later one wins. A config file is plain Python that
assigns to keys and sees the values so far (`batch_tokens = block_size * 64`); `include("laptop.py")` runs another file
of its folder first; helpers start with `_`, modules and functions are ignored. It is executed, so run only files that
you would run as programs. Nothing on the command line is evaluated: `--out_dir=a=b` is the string `a=b`.

With a class attribute RENAMED = {"old_key": "new_key"} the error for an old key names the new one; with PROGRAMS =
{"task": "program.py"} the error for a config file that sets `task = "task"` names the program to run.
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

from common.errors import ConfigError, regular

KINDS = {int: "a whole number (int)", float: "a finite number (float)", bool: "true or false (bool)",
         str: "a string of UTF-8 (str)"}
BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def load(config_class, argv, prog=None):
    """Read `argv` (config files ending in .py and --key=value, left to right) into an instance of the dataclass.

    The instance gets two more attributes: `config_files`, the paths read, and `overrides`, {key: value} of every key
    that a file or the command line set. `--help` prints all keys with the config files' values and exits with 0.
    Raises ConfigError for an unknown key, a wrong type or choice, an unreadable or failing file, and a ValueError
    raised in the dataclass's __post_init__.
    """
    kinds = typing.get_type_hints(config_class)
    values = {field.name: field.default for field in dataclasses.fields(config_class)}
    help_asked = "--help" in argv or "-h" in argv
    config_files, overrides = [], {}
    for argument in argv:
        if argument.endswith(".py") and not argument.startswith("--"):
            config_files.append(argument)
            new = _from_file(config_class, argument, values, kinds, argv)
        elif help_asked:
            continue
        elif argument.startswith("--"):
            new = _from_argument(config_class, argument, values, kinds)
        else:
            raise ConfigError(f"unexpected argument {argument!r}: give config files (*.py) and --key=value; "
                              "--help lists all keys")
        values.update(new)
        overrides.update(new)
    if help_asked:
        print(_help(config_class, values, kinds, prog or os.path.basename(sys.argv[0])))
        raise SystemExit(0)
    try:
        config = config_class(**values)
    except ValueError as error:
        raise ConfigError(error) from error
    vars(config).update(config_files=config_files, overrides=overrides)  # works for frozen dataclasses too
    return config


def _from_argument(config_class, argument, values, kinds):
    """{key: value} of --key=value; --key alone sets a bool."""
    key, equals, text = argument[2:].partition("=")
    _check_known(config_class, key, values, "--")
    if not equals:
        if kinds[key] is not bool:
            raise ConfigError(f"--{key} needs a value, joined by '=': --{key}={values[key]}")
        text = "true"
    return {key: _convert(kinds[key], text, f"--{key}=", from_text=True)}


def _from_file(config_class, path, values, kinds, argv):
    """{key: value} of what a config file assigns, helpers left out."""
    assigned = _run_file(path, values)
    program = getattr(config_class, "PROGRAMS", {}).get(str(assigned.get("task")))
    if program:
        raise ConfigError(f"{path} has task = {assigned['task']!r}: python {program} {shlex.join(argv)}")
    new = {}
    for key, value in assigned.items():
        _check_known(config_class, key, values, where=f"{path}: ")
        new[key] = _convert(kinds[key], value, f"{path}: {key} = ", from_text=False)
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


def _convert(kind, value, where, from_text):
    """Convert `value` to `kind`. Raises ConfigError, starting with `where`. `from_text`: a command-line string."""
    choices = typing.get_args(kind)
    with contextlib.suppress(ValueError, OverflowError):
        if choices:
            return _choice(value, choices)
        if kind is str:
            return _string(value)
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


def _string(value):
    if not isinstance(value, str) or "\0" in value:
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


def _comments(config_class):
    """{field: the comment at the end of its line} and {field: the `# --- heading` above it}, base classes first."""
    meanings, headings = {}, {}
    for cls in reversed(config_class.__mro__):
        field = heading = None
        try:
            lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
        except (OSError, TypeError):  # built in, or typed at a prompt: no source to read
            continue
        for line in lines:
            if line.strip().startswith("# ---"):
                heading = line.strip("#- ")
            elif statement := re.match(r"    (\w+)(:?)", line):  # a field, or the end of the one before
                field = statement[1] if statement[2] else None
                if field and heading and field not in meanings:  # a redefined field keeps the base class's heading
                    headings[field] = heading
                    heading = None
            if field:
                comment = re.search(r"  # ((?!---).*)$", line)
                meanings[field] = comment[1] if comment else meanings.get(field, "")
    return meanings, headings


def _help(config_class, values, kinds, prog):
    meanings, headings = _comments(config_class)
    rows = {}  # key: (--key, kind, value), meaning
    for key, value in values.items():
        kind, meaning = kinds[key], meanings.get(key, "")
        choices = ", ".join(typing.get_args(kind))
        if choices:
            meaning = f"{meaning} (one of {choices})".strip()
        rows[key] = (f"--{key}", "choice" if choices else kind.__name__, str(value) or "''"), meaning
    columns = zip(*(row for row, _ in rows.values()), strict=True)
    widths = [min(max(map(len, column)), 24) for column in columns]
    indent = " " * (sum(widths) + 8)
    width = max(shutil.get_terminal_size().columns, sum(widths) + 30)
    lines = [
        f"usage: {prog} [config.py ...] [--key=value ...]",
        "",
        "Read left to right, the later one wins; a config file is Python that assigns to the same keys.",
    ]
    if next(iter(rows), None) not in headings:
        lines.append("")
    for key, (row, meaning) in rows.items():
        if key in headings:
            lines += ["", headings[key] + ":"]
        left = "  "
        for word, column_width in zip(row, widths, strict=True):
            left += word.ljust(column_width) + "  "
        text = textwrap.fill(meaning, width, initial_indent=left, subsequent_indent=indent, break_on_hyphens=False)
        lines.append(text or left.rstrip())
    return "\n".join(lines)
