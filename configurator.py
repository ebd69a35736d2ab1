"""A config from files and --key=value over known keys.

    python train.py config/longhorn_350m.py --batch_size=8 --compile

The known keys are the fields of one dataclass; defaults, types and the help text (the comment at the end of a
field's line) are read from its source, so they stand in one place:

    learning_rate: float = 6e-4  # peak, reached after warmup_iters

Arguments are read left to right and the later one wins. A config file is plain Python: assignments to keys, with the
values so far in sight (`batch_tokens = block_size * 64`). Helpers start with `_`; modules and functions are ignored.

The surprise: a config file is executed, by design; run only files you would run as programs. Nothing on the command
line is evaluated: a value is parsed by its key's type, and `--out_dir=a=b` is the string `a=b`.
"""
import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import math
import numbers
import os
import re
import shutil
import sys
import textwrap
import tokenize
import traceback
import types
import typing

KINDS = {int: "a whole number (int)", float: "a finite number (float)", bool: "true or false (bool)",
         str: "a string (str)", type(None): "none"}
BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class ConfigError(ValueError):
    """A user's mistake in a config file or on the command line; the message is always one line."""

    def __init__(self, message):
        super().__init__(" ".join(str(message).split()))


def load(config_class, argv, prog=None):
    """Read `argv` (config files ending in .py and --key=value, left to right) into an instance of the dataclass.

    The instance also gets two attributes that are not fields: `config_files`, the paths read, and `overrides`,
    {key: value} of every key that a file or the command line set. `--help` prints all keys and exits with 0.
    Raises ConfigError for an unknown key, a wrong type or choice, an unreadable or failing file, and for a ValueError
    of the dataclass's own __post_init__.
    """
    fields = {f.name: f for f in dataclasses.fields(config_class) if f.init}
    kinds = typing.get_type_hints(config_class)
    values = {name: _default(f) for name, f in fields.items()}
    if "--help" in argv or "-h" in argv:
        print(_help(config_class, values, kinds, prog or os.path.basename(sys.argv[0])))
        raise SystemExit(0)
    config_files, overrides = [], {}
    for argument in argv:
        if argument.startswith("--"):
            key, equals, text = argument[2:].partition("=")
            _check_known(key, values, dashes="--")
            if not equals:
                if bool not in _members(kinds[key]):
                    raise ConfigError(f"--{key} needs a value, joined by '=': --{key}={_show(values[key])}")
                text = "true"
            new = {key: _convert(kinds[key], text, f"--{key}=", from_text=True)}
        elif argument.endswith(".py"):
            assigned = _run_file(argument, values)
            for key in assigned:
                _check_known(key, values, where=f"{argument}: ")
            new = {key: _convert(kinds[key], value, f"{argument}: {key} = ", from_text=False)
                   for key, value in assigned.items()}
            config_files.append(argument)
        else:
            raise ConfigError(f"unexpected argument {argument!r}: give config files (*.py) and --key=value; "
                              "--help lists all keys")
        values.update(new)
        overrides.update(new)
    try:
        config = config_class(**values)
    except ValueError as error:
        raise ConfigError(error) from error
    object.__setattr__(config, "config_files", config_files)  # works for frozen dataclasses too
    object.__setattr__(config, "overrides", overrides)
    return config


@contextlib.contextmanager
def main_error(prog, *errors):
    """`with main_error('train.py', CheckpointError): main()`: a ConfigError, or one of `errors`, becomes the line
    `train.py: error: ...` on stderr and exit code 2, without our stack. So does, with nothing said and exit code 130, a reader
    of our output that has gone, as after `| head`."""
    try:
        yield
    except (ConfigError, BrokenPipeError, *errors) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone("\n"):
            raise SystemExit(130) from None
        if not isinstance(error, (ConfigError, *errors)):  # another pipe than our output
            raise
        with contextlib.suppress(OSError):  # a full disk behind stderr: the exit code still says it
            print(f"{prog}: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        _reader_has_gone()  # what is still to be written would be a stack at the interpreter's end


def _reader_has_gone(last=""):
    """Whether nobody reads our output any more, which is found out by writing; what is left of it then goes nowhere."""
    try:
        print(end=last, flush=True)
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # no file behind it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    except (OSError, ValueError):  # a full disk, a closed file: the interpreter's end says it
        pass
    return False


class _Namespace(dict):
    """Globals of a config file that remember which names it assigned, also those assigned their old value."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.assigned = set()

    def __setitem__(self, name, value):
        self.assigned.add(name)
        super().__setitem__(name, value)


def _run_file(path, values):
    try:
        with open(path, "rb") as f:
            source = f.read()
    except (OSError, ValueError) as error:
        folder = os.path.dirname(path)
        siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        near = _nearest(os.path.basename(path), [s for s in siblings if s.endswith(".py")], os.path.join(folder, ""))
        raise ConfigError(f"{path}: {getattr(error, 'strerror', error)}{near}") from error
    names = _Namespace(values, __name__="config", __file__=path)
    names["include"] = lambda other: _include(os.path.join(os.path.dirname(path), other), names)
    try:
        exec(compile(source, path, "exec", dont_inherit=True), names)
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and error.filename == path:
            line, what = error.lineno or 1, error.msg
        else:
            what = f"{type(error).__name__}: {error}"
            line = ([f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path] or [1])[-1]
        raise ConfigError(f"{path}:{line}: {what}") from error
    # a name bound behind __setitem__'s back (`global` in a function) shows by its new value
    assigned = [n for n in names if n in names.assigned or n in values and names[n] is not values[n]]
    return {n: names[n] for n in assigned if n in values or not (
        n.startswith("_") or isinstance(names[n], types.ModuleType) or callable(names[n]))}


def _include(path, names):
    """Run another config file in the namespace of the one that includes it; relative to that one's folder."""
    with open(path, "rb") as f:
        exec(compile(f.read(), path, "exec", dont_inherit=True), names)


def _check_known(key, known, where="", dashes=""):
    if key not in known:
        near = _nearest(key.replace("-", "_").lower(), known, dashes)
        raise ConfigError(f"{where}unknown key '{dashes}{key}'{near or ';'} --help lists all keys"
                          + ("" if near or dashes else "; a helper's name starts with _"))


def _nearest(word, words, prefix=""):
    near = difflib.get_close_matches(word, words, n=1)
    return f": did you mean '{prefix}{near[0]}'?" if near else ""


def _convert(kind, value, where, from_text):
    """`value` as `kind`, or a ConfigError that opens with `where`. `from_text`: value is the command line's string."""
    for member in sorted(_members(kind), key=lambda k: (k is str) - (k is type(None))):  # a str would take 'none' too
        with contextlib.suppress(ValueError, OverflowError):
            return _parse(member, value, from_text)
    shown = value if from_text else repr(value)[:80]
    raise ConfigError(f"{where}{shown}: expected {_expected(kind)}{_nearest(str(value)[:80], _choices(kind))}")


def _parse(kind, value, from_text):
    if kind is type(None):
        if value is None or from_text and value.lower() == "none":
            return None
    elif typing.get_origin(kind) is typing.Literal:
        for choice in typing.get_args(kind):
            if str(choice) == value if from_text else type(value) is type(choice) and value == choice:
                return choice
    elif kind is bool:
        if from_text and value.lower() in BOOLS:
            return BOOLS[value.lower()]
        if isinstance(value, bool):
            return value
    elif kind is str:
        if isinstance(value, str):
            return value
    elif kind not in (int, float):
        raise TypeError(f"configurator.py has no rule for the type {kind}")
    elif from_text or isinstance(value, numbers.Real) and not isinstance(value, bool):
        if kind is float and math.isfinite(float(value)):
            return float(value)
        if kind is int and (isinstance(value, numbers.Integral) or from_text and re.fullmatch("[+-]?[0-9_]+", value)):
            return int(value)
        if kind is int and float(value).is_integer() and abs(float(value)) <= 2**53:  # a float beyond is not exact
            return int(float(value))
    raise ValueError


def _default(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _show(value):
    return "none" if value is None else value if isinstance(value, str) and value else repr(value)


def _members(kind):
    """The members of a union, in order; any other type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _choices(kind):
    return [str(c) for k in _members(kind) if typing.get_origin(k) is typing.Literal for c in typing.get_args(k)]


def _expected(kind):
    one_of = [f"one of {', '.join(_choices(kind))}"] if _choices(kind) else []
    return " or ".join(one_of + [KINDS[k] for k in _members(kind) if k in KINDS])


def _comments(config_class):
    """{field: the comment at the end of its line} and {field: the `# --- heading` above it}, over the whole MRO."""
    meanings, headings = {}, {}
    for cls in reversed(config_class.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(cls))
        except (OSError, TypeError):  # built in, or typed at a prompt: no source to read
            continue
        comments = {t.start[0]: t.string for t in tokenize.generate_tokens(io.StringIO(source).readline)
                    if t.type == tokenize.COMMENT}
        last, heading = 0, None
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                between = [comments.get(line, "") for line in range(last + 1, node.lineno)]
                heading = ([c.strip("#- ") for c in between if c.startswith("# ---")] or [heading])[-1]
                name, meaning = node.target.id, comments.get(node.end_lineno, "").lstrip("# ")
                if heading and name not in meanings:  # a base's field with a new default stays under its own heading
                    headings[name], heading = heading, None
                meanings[name] = meaning or meanings.get(name, "")
            last = node.end_lineno
    return meanings, headings


def _help(config_class, values, kinds, prog):
    meanings, headings = _comments(config_class)
    rows = []
    for key, value in values.items():
        kind = "|".join("none" if k is type(None) else getattr(k, "__name__", "choice").replace("Literal", "choice")
                        for k in _members(kinds[key]))
        one_of = f" ({_expected(kinds[key])})" if _choices(kinds[key]) else ""
        rows.append((key, f"--{key}", kind, _show(value), (meanings.get(key, "") + one_of).strip()))
    widths = [min(max((len(row[i]) for row in rows), default=0), 24) for i in (1, 2, 3)]
    width = max(shutil.get_terminal_size().columns, sum(widths) + 30)
    lines = [f"usage: {prog} [config.py ...] [--key=value ...]", "",
             "Read left to right, the later one wins; a config file is Python that assigns to the same keys."]
    if rows and rows[0][0] not in headings:
        lines.append("")
    for key, *columns, meaning in rows:
        if key in headings:
            lines += ["", headings[key] + ":"]
        left = "  " + "".join(c.ljust(w) + "  " for c, w in zip(columns, widths, strict=True))
        lines.append(textwrap.fill(meaning, width, initial_indent=left, break_on_hyphens=False,
                                   subsequent_indent=" " * (sum(widths) + 8)) or left.rstrip())
    return "\n".join(lines)
