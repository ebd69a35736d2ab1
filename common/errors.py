"""Errors that a user can fix are one line: the value, the limit, what to do. Programs run inside `main_error`."""

import contextlib
import errno
import os
import re
import stat
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class ConfigError(ValueError):
    """Something the user can fix: a setting, a file, the data, a checkpoint. The message is always one line."""

    def __init__(self, message):
        super().__init__(" ".join(str(message).split()))


class Stopped(ConfigError):
    """A run that cannot continue by itself; the message says why, what is saved, and how to continue."""


def printable(text):
    """Return untrusted `text`, such as a record's, with control characters as escape codes: a terminal would obey
    them."""
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in str(text))
    return "".join(shown)


def described(error):
    """Describe an error, with the place in our code: 'IndexError: index 1 is out of range (model.py, line 439)'."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if ROOT in Path(frame.filename).parents and "site-packages" not in frame.filename]
    where = f" ({Path(frames[-1].filename).relative_to(ROOT)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


@contextlib.contextmanager
def main_error(prog, *errors):
    """`with main_error('train.py'): main()`: errors that the user can fix become one line.

    A ConfigError, a file or folder that the system refuses, running out of memory, and `errors` print `train.py: error:
    ...` on stderr and exit with code 2. Any other error keeps its traceback. Ctrl-C prints a line and exits with 130.
    If the reader of our output has quit (`| head`), we exit with 130 and print nothing.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # closed before we started
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # print an escape code for a character that the locale lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            print(f"{prog}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _flush(sys.stdout, BrokenPipeError, "\n"):
            raise SystemExit(130) from None
        line = _line_about(error, errors)
        if line is None:
            raise
        with contextlib.suppress(OSError):  # stderr may be on a full disk; the exit code still tells
            print(f"{prog}: error: {printable(line)}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        # otherwise the interpreter's own flush at exit prints a traceback, or exits with code 120
        _flush(sys.stdout, BrokenPipeError)
        _flush(sys.stderr, (OSError, ValueError))


def _line_about(error, errors):
    """The line to print for an error that the user can fix (`errors` count as such); None for any other error."""
    words = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        way_out = "check this path and its permissions"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            way_out = "make room, and run the command again"
        return f"{error.filename}: {error.strerror}: {way_out}"
    if is_out_of_memory(error):
        return f"out of memory ({words[:200]}): choose smaller sizes"
    if isinstance(error, OverflowError) or isinstance(error, RuntimeError) and "overflow" in words.lower():
        return f"a number is too large ({words[:200]}): choose a smaller one"
    of_system = isinstance(error, OSError) and not isinstance(error, ConnectionError)
    if of_system or isinstance(error, (ConfigError, *errors)) or words.startswith("Symlink loop from"):
        return words or type(error).__name__
    return None


def is_out_of_memory(error):
    """True if memory ran out. On a GPU PyTorch has an exception class for it, on a CPU only a message."""
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    said = str(error).lower()
    return "not enough memory" in said or "can't allocate memory" in said or "out of memory" in said


def regular(path):
    """Return the Path of a file to read. Raises OSError if it is missing, or a pipe or device, which may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return Path(path)


def env_int(name, default, least=0, most=2**31 - 1):
    """Return the environment variable `name` as a whole number. Raises ConfigError unless it is in least .. most."""
    text = os.environ.get(name) or str(default)
    is_number = re.fullmatch(r"-?\d{1,12}", text)
    if not is_number or not least <= int(text) <= most:
        raise ConfigError(f"the environment has {name}={text!r}: it must be a whole number in {least} .. {most}")
    return int(text)


def _flush(stream, harmless, last=""):
    """Flush a stream. Returns True after a harmless error; all remaining and later output is then discarded."""
    try:
        print(end=last, file=stream, flush=True)
    except harmless:
        with contextlib.suppress(OSError, ValueError):  # it may be closed, or not be a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True
    except (OSError, ValueError):  # the interpreter reports it at exit
        pass
    return False
