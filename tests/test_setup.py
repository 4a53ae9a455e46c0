"""A build: what is in it, and that it says what it could not build."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what a build reads."""
    folder = tmp_path / "sources"
    shutil.copytree(
        ROOT / "kvkeep", folder / "kvkeep", ignore=shutil.ignore_patterns("*.so", "built.json")
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(sources: Path, *command: str, **environment: str) -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "--quiet", *command],
        cwd=sources,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
    )


def failures(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "built.json").read_text())["failures"]
    return found


def said_by_doctor(sources: Path, home: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVKEEP_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep", "doctor", "--json"],
        cwd=sources,
        env={**kept, "PYTHONPATH": str(sources), "KVKEEP_HOME": str(home)},
        check=True,
        capture_output=True,
    )
    found: dict[str, str] = json.loads(done.stdout)["kernels"]["against"]
    return found


def test_without_a_compiler_it_builds_and_the_doctor_says_why_there_are_no_kernels(
    sources: Path, tmp_path: Path
) -> None:
    build(sources, "build_ext", "--inplace", CC="no-such-compiler", CXX="no-such-compiler")
    compiled = sources / "kvkeep" / "compiled"
    assert not list(compiled.glob("*.so"))
    why = failures(compiled)
    assert why["cpu"] == "there is no compiler no-such-compiler"
    assert set(why.values()) == {why["cpu"]}
    told = said_by_doctor(sources, tmp_path / "home")
    assert set(told.values()) == {f"were not built here ({why['cpu']})"}


def test_what_a_compiler_does_not_know_is_left_out_in_its_own_words(
    sources: Path, tmp_path: Path
) -> None:
    """Its flags are changed for ones that none knows; the rest is built."""
    text = (sources / "setup.py").read_text()
    wrong = "NAMES = ['avx2']\nSETS = {'avx2': ['-mno-such-instructions']}\n"
    (sources / "setup.py").write_text(text.replace("\n\ndef kernels", f"\n{wrong}\n\ndef kernels"))
    build(sources, "bdist_wheel", "--dist-dir", str(tmp_path))
    compiled = sources / "build" / "lib" / "kvkeep" / "compiled"
    if not compiled.exists():
        (compiled,) = (sources / "build").glob("lib*/kvkeep/compiled")
    assert [file.name for file in compiled.glob("*.so")] == ["_cpu.so"]
    assert list(failures(compiled)) == ["avx2"]
    assert "-mno-such-instructions" in failures(compiled)["avx2"]
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


def test_sets_that_were_left_out_of_a_build_are_named(sources: Path) -> None:
    build(sources, "build_ext", "--inplace", KVKEEP_SETS="")
    why = failures(sources / "kvkeep" / "compiled")
    assert set(why.values()) <= {"KVKEEP_SETS left them out"}
    assert (sources / "kvkeep" / "compiled" / "_cpu.so").stat().st_size < 100_000


def test_objects_have_nothing_for_debuggers_unless_asked(sources: Path) -> None:
    compiled = sources / "kvkeep" / "compiled"
    build(sources, "build_ext", "--inplace", KVKEEP_SETS="")
    assert b".debug_info" not in (compiled / "_cpu.so").read_bytes()
    build(sources, "build_ext", "--inplace", "--force", KVKEEP_SETS="", CFLAGS="-g")
    if sys.platform == "linux":
        assert b".debug_info" in (compiled / "_cpu.so").read_bytes()


def test_no_file_that_a_tool_dropped_is_tracked() -> None:
    """Caches, crash records and build results are ignored by git, and none was added by force."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = ["git", "ls-files", "--cached"]
    run = {"cwd": ROOT, "check": True, "capture_output": True, "text": True}
    ignored = subprocess.run([*listed, "--ignored", "--exclude-standard"], **run).stdout  # type: ignore[call-overload]
    assert not ignored.split()
    tracked = subprocess.run(listed, **run).stdout.splitlines()  # type: ignore[call-overload]
    hidden = {name.split("/")[0] for name in tracked if name.startswith(".")}
    assert hidden <= {".ci", ".gitignore", ".github"}
