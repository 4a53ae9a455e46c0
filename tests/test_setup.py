"""Builds: their contents, and how they report instruction sets that could not be built."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.compiled.instruction_sets import SETS, runs_here

ROOT = Path(__file__).parent.parent


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the files that a build reads."""
    folder = tmp_path / "sources"
    shutil.copytree(
        ROOT / "kvkeep", folder / "kvkeep", ignore=shutil.ignore_patterns("*.so", "built.json")
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(sources: Path, *command: str, **environment: str) -> None:
    """Run setup.py with a command and more environment variables."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "--quiet", *command],
        cwd=sources,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
    )


def failures(folder: Path) -> dict[str, str]:
    """Return the reason of each part that a build could not compile."""
    result: dict[str, str] = json.loads((folder / "built.json").read_text())["failures"]
    return result


def kernel_status_from_doctor(sources: Path, home: Path) -> dict[str, str]:
    """Return what `kvkeep doctor` says against each kernel of the sources."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVKEEP_")}
    process = subprocess.run(
        [sys.executable, "-m", "kvkeep", "doctor", "--json"],
        cwd=sources,
        env={**environment, "PYTHONPATH": str(sources), "KVKEEP_HOME": str(home)},
        check=True,
        capture_output=True,
    )
    result: dict[str, str] = json.loads(process.stdout)["kernels"]["against"]
    return result


def test_a_build_without_a_compiler_succeeds_and_doctor_gives_the_reason(
    sources: Path, tmp_path: Path
) -> None:
    build(sources, "build_ext", "--inplace", CC="no-such-compiler", CXX="no-such-compiler")
    compiled = sources / "kvkeep" / "compiled"
    assert not list(compiled.glob("*.so"))
    reasons = failures(compiled)
    assert reasons["cpu"] == "there is no compiler no-such-compiler"
    assert set(reasons.values()) == {reasons["cpu"]}
    status = kernel_status_from_doctor(sources, tmp_path / "home")
    assert set(status.values()) == {f"were not built on this machine ({reasons['cpu']})"}


def test_a_build_prints_a_line_each_second(sources: Path, tmp_path: Path) -> None:
    """pip's spinner turns with them."""
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nsleep 2\nexit 1\n")
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        "CC": str(compiler),
        "CXX": str(compiler),
        "KVKEEP_KERNELS_FOR": "none",
    }
    command = [sys.executable, "-W", "ignore", "setup.py", "build_ext"]
    process = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)
    assert "compiling the kernels: 1 s" in process.stdout + process.stderr


def test_an_instruction_set_that_the_compiler_refuses_is_left_out(
    sources: Path, tmp_path: Path
) -> None:
    """Its flags are replaced by unknown ones; everything else is built."""
    text = (sources / "setup.py").read_text()
    unknown_flags = "KERNELS_FOR = 'all'\nSETS = {'avx2': ['-mno-such-instructions']}\n"
    (sources / "setup.py").write_text(
        text.replace("\n\ndef library_name", f"\n{unknown_flags}\n\ndef library_name")
    )
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


def test_instruction_sets_excluded_by_the_environment_are_reported(sources: Path) -> None:
    build(sources, "build_ext", "--inplace", KVKEEP_KERNELS_FOR="none")
    reasons = failures(sources / "kvkeep" / "compiled")
    assert set(reasons) == set(SETS)
    assert set(reasons.values()) <= {"KVKEEP_KERNELS_FOR=none left them out"}
    assert (sources / "kvkeep" / "compiled" / "_cpu.so").stat().st_size < 100_000


@pytest.mark.parametrize("given", ["native", ""])
def test_a_build_has_the_best_instruction_set_of_this_processor_alone(
    sources: Path, given: str
) -> None:
    """One source file stands for the kernels, which take a minute to compile."""
    if not SETS:
        pytest.skip("no kernels are built for this architecture")
    for source in (sources / "kvkeep" / "compiled" / "src").glob("*.cpp"):
        source.unlink()
    (source.parent / "one.cpp").write_text("int one() { return 1; }\n")
    build(sources, "build_ext", "--inplace", KVKEEP_KERNELS_FOR=given)
    compiled = sources / "kvkeep" / "compiled"
    runnable = [name for name in SETS if runs_here(name)]
    # The system may refuse AMX to a process, which then uses the next set.
    best = runnable[: 2 if "amx" in runnable else 1]
    built = {file.name for file in compiled.glob("*.so")}
    assert built == {"_cpu.so", *(f"_{name}.so" for name in best)}
    assert set(failures(compiled)) == set(SETS) - set(best)


def test_the_detection_of_processors_includes_cpuid_once() -> None:
    """GCC's cpuid.h has no include guard before GCC 11."""
    source = (ROOT / "kvkeep" / "compiled" / "src" / "cpu.c").read_text()
    assert source.count("#include <cpuid.h>") == 1


def test_an_unknown_instruction_set_is_refused_with_the_known_ones(sources: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failure:
        build(sources, "build_ext", "--inplace", KVKEEP_KERNELS_FOR="avx1024")
    message = failure.value.stderr.decode()
    assert "found 'avx1024'" in message
    assert all(name in message for name in ("native", "all", *SETS))


def test_builds_have_no_debug_info_unless_cflags_request_it(sources: Path) -> None:
    compiled = sources / "kvkeep" / "compiled"
    build(sources, "build_ext", "--inplace", KVKEEP_KERNELS_FOR="none")
    assert b".debug_info" not in (compiled / "_cpu.so").read_bytes()
    build(sources, "build_ext", "--inplace", "--force", KVKEEP_KERNELS_FOR="none", CFLAGS="-g")
    if sys.platform == "linux":
        assert b".debug_info" in (compiled / "_cpu.so").read_bytes()


def test_no_generated_file_is_tracked_by_git() -> None:
    """Caches, crash records and build results are ignored by git, and none was added by force."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    list_command = ["git", "ls-files", "--cached"]
    options = {"cwd": ROOT, "check": True, "capture_output": True, "text": True}
    ignored = subprocess.run([*list_command, "--ignored", "--exclude-standard"], **options).stdout  # type: ignore[call-overload]
    assert not ignored.split()
    tracked = subprocess.run(list_command, **options).stdout.splitlines()  # type: ignore[call-overload]
    hidden = {name.split("/")[0] for name in tracked if name.startswith(".")}
    known = {".ci", ".clang-format", ".dockerignore", ".gitignore", ".github"}
    known |= {".pre-commit-config.yaml"}
    assert hidden <= known
