"""Private fields are written only in the file of their class."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kvkeep"
FILES = sorted(PACKAGE.rglob("*.py"))


def written_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield attributes that are assigned to, augmented or deleted."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            for attribute in ast.walk(target):
                if isinstance(attribute, ast.Attribute) and not isinstance(attribute.ctx, ast.Load):
                    yield attribute


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_private_fields(tree: ast.AST) -> set[str]:
    """Return the fields that the classes of a file define."""
    fields = {
        attribute.attr
        for attribute in written_attributes(tree)
        if isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    fields.add(statement.target.id)
    return fields


@pytest.mark.parametrize("file", FILES, ids=lambda x: str(x.relative_to(PACKAGE)))
def test_private_fields_are_written_in_their_own_file_only(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    violations = [
        f"line {attribute.lineno}: {ast.unparse(attribute)}"
        for attribute in written_attributes(tree)
        if is_private(attribute.attr) and attribute.attr not in own_private_fields(tree)
    ]
    assert violations == []


def test_no_object_takes_the_dict_of_another() -> None:
    violations = [
        str(file.relative_to(PACKAGE))
        for file in FILES
        if "__dict__.update" in file.read_text(encoding="utf-8")
        and file.name != "shallow_copy.py"  # which fills new objects
    ]
    assert violations == []
