"""Structure that holds all over kvkeep/: names defined once, and no private access across files."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREES = {
    file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
    for file in sorted((ROOT / "kvkeep").rglob("*.py"))
}


def class_names(tree: ast.Module) -> list[str]:
    """Classes, nested ones included, and type aliases: capitalised names assigned at top level."""
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
                names.append(target.id)
    return names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def members(tree: ast.Module) -> set[str]:
    """Methods, fields and attributes of the classes that a file defines."""
    nodes = [
        node for each in ast.walk(tree) if isinstance(each, ast.ClassDef) for node in ast.walk(each)
    ]
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {node.id for node in stored if isinstance(node, ast.Name)}
    names |= {
        node.attr
        for node in stored
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return names | {node.name for node in nodes if isinstance(node, functions)}


MEMBERS = {path: members(tree) for path, tree in TREES.items()}
FILES_WITH_MEMBER = Counter(name for names in MEMBERS.values() for name in names)


def private_attributes_used(tree: ast.Module) -> set[tuple[int, str]]:
    """Line and name of every private attribute that is read or written."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {(node.lineno, node.attr) for node in attributes if is_private(node.attr)}


def test_every_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path, tree in TREES.items():
        for name in class_names(tree):
            places[name].append(path)
    assert len(places) > 200
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_private_attributes_are_used_in_their_own_file_only() -> None:
    """Private names of other libraries are allowed: those that no class of kvkeep has."""
    foreign = [
        (path, line, name)
        for path, tree in TREES.items()
        for line, name in private_attributes_used(tree)
        if name not in MEMBERS[path] and FILES_WITH_MEMBER[name]
    ]
    assert sorted(foreign) == []


def test_no_private_name_is_imported() -> None:
    imports = [
        (path, alias.name)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvkeep")
        for alias in node.names
    ]
    assert len(imports) > 1000
    assert [imported for imported in imports if is_private(imported[1])] == []


@pytest.mark.parametrize(
    "page",
    [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"],
    ids=lambda page: page.name,
)
def test_files_that_the_documentation_names_exist(page: Path) -> None:
    """Paths are relative to the repository's root or to kvkeep/."""
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|h))`", page.read_text(encoding="utf-8"))
    roots = (ROOT, ROOT / "kvkeep", ROOT / "kvkeep" / "compiled")
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []
