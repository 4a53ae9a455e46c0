"""Resolving what a user calls a model to a local folder in Hugging Face layout."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvkeep.errors import BadModelFile, ModelNotFound
from kvkeep.models.gguf.header import parts_of
from kvkeep.models.hub.known_models import KNOWN_MODELS, KnownModel, fetch_known_model
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
    return _obtain(model, progress, refresh_hub=False)


def pull(name: str, progress: bool) -> Path:
    """Fetch a model by known name or hub id, or convert a .gguf file, and return its folder.

    A known model that is already complete is left as it is. For a hub model, newer files are
    fetched.

    Raises what `resolve` raises.
    """
    return _obtain(name, progress, refresh_hub=True)


def local_folder(model: str) -> Path | None:
    """Return the folder of a model, or None if it would have to be fetched or converted first.

    Writes nothing and does not use the network. Raises BadModelFile for a folder without a model.
    """
    origin = _find_origin(model)
    if not isinstance(origin, _Origin):
        return origin
    stored = find_model(origin.slug)
    return stored.folder if stored else None


@dataclass(frozen=True)
class _Origin:
    """The source of a model: a known model, a file, or a repository of a hub.

    slug, name, source: as in PulledModel. fill: writes the model into a folder or returns one that
    has it, as `store_model` calls it, with a flag for a progress bar.
    """

    slug: str
    name: str
    source: str
    fill: Callable[..., Path | None]
    is_hub: bool = False


def _find_origin(model: str) -> _Origin | Path | None:
    """Return the origin of a model, or the user's own model folder; None if there is no such."""
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # "~nobody/model"
        raise ModelNotFound(f"no model {model!r}: {error}") from error
    if (name := model.lower()) in KNOWN_MODELS:
        known = KNOWN_MODELS[name]
        return _Origin(name, name, known.requirement, partial(_fetch_known, known))
    if path.is_file():
        parts = parts_of(path.resolve())
        first = str(parts[0])
        return _Origin(_gguf_slug(parts), first, first, partial(_convert, path.resolve()))
    if path.is_dir():
        _require_config(path.resolve())
        return path.resolve()
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        slug, source = model.replace("/", "--"), f"hub: {model}"
        return _Origin(slug, model, source, partial(_download, model), is_hub=True)
    return None


def _obtain(model: str, progress: bool, refresh_hub: bool) -> Path:
    origin = _find_origin(model)
    if origin is None:
        raise ModelNotFound(
            f"no model {model!r}. Give one of: a known name ({', '.join(KNOWN_MODELS)}), the path "
            "of an existing .gguf file, the path of a folder with config.json and "
            "model.safetensors, or a Hugging Face hub id such as owner/name"
        )
    if isinstance(origin, Path):
        return origin
    refresh = refresh_hub and origin.is_hub
    if not refresh and (stored := find_model(origin.slug)) is not None:
        return stored.folder
    fill = partial(origin.fill, progress=progress)
    return store_model(origin.slug, origin.name, origin.source, fill, progress, refresh)


def _fetch_known(known: KnownModel, folder: Path, progress: bool) -> None:
    gguf = fetch_known_model(known, folder, progress)
    _convert(gguf, folder, progress)
    gguf.unlink()


def _convert(gguf: Path, folder: Path, progress: bool) -> None:
    from kvkeep.models.gguf.convert import convert

    convert(gguf, folder, progress)


def _gguf_slug(parts: Sequence[Path]) -> str:
    """Return a name for a file's current state: a digest of its path, size and modification time.

    For a split model the parts are digested together.
    """
    states = [(part, part.stat()) for part in parts]
    state = "\n".join(f"{part}\n{stat.st_size}\n{stat.st_mtime_ns}" for part, stat in states)
    digest = hashlib.sha256(state.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', parts[0].stem)}-{digest}"


def _require_config(folder: Path) -> None:
    if (folder / "config.json").exists():
        return
    files = sorted(path.name for path in folder.glob("*.gguf"))
    raise BadModelFile(
        f"{folder} has no config.json, so it is not a model folder; "
        + (f"give the path of {files[0]} in it" if files else "give one that has it")
    )


def _download(repository: str, _: Path, progress: bool) -> Path:
    """Fetch the missing files of a hub repository into the hub's own cache; return their folder.

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
