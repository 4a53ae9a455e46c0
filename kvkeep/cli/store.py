"""The option for the store of saved sessions: a folder, or an object store."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from kvkeep.cli.options import option
from kvkeep.models.hub.library import home, home_is_set
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


def data_folder() -> Path:
    """Return the folder for what users keep: $KVKEEP_HOME, or the system's for user data."""
    if home_is_set():
        return home()
    from platformdirs import user_data_path

    return user_data_path("kvkeep")


def default_session_folder() -> SessionFolder:
    """Return the session store in the folder for what users keep."""
    if home_is_set():
        return SessionFolder(data_folder() / "sessions")
    # Sessions of older versions are in the cache folder, which cleaning tools may empty.
    return SessionFolder(data_folder() / "sessions", legacy_root=home() / "sessions")


def complete_sessions(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names of sessions in the store of `--store`, for the shell."""
    names = open_session_store(context.params.get("store")).names()
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
