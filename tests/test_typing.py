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


def run_mypy(folder: Path, text: str) -> tuple[int, str]:
    file = folder / "uses.py"
    file.write_text(text)
    # The same settings and cache as for kvkeep itself, so that its results are reused.
    options = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(CACHE))
    process = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    return process.returncode, process.stdout


def test_invalid_literal_arguments_are_type_errors(tmp_path: Path) -> None:
    status, output = run_mypy(tmp_path, GOOD)
    assert status == 0, output
    assert 'Revealed type is "int"' in output.replace("builtins.", "")
    lines = "\n".join(BAD)
    _, output = run_mypy(tmp_path, f"import kvkeep\n{lines}\n")
    lines_with_errors = {
        int(line.split(":")[1]) for line in output.splitlines() if ": error:" in line
    }
    allowed = BAD.index('kvkeep.load_model().session(budget="heads")') + 2  # a valid budget
    assert lines_with_errors == set(range(2, len(BAD) + 2)) - {allowed}, output
