"""Imports run downward: what is below knows nothing of what is above it."""

import ast
import graphlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parent.parent
Graph = dict[str, set[str]]


def modules_below(package: str) -> dict[str, ast.Module]:
    """Every module of a package by its full name; a package is named as its `__init__`."""
    found = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def names_imported(node: ast.AST) -> Iterator[str]:
    """What a module imports, in functions and for its types too: a.b of `from a import b`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "an import names its module in full"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from names_imported(child)


@pytest.fixture(scope="module")
def graph() -> Graph:
    """For each module of kvkeep those that it imports, ours and others."""
    trees = modules_below("kvkeep")
    found = {
        name: {
            imported if imported in trees or not is_ours(imported) else imported.rpartition(".")[0]
            for imported in names_imported(tree)
        }
        for name, tree in trees.items()
    }
    assert len(found) > 100
    assert "kvkeep.cache.step" in found["kvkeep.cache.cache"]
    return found


def is_ours(name: str) -> bool:
    return name.split(".")[0] == "kvkeep"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_only_the_command_line_knows_the_command_line(graph: Graph) -> None:
    wrong = [
        (name, imported)
        for name, all_imported in graph.items()
        for imported in all_imported
        if within(imported, "kvkeep.cli")
        and not within(name, "kvkeep.cli")
        and name != "kvkeep.__main__"
    ]
    assert wrong == []


def test_the_cache_is_torch_and_nothing_else_of_ours(graph: Graph) -> None:
    wrong = [
        (name, imported)
        for name, all_imported in graph.items()
        for imported in all_imported
        if within(name, "kvkeep.cache")
        and is_ours(imported)
        and not within(imported, "kvkeep.cache")
    ]
    assert wrong == []


def test_files_know_of_errors_alone(graph: Graph) -> None:
    wrong = [
        (name, imported)
        for name, all_imported in graph.items()
        for imported in all_imported
        if within(name, "kvkeep.storage.files")
        and is_ours(imported)
        and not within(imported, "kvkeep.storage.files")
        and imported != "kvkeep.errors"
    ]
    assert wrong == []


def test_nothing_installed_needs_a_benchmark_or_a_test(graph: Graph) -> None:
    outside = {"benchmarks", "tests"}
    wrong = [(name, i) for name, each in graph.items() for i in each if i.split(".")[0] in outside]
    assert wrong == []


def test_no_module_imports_itself_through_others(graph: Graph) -> None:
    graphlib.TopologicalSorter(graph).prepare()


def test_no_benchmark_and_no_test_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rules = settings["tool"]["setuptools"]["packages"]["find"]
    installed = find_packages(str(ROOT), include=rules["include"])
    assert "kvkeep.cache" in installed
    assert [name for name in installed if name.split(".")[0] != "kvkeep"] == []
    assert [name for name in installed if "bench" in name] == []


@pytest.mark.parametrize("collecting", [True, False])
def test_whether_garbage_is_looked_for_is_the_programs_business(collecting: bool) -> None:
    """While kvkeep is imported it is not, afterwards as before; also where an import fails."""
    lines = (
        "import gc, sys",
        "sys.modules['safetensors'] = None" if collecting else "gc.disable()",
        "import kvkeep",
        "try: kvkeep.load_model",
        "except ImportError: print('failed')",
        "print(gc.isenabled())",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == (["failed", "True"] if collecting else ["False"])
