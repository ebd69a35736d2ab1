"""All families: from model.py, mixers.py and the files in this folder. Put the files of your own families here.

A file defines mixers and adds a row to FAMILIES. Every program imports this folder with all its files. If a file cannot
be imported, changes an existing row or adds an empty row, the program stops with a line that names the file.
"""

import copy
import importlib
import pkgutil

import mixers  # noqa: F401  its rows first
from common.errors import ConfigError, main_error
from model import FAMILIES

for file in pkgutil.iter_modules(__path__):
    before = copy.deepcopy(FAMILIES)
    with main_error(f"families/{file.name}.py", Exception):
        try:
            importlib.import_module(f"{__name__}.{file.name}")
        except SystemExit:
            raise ConfigError("it ends the program: leave out sys.exit") from None
        if FAMILIES | before != FAMILIES:
            raise ConfigError("it changes a row that FAMILIES already has: choose another name, or remove one file")
        if not all(FAMILIES.values()):
            raise ConfigError("it adds an empty row to FAMILIES: list the classes of a layer's branches")
