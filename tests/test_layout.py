"""The tree is as README says, imports go one way, and the root stays short.

    python -m pytest tests/test_layout.py
"""

import ast
import graphlib
import re
from pathlib import Path

from helpers import ROOT, tracked

# A module imports only from its own group and the groups before it, and never in a circle.
ORDER = [("common",), ("configurator",), ("kernels",), ("initialisation",), ("model",), ("mixers",), ("families",),
         ("inspection",), ("runtime",), ("optim",), ("data",), ("evaluation",), ("train",),
         ("sample", "evaluate", "export"), ("bench", "tools"), ("experiments",)]


def imports(path, modules):
    """The project's modules that a file imports, inside functions and its __main__ block too."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name in modules or f"{name}.__init__" in modules:
                yield name


def graph_of_imports():
    sources = [name for name in tracked() if name.endswith(".py") and not name.startswith(("tests/", "config/"))]
    modules = {name[:-3].replace("/", "."): name for name in sources}
    return {module: {*imports(path, modules)} - {module} for module, path in modules.items()}


def test_imports_only_go_up_the_list():
    place = {name: i for i, group in enumerate(ORDER) for name in group}
    graph = graph_of_imports()
    assert {"runtime.checkpoint", "model"} <= graph["train"] and "common.errors" in graph["experiments.edit"]
    for module, imported in graph.items():
        for name in imported:
            assert place[name.split(".")[0]] <= place[module.split(".")[0]], f"{module} imports {name}"


def test_there_is_no_import_cycle():
    """TopologicalSorter raises CycleError, which names the files."""
    list(graphlib.TopologicalSorter(graph_of_imports()).static_order())


def test_the_root_is_short():
    assert len([name for name in tracked() if name.endswith(".py") and "/" not in name]) <= 9


def test_the_file_tree_of_the_readme_is_the_tree():
    """A line for each file at the root and one for each folder."""
    tree = re.search(r"## The tree\n.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    files = {name for name in tracked() if "/" not in name and name.endswith((".py", ".cu"))}
    folders = {name.split("/")[0] + "/" for name in tracked() if "/" in name and not name.startswith(".")}
    assert {line.split()[0] for line in tree.splitlines()} == files | folders


def test_the_docstring_of_runtime_has_a_line_for_each_of_its_files():
    text = ast.get_docstring(ast.parse((ROOT / "runtime" / "__init__.py").read_text()))
    assert {line.split()[0] for line in text.splitlines()[2:]} == {
        Path(name).name for name in tracked() if name.startswith("runtime/")} - {"__init__.py"}
