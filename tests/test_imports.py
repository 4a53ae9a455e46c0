"""Imports run downward: no package imports one above it."""

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
    """Parse every module of a package, by full name; a package's name stands for its `__init__`."""
    modules = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = ast.parse(file.read_text(encoding="utf-8"))
    return modules


def names_imported(node: ast.AST) -> Iterator[str]:
    """Yield all imported names, also within functions and for types: a.b for `from a import b`."""
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
    """The modules that each module of kvkeep imports, including external ones."""
    trees = modules_below("kvkeep")
    imports_by_module = {
        name: {
            imported if imported in trees or not is_ours(imported) else imported.rpartition(".")[0]
            for imported in names_imported(tree)
        }
        for name, tree in trees.items()
    }
    assert len(imports_by_module) > 100
    assert "kvkeep.cache.step" in imports_by_module["kvkeep.cache.cache"]
    return imports_by_module


def is_ours(name: str) -> bool:
    return name.split(".")[0] == "kvkeep"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_only_the_command_line_imports_the_command_line(graph: Graph) -> None:
    violations = [
        (name, imported)
        for name, all_imported in graph.items()
        for imported in all_imported
        if within(imported, "kvkeep.cli")
        and not within(name, "kvkeep.cli")
        and name != "kvkeep.__main__"
    ]
    assert violations == []


def test_the_cache_package_imports_no_other_package_of_kvkeep(graph: Graph) -> None:
    violations = [
        (name, imported)
        for name, all_imported in graph.items()
        for imported in all_imported
        if within(name, "kvkeep.cache")
        and is_ours(imported)
        and not within(imported, "kvkeep.cache")
    ]
    assert violations == []


def test_storage_files_import_only_errors_of_kvkeep(graph: Graph) -> None:
    violations = [
        (name, imported)
        for name, all_imported in graph.items()
        for imported in all_imported
        if within(name, "kvkeep.storage.files")
        and is_ours(imported)
        and not within(imported, "kvkeep.storage.files")
        and imported != "kvkeep.errors"
    ]
    assert violations == []


def test_kvkeep_imports_no_benchmark_or_test(graph: Graph) -> None:
    outside = {"benchmarks", "tests"}
    violations = [
        (name, imported)
        for name, imports in graph.items()
        for imported in imports
        if imported.split(".")[0] in outside
    ]
    assert violations == []


def test_there_are_no_import_cycles(graph: Graph) -> None:
    graphlib.TopologicalSorter(graph).prepare()


def test_no_benchmark_and_no_test_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rules = settings["tool"]["setuptools"]["packages"]["find"]
    installed = find_packages(str(ROOT), include=rules["include"])
    assert "kvkeep.cache" in installed
    assert [name for name in installed if name.split(".")[0] != "kvkeep"] == []
    assert [name for name in installed if "bench" in name] == []


@pytest.mark.parametrize("collecting", [True, False])
def test_importing_kvkeep_restores_the_garbage_collector_setting(collecting: bool) -> None:
    """Garbage collection is off during the import and as before afterwards, also if it fails."""
    lines = (
        "import gc, sys",
        "sys.modules['safetensors'] = None" if collecting else "gc.disable()",
        "import kvkeep",
        "try: kvkeep.load_model",
        "except ImportError: print('failed')",
        "print(gc.isenabled())",
    )
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == (["failed", "True"] if collecting else ["False"])
