"""Prints the --help of a dataclass of settings: each field with the comment on its line, grouped by headings."""

import dataclasses
import inspect
import itertools
import re
import shutil
import textwrap


def show(usage, about, reader):
    """Print the usage, the text `about`, and a line for each setting of a configurator.Reader.

    Settings in the class's FIRST come first, then settings without a heading, then the rest.
    """
    program = reader.config_class
    others = "; " + program.OTHERS if hasattr(program, "OTHERS") else ""
    print(f"usage: {usage} [--key=value ...]{others}\n\n{about.strip()}")
    meanings, headings = comments(program)
    first = getattr(program, "FIRST", ())
    headings |= dict.fromkeys(first, "change these first")
    width = max(shutil.get_terminal_size().columns, 80)
    groups = {"change these first": [], "": []}
    for key in dict.fromkeys([*first, *reader.places, *reader.settings]):
        groups.setdefault(headings.get(key, ""), []).append(key)
    for key in itertools.chain(*groups.values()):
        heading = headings.get(key, "")
        if key == groups[heading][0]:
            print(f"\n{heading}:" if heading else "")
        setting = reader.settings[key]
        name = key if key in reader.places else f"--{key}"
        kind = "choice" if setting.choices else setting.kind.__name__
        if setting.many:
            kind += " ..." if setting.many is list else ",..."
        value = reader.values[key]
        shown = "-" if value in (None, (), dataclasses.MISSING) else str(value) or "''"
        left = f"  {name:21}  {kind:6}  {shown:11}  "
        one_of = f"(one of {', '.join(setting.choices)})" if setting.choices else ""
        text = f"{left}{meanings.get(key, '')} {one_of}"
        print(textwrap.fill(text.rstrip(), width, subsequent_indent=" " * 46, break_on_hyphens=False))


def comments(config_class):
    """Return {field: the comment at the end of its line and on the lines below} and {field: the `# --- heading` above
    it}. Base classes come first, and a redefined field keeps the heading that it has there."""
    meanings = {}
    headings = {}
    for cls in reversed(config_class.__mro__):
        field = heading = None
        try:
            lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
        except (OSError, TypeError):  # built in, or typed at a prompt: no source to read
            continue
        for line in lines:
            statement = re.match(r"    (\w+)(:?)", line)  # a field, or a statement that ends the previous field
            if line.strip().startswith("# ---"):
                heading = line.strip("#- ")
            elif statement:
                field = statement[1] if statement[2] else None
                if field and heading:
                    headings.setdefault(field, heading)
            comment = re.search(r"  # ((?!---).*)$", line)
            if field and statement:
                meanings[field] = comment[1] if comment else meanings.get(field, "")
            elif field and comment:
                meanings[field] += " " + comment[1]
    return meanings, headings
