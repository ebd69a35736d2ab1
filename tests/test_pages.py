"""Every command that README and docs print is accepted by its program."""

import re
import runpy
import shlex
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT

import configurator


class Parsed(BaseException):
    """Raised when the program has read its arguments."""


def commands():
    """{command: its page} for every line that runs a program of the repository, without comments and pipes."""
    found = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(?:    |\$ )?(?:\$ )?((?:python|torchrun) .*)", text, re.MULTILINE):
            if " -c " in line or " -m " in line:
                continue
            words = shlex.split(re.split(r" #| && | \| ", line)[0])
            scripts = [i for i, word in enumerate(words) if word.endswith(".py") and (ROOT / word).is_file()]
            if scripts:
                found[shlex.join(words[scripts[0]:])] = page.name
    return found


@pytest.mark.parametrize("command", commands())
def test_a_printed_command_is_accepted(command, monkeypatch):
    def stop(read):
        def wrapped(*args, **options):
            read(*args, **options)
            raise Parsed
        return wrapped

    script, *argv = shlex.split(command.replace("average_laptop", "longhorn_laptop"))  # the page's own config
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "common.start", SimpleNamespace(imported=int))  # it would change signal handlers
    monkeypatch.setattr(sys, "argv", [script, *argv])
    for name in ("load", "read"):
        monkeypatch.setattr(configurator, name, stop(getattr(configurator, name)))
    with pytest.raises(Parsed):
        runpy.run_path(script, run_name="__main__")
