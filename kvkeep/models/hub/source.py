"""From what a user calls a model to a local folder that holds it in Hugging Face layout."""

import hashlib
import re
from pathlib import Path

from kvkeep.errors import BadModelFile, ModelNotFound
from kvkeep.models.gguf.parts import parts_of
from kvkeep.models.hub.known import KNOWN, fetch
from kvkeep.models.hub.library import PulledModel, find, home, keep, pulled

__all__ = ["DEFAULT_MODEL", "PulledModel", "here", "home", "pull", "pulled", "resolve"]

DEFAULT_MODEL = "smollm2-135m-instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(model: str, progress: bool) -> Path:
    """The folder of a model, which is fetched or converted first if that was not done before.

    model: a known name, a .gguf file, a model folder, or a hub id "owner/name".

    Raises ModelNotFound, BadModelFile, UnsupportedModel, ModelError.
    """
    return _obtain(model, progress, anew=False)


def here(model: str) -> Path | None:
    """The folder of a model that is on this machine; None where it were to be fetched or converted.

    Nothing is written, and no network asked. Raises BadModelFile for a folder that is no model's.
    """
    path = _path(model)
    if model.lower() in KNOWN:
        slug = model.lower()
    elif path.is_file():
        slug = _slug(path.resolve())
    elif path.is_dir():
        return _own_folder(path.resolve())
    else:
        slug = model.replace("/", "--") if _is_hub_id(model) else ""
    found = find(slug) if slug else None
    return found.folder if found else None


def pull(name: str, progress: bool) -> Path:
    """Fetch a model by known name or hub id (or convert a .gguf file) now; its folder.

    A known model that is here whole is left as it is; of a hub model, newer files are fetched.
    Raises as `resolve`.
    """
    return _obtain(name, progress, anew=_is_hub_id(name))


def _obtain(model: str, progress: bool, anew: bool) -> Path:
    path = _path(model)
    if model.lower() in KNOWN:
        return _known(model.lower(), progress)
    if path.is_file():
        return _converted(path.resolve(), progress)
    if path.is_dir():
        return _own_folder(path.resolve())
    if _is_hub_id(model):
        return _from_hub(model, progress, anew)
    raise ModelNotFound(
        f"no model {model!r}. Give one of: a known name ({', '.join(KNOWN)}), the path of an "
        "existing .gguf file, the path of a folder with config.json and model.safetensors, or a "
        "Hugging Face hub id such as owner/name"
    )


def _path(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:  # "~nobody/model"
        raise ModelNotFound(f"no model {model!r}: {error}") from error


def _is_hub_id(model: str) -> bool:
    return bool(_HUB_ID.fullmatch(model)) and not model.endswith(".gguf")


def _known(name: str, progress: bool) -> Path:
    present = find(name)
    if present is not None:
        return present.folder
    known = KNOWN[name]

    def fill(folder: Path) -> None:
        from kvkeep.models.gguf.convert import convert

        gguf = fetch(known, folder, progress)
        convert(gguf, folder, progress)
        gguf.unlink()

    return keep(name, name, known.requirement, fill, progress)


def _slug(gguf: Path) -> str:
    """What a converted file is kept under: its path, size and time of change tell its state.

    Of a model in parts, whichever of them is given: those of all. Raises BadModelFile.
    """
    parts = parts_of(gguf)
    states = [(part, part.stat()) for part in parts]
    state = "\n".join(f"{part}\n{of.st_size}\n{of.st_mtime_ns}" for part, of in states)
    digest = hashlib.sha256(state.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', parts[0].stem)}-{digest}"


def _converted(gguf: Path, progress: bool) -> Path:
    """Converted once for each state of the file."""
    slug = _slug(gguf)
    present = find(slug)
    if present is not None:
        return present.folder

    def fill(folder: Path) -> None:
        from kvkeep.models.gguf.convert import convert

        convert(gguf, folder, progress)

    name = str(parts_of(gguf)[0])
    return keep(slug, name, name, fill, progress)


def _own_folder(folder: Path) -> Path:
    if (folder / "config.json").exists():
        return folder
    files = sorted(path.name for path in folder.glob("*.gguf"))
    raise BadModelFile(
        f"{folder} has no config.json, so it is not a model folder; "
        + (f"give the path of {files[0]} in it" if files else "give one that has it")
    )


def _from_hub(repository: str, progress: bool, anew: bool) -> Path:
    slug = repository.replace("/", "--")
    present = None if anew else find(slug)
    if present is not None:
        return present.folder

    def fill(_: Path) -> Path:
        from kvkeep.models.hub.hf_cache import download

        return download(repository, progress)

    return keep(slug, repository, f"hub: {repository}", fill, progress, anew)
