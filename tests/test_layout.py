"""The tree is what README says, arrows between files point one way, and the root stays short.

    python -m pytest tests/test_layout.py
"""

import ast
import graphlib
import re
from pathlib import Path

from helpers import ROOT, tracked


def imports(path, modules):
    """The project's modules that a file imports, inside functions too; its __main__ block excepted."""
    for statement in ast.parse((ROOT / path).read_text()).body:
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in modules)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                yield from (name for name in names if name in modules)


def test_no_import_cycle():
    """TopologicalSorter raises CycleError, which names the files."""
    sources = [name for name in tracked() if name.endswith(".py") and not name.startswith("tests/")]
    modules = {name[:-3].replace("/", "."): name for name in sources}
    graph = {module: set(imports(path, modules)) - {module} for module, path in modules.items()}
    assert "runtime.checkpoint" in graph["train"]
    list(graphlib.TopologicalSorter(graph).static_order())


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
