"""Private fields are written in the file of their class, and nowhere else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kvkeep"
FILES = sorted(PACKAGE.rglob("*.py"))


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned to, deleted, or changed in their place."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            for each in ast.walk(target):
                if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load):
                    yield each


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own(tree: ast.AST) -> set[str]:
    """Private fields of the classes of a file."""
    fields = {
        each.attr
        for each in written(tree)
        if isinstance(each.value, ast.Name) and each.value.id in ("self", "cls")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    fields.add(line.target.id)
    return fields


@pytest.mark.parametrize("file", FILES, ids=lambda x: str(x.relative_to(PACKAGE)))
def test_no_file_writes_the_private_fields_of_another(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wrong = [
        f"line {each.lineno}: {ast.unparse(each)}"
        for each in written(tree)
        if is_private(each.attr) and each.attr not in own(tree)
    ]
    assert wrong == []


def test_nobody_takes_over_the_whole_of_another() -> None:
    wrong = [
        str(file.relative_to(PACKAGE))
        for file in FILES
        if "__dict__.update" in file.read_text(encoding="utf-8")
        and file.name != "shallow_copy.py"  # whose objects are new
    ]
    assert wrong == []
