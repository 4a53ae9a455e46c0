"""The folder of pulled and converted models. Each model is either complete or absent."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import Locked, ModelError
from kvkeep.storage.files.atomic import (
    PARTIAL_SUFFIX,
    atomic_folder,
    folder_size,
    remove_folder,
    sweep_partial_folders,
    write_atomic,
)

LOCK_TIMEOUT = 3600.0  # seconds that a process waits for the lock: large downloads take long
_RECORD_NAME = "kvkeep.json"
# Version of the contents of a model's folder: models with an older one are converted again.
_LAYOUT_VERSION = 9


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine: one of the library, or a file or folder that a user named."""

    name: str
    path: Path  # a folder in Hugging Face layout, or the named GGUF file
    nbytes: int  # of its files
    source: str  # a pip requirement, a file or a hub id
    slug: str  # the name of its folder in the library; "" outside the library
    last_used: float  # seconds since 1970


def home() -> Path:
    """Return the folder of models and caches: $KVKEEP_HOME, or the user's cache folder."""
    if home_is_set():
        return Path(os.environ["KVKEEP_HOME"]).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("kvkeep")


def data_folder() -> Path:
    """Return the folder for what users keep: $KVKEEP_HOME, or the system's for user data."""
    if home_is_set():
        return home()
    from platformdirs import user_data_path

    return user_data_path("kvkeep")


def data_folders(kind: str) -> list[Path]:
    """Return the folder of a kind of data, and then that of older versions if it was another.

    They were in the cache folder, which cleaning tools may empty.
    """
    return list(dict.fromkeys(folder / kind for folder in (data_folder(), home())))


def home_is_set() -> bool:
    return bool(os.environ.get("KVKEEP_HOME"))


def pulled_models() -> list[LocalModel]:
    """Return all complete models, by name. Second names of a model in the library are left out."""
    models = [model for path in _model_paths() if (model := find_model(path.name)) is not None]
    own_paths = {model_path(model.slug) for model in models}
    return [
        model
        for model in models
        if model.path not in own_paths or model.path == model_path(model.slug)
    ]


def find_model(slug: str) -> LocalModel | None:
    """Return a model, or None if it is absent or one of its files is missing or truncated."""
    record = _read_record(model_path(slug))
    if record is None:
        return None
    folder = Path(record["folder"] or model_path(slug))
    try:
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
        last_used = model_path(slug).stat().st_mtime
    except OSError:
        return None
    if sizes != record["files"]:
        return None
    nbytes = sum(sizes.values())
    return LocalModel(record["name"], folder, nbytes, record["source"], slug, last_used)


def model_path(slug: str) -> Path:
    return _models_folder() / slug


def mark_used(path: Path) -> None:
    """Set the modification time of a model's folder or link to now, if it can be set."""
    with suppress(OSError):
        os.utime(path, follow_symlinks=False)


def store_model(
    slug: str,
    name: str,
    source: str,
    fill: Callable[[Path], Path | None],
    progress: bool,
    refresh: bool = False,
) -> Path:
    """Create a model under `slug` and return its folder. A complete one is reused.

    fill: writes the model into the folder that it is passed, or returns another folder that already
        holds the model. progress: report waiting for the lock. refresh: create the model even if it
        is complete.

    A lock admits one process at a time: a second one waits and reuses the first one's result. The
    model appears by one rename after all of it is on disk, so a crash cannot leave a partial model;
    the next call removes leftovers, and models of the same source under other slugs, with their
    packed and unpacked weights. Raises ModelError if the folder cannot be written, Locked if
    another process has held the lock for an hour, and what `fill` raises.
    """
    try:
        models_folder = _models_folder()
        models_folder.mkdir(parents=True, exist_ok=True)
        with _lock_library(home() / "pull.lock", progress):
            stored_model = find_model(slug)
            if stored_model is not None and not refresh:
                return stored_model.path
            sweep_partial_folders(models_folder)  # while locked, these are left over from crashes
            folder = _create(model_path(slug), name, source, fill)
            _drop_superseded(slug, source)
            if stored_model is not None and stored_model.path != folder:
                _remove_folders(derived_folders(stored_model.path))
            return folder
    except OSError as error:
        raise ModelError(
            f"cannot write the model to {home()} ({error}); free some space, or set KVKEEP_HOME to "
            "a writable folder"
        ) from error


def remove_model(model: LocalModel, progress: bool) -> int:
    """Remove a model and its packed and unpacked weights. Return the number of bytes freed.

    A folder outside the library stays. Raises ModelError, and Locked as `store_model` does.
    """
    try:
        with _lock_library(home() / "pull.lock", progress):
            records = [path for path in _model_paths() if _folder_of(path) == model.path]
            return _remove_folders([*records, *derived_folders(model.path)])
    except OSError as error:
        raise ModelError(f"{model.name} cannot be removed: {error}") from error


def derived_folders(path: Path) -> list[Path]:
    """Return the folders of packed and unpacked weights of the model in folder `path`."""
    return [folder for folder in (packed_folder(path), unpacked_folder(path)) if folder.is_dir()]


def packed_folder(path: Path) -> Path:
    """Return the folder for packed weights of the model in folder `path`. It may not exist."""
    return home() / "packed" / _unique_name(path)


def unpacked_folder(path: Path) -> Path:
    """Return the folder for unpacked weights of a converted model in folder `path`."""
    return home() / "unpacked" / _unique_name(path)


def _unique_name(path: Path) -> str:
    """Return a folder's name with a digest of its path, since others may have the same name."""
    path = path.resolve()
    return f"{path.name}-{hashlib.sha256(bytes(path)).hexdigest()[:16]}"


def _models_folder() -> Path:
    return home() / "models"


def _model_paths() -> list[Path]:
    """Return the folders in the library, by name."""
    folder = _models_folder()
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _folder_of(path: Path) -> Path | None:
    """Return the folder that holds the model of a folder in the library; None without a record."""
    record = _read_record(path)
    return None if record is None else Path(record["folder"] or path)


def _remove_folders(folders: list[Path]) -> int:
    """Remove folders. Return the number of bytes freed."""
    freed_bytes = sum(map(folder_size, folders))
    for folder in folders:
        remove_folder(folder)
    return freed_bytes


def _create(target: Path, name: str, source: str, fill: Callable[[Path], Path | None]) -> Path:
    """Create a model's folder, with a record by which `find_model` tells that it is complete."""
    with atomic_folder(target) as partial_folder:
        external_folder = fill(partial_folder)
        folder = external_folder or partial_folder
        files = {
            str(path.relative_to(folder)): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        record = {
            "layout": _LAYOUT_VERSION,
            "name": name,
            "source": source,
            "folder": str(external_folder) if external_folder else None,
            "files": files,
        }
        write_atomic(partial_folder / _RECORD_NAME, f"{json.dumps(record, indent=2)}\n".encode())
    return external_folder or target


def _read_record(folder: Path) -> dict[str, Any] | None:
    """Return what `_create` recorded of a model; None if there is no record of this version."""
    if folder.name.endswith(PARTIAL_SUFFIX):
        return None
    try:
        record = json.loads((folder / _RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("layout") != _LAYOUT_VERSION:
        return None
    return record


def _lock_library(path: Path, progress: bool) -> Any:
    """Lock the library, for a `with` block. Raises Locked after `LOCK_TIMEOUT` seconds."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    minutes = f"{LOCK_TIMEOUT / 60:.0f} minutes"
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        if progress:
            print(
                f"waiting up to {minutes} for another kvkeep process that is fetching a model",
                file=sys.stderr,
            )
    try:
        return lock.acquire(timeout=LOCK_TIMEOUT)
    except Timeout:
        raise Locked(
            "another kvkeep process has been fetching or converting a model for more than "
            f"{minutes}: retry when it is done, or stop it if it hangs"
        ) from None


def _drop_superseded(slug: str, source: str) -> None:
    """Remove models of the same source under other slugs: conversions before edits of the file."""
    for path in _model_paths():
        record = _read_record(path)
        if record is not None and record["source"] == source and path.name != slug:
            _remove_folders([path, *derived_folders(path)])
