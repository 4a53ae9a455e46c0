"""The models that were pulled or converted, under one folder, each whole or not there at all."""

import glob
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import Locked, ModelError
from kvkeep.storage.files.atomic import (
    PARTIAL,
    atomic_folder,
    folder_bytes,
    remove_folder,
    sweep_partial_folders,
    write_atomic,
)

PATIENCE = 3600.0  # seconds; of a large model, a download takes long
_RECORD = "kvkeep.json"
# Raised when what is written into a model's folder changes: older ones are then made anew.
_LAYOUT = 6


@dataclass(frozen=True)
class PulledModel:
    """name: what to call it by. folder: Hugging Face layout. source: package, file or hub id. slug:
    what it is kept under.
    """

    name: str
    folder: Path
    bytes: int
    source: str
    slug: str = ""


def home() -> Path:
    """Where kvkeep keeps models: $KVKEEP_HOME, or the user's cache folder."""
    if is_given():
        return Path(os.environ["KVKEEP_HOME"]).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("kvkeep")


def is_given() -> bool:
    """Whether $KVKEEP_HOME says where everything is kept."""
    return bool(os.environ.get("KVKEEP_HOME"))


def pulled() -> list[PulledModel]:
    """All models that are here whole, by name."""
    models = _models()
    names = sorted(path.name for path in models.iterdir()) if models.is_dir() else []
    return [model for name in names if (model := find(name)) is not None]


def find(slug: str) -> PulledModel | None:
    """The model kept under a name, if it is here and no file of it is missing or cut short."""
    record = _read_record(_models() / slug)
    if record is None:
        return None
    folder = Path(record["folder"]) if record["folder"] else _models() / slug
    for name, size in record["files"].items():
        try:
            if (folder / name).stat().st_size != size:
                return None
        except OSError:
            return None
    return PulledModel(
        record["name"], folder, sum(record["files"].values()), record["source"], slug
    )


def keep(
    slug: str,
    name: str,
    source: str,
    fill: Callable[[Path], Path | None],
    progress: bool,
    anew: bool = False,
) -> Path:
    """Make a model and keep it under `slug`; its folder.

    fill: writes the model into the folder that it is given, or returns the folder of its own in
        which the model lies already.
    anew: make it even if it is here.

    One process at a time makes models: a second one waits and finds what the first one made. What
    is made appears by one rename, after all of it is on the disk, so that no crash leaves a part
    that could be taken for the whole; what a crash leaves is swept by the next call. A model made
    earlier from the same source, under another slug, gives way.

    Raises ModelError if the folder cannot be written, Locked if another process has been making a
    model for an hour, and what `fill` raises.
    """
    try:
        models = _models()
        models.mkdir(parents=True, exist_ok=True)
        with _only_one(home() / "pull.lock", progress):
            present = None if anew else find(slug)
            if present is not None:
                return present.folder
            sweep_partial_folders(models)  # under the lock, all of them were left by the dead
            folder = _make(models / slug, name, source, fill)
            _drop_superseded(slug, source)
            return folder
    except OSError as error:
        raise ModelError(
            f"cannot write the model to {home()} ({error}); free some space, or set KVKEEP_HOME to "
            "a folder that can be written"
        ) from error


def remove(model: PulledModel, progress: bool) -> int:
    """Removes a model that is kept, and what was made of its weights; the bytes freed.

    A folder that is not under kvkeep's own stays. Raises ModelError, and Locked as `keep`.
    """
    try:
        with _only_one(home() / "pull.lock", progress):
            folders = [_models() / model.slug, *_made_of(model)]
            freed = sum(map(folder_bytes, folders))
            for folder in folders:
                if folder.is_dir():
                    remove_folder(folder)
    except OSError as error:
        raise ModelError(f"{model.name} cannot be removed: {error}") from error
    return freed


def _made_of(model: PulledModel) -> Iterator[Path]:
    """Folders of packed and unpacked weights: named after the model's, and a state of it."""
    for kind, states in (("packed", r"[0-9a-f]{16}"), ("unpacked", r"[0-9]+-[0-9]+")):
        for path in (home() / kind).glob(f"{glob.escape(model.folder.name)}-*"):
            state = path.name.removeprefix(f"{model.folder.name}-")
            if re.fullmatch(states, state):
                yield path


def _models() -> Path:
    return home() / "models"


def _make(final: Path, name: str, source: str, fill: Callable[[Path], Path | None]) -> Path:
    with atomic_folder(final) as partial:
        elsewhere = fill(partial)
        folder = elsewhere or partial
        files = {
            str(path.relative_to(folder)): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        record = {
            "layout": _LAYOUT,
            "name": name,
            "source": source,
            "folder": str(elsewhere) if elsewhere else None,
            "files": files,
        }
        write_atomic(partial / _RECORD, f"{json.dumps(record, indent=2)}\n".encode())
    return elsewhere or final


def _read_record(folder: Path) -> dict[str, Any] | None:
    if folder.name.endswith(PARTIAL):
        return None
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("layout") != _LAYOUT:
        return None
    return record


def _only_one(path: Path, progress: bool) -> Any:
    """The lock that whoever makes a model holds. The system frees it when a process dies.

    Raises Locked where its holder neither ends nor dies: it may be stopped.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        if progress:
            print(
                "waiting for another kvkeep that is fetching a model, "
                f"for {PATIENCE / 60:.0f} minutes at most",
                file=sys.stderr,
            )
    try:
        return lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise Locked(
            f"another kvkeep has been fetching or converting a model for more than "
            f"{PATIENCE / 60:.0f} minutes, and one does so at a time: try again when it is done, "
            "or end it if it hangs"
        ) from None


def _drop_superseded(slug: str, source: str) -> None:
    """A file that was edited was converted before, under another slug: nothing asks for it now."""
    for path in _models().iterdir():
        record = _read_record(path)
        if record is not None and record["source"] == source and path.name != slug:
            remove_folder(path)
