"""What a type checker tells those who use kvkeep: words that are none are found before they run."""

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


def checked(folder: Path, text: str) -> tuple[int, str]:
    file = folder / "uses.py"
    file.write_text(text)
    # As kvkeep itself is checked, whose results of that are used again.
    options = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(CACHE))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    return done.returncode, done.stdout


def test_words_are_checked_by_types(tmp_path: Path) -> None:
    status, said = checked(tmp_path, GOOD)
    assert status == 0, said
    assert 'Revealed type is "int"' in said.replace("builtins.", "")
    lines = "\n".join(BAD)
    _, said = checked(tmp_path, f"import kvkeep\n{lines}\n")
    found = {int(line.split(":")[1]) for line in said.splitlines() if ": error:" in line}
    right = BAD.index('kvkeep.load_model().session(budget="heads")') + 2  # which is a budget
    assert found == set(range(2, len(BAD) + 2)) - {right}, said
