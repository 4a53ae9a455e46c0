"""The option for the store of saved sessions: a folder, or an object store."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from kvkeep.cli.options import option
from kvkeep.errors import Locked, StoreError
from kvkeep.models.hub.library import data_folders
from kvkeep.storage.files.atomic import make_folder
from kvkeep.storage.objects import is_url, open_object_store
from kvkeep.storage.sessions.folder import SessionFolder

if TYPE_CHECKING:
    from kvkeep.storage.sessions.interface import SessionStore
    from kvkeep.storage.sessions.shared import SessionPath

STORE_OPTION = option(
    metavar="FOLDER|URL",
    envvar="KVKEEP_STORE",
    show_default="kvkeep's own folder",
    help="Folder or object store (s3://bucket/prefix) for sessions; a URL also holds prefixes.",
)


def open_session_store(store: str | None) -> "SessionStore[Path | SessionPath]":
    """Return the session store that `--store` names; None for the default folder."""
    if store is None:
        return default_session_folder()
    if not is_url(store):
        return SessionFolder(Path(store))
    from kvkeep.storage.sessions.shared import SharedSessions

    return SharedSessions(open_object_store(store))


def default_session_folder() -> SessionFolder:
    """Return the session store in the folder for what users keep."""
    folder, *legacy = data_folders("sessions")
    return SessionFolder(folder, *legacy)


def default_server_folder() -> Path:
    """Return the folder of the sessions of `kvkeep serve`, which may be missing.

    Those of older versions, in the cache folder, are moved there. Raises Locked if a server uses
    them, StoreError if they cannot be moved.
    """
    folder, *legacy = data_folders("server")
    if legacy:
        _move_server(legacy[0], folder)
    return folder


def require_no_server(folder: Path) -> None:
    """Raise Locked if another process uses the sessions in a server's folder."""
    for path in (folder / "sessions").glob("*/"):
        try:
            with SessionFolder(path).lock_all():
                continue
        except Locked:
            raise Locked(
                f"another server uses the sessions in {folder}: stop it, or give this one a "
                "folder with --store FOLDER"
            ) from None


def _move_server(source: Path, target: Path) -> None:
    """Move the sessions of a server, after the secret by which their owners are known."""
    require_no_server(source)
    for name in ("secret", "sessions"):
        if (target / name).exists() or not (source / name).exists():
            continue
        try:
            make_folder(target)
            (source / name).rename(target / name)
        except OSError as error:
            raise StoreError(
                f"{source / name} cannot be moved to {target} ({error.strerror or error}): move it "
                f"yourself, or use --store {source}"
            ) from error


def complete_sessions(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names of sessions in the store of `--store`, for the shell."""
    names = open_session_store(context.params.get("store")).names()
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
