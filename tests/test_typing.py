"""Type checking code that uses kvkeep: invalid literal arguments are type errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".mypy_cache"
GOOD = """
import kvkeep

model = kvkeep.load_model(dtype="float32", weights="int8")
session = model.session(policy="shift", kv_bits="8/4", max_kv_size=64)
reveal_type(session.next_token())
session.delete(0, 1, recompute="suffix")
"""
BAD = [
    'kvkeep.load_model(dtype="float23")',
    'kvkeep.load_model(weights="int5")',
    'kvkeep.load_model().session(policy="nonsense")',
    'kvkeep.load_model().session(kv_bits="7")',
    'kvkeep.load_model().session(budget="heads")',
    'kvkeep.load_model().session().delete(0, 1, recompute="all")',
    'kvkeep.load_model().session().snapshot().save("x", codec="zip")',
]


def run_mypy(folder: Path, **texts: str) -> list[str]:
    """The lines that mypy prints of files with these texts, checked in one run."""
    files = [folder / f"{name}.py" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    # The same settings and cache as for kvkeep itself, so that its results are reused.
    options = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(CACHE))
    process = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, files)],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    return process.stdout.splitlines()


def test_invalid_literal_arguments_are_type_errors(tmp_path: Path) -> None:
    lines = "\n".join(BAD)
    output = run_mypy(tmp_path, good=GOOD, bad=f"import kvkeep\n{lines}\n")
    of_good = [line for line in output if line.startswith("good.py")]
    assert not [line for line in of_good if ": error:" in line]
    assert any('Revealed type is "int"' in line.replace("builtins.", "") for line in of_good)
    errors = [line for line in output if ": error:" in line]
    assert all(line.startswith("bad.py") for line in errors), output
    lines_with_errors = {int(line.split(":")[1]) for line in errors}
    allowed = BAD.index('kvkeep.load_model().session(budget="heads")') + 2  # a valid budget
    assert lines_with_errors == set(range(2, len(BAD) + 2)) - {allowed}, output
