"""The option for the session store, and the sessions in it."""

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

STORE = option(
    metavar="FOLDER|URL",
    envvar="KVKEEP_STORE",
    show_default="kvkeep's own folder",
    help="Folder or object store (s3://bucket/prefix) for sessions; a URL also holds prefixes.",
)


def saved_sessions(store: str | None) -> "SessionStore[Path | SessionPath]":
    """Return the sessions in the store of `--store`; None for the default folder."""
    if store is None:
        return session_folder()
    if not is_url(store):
        return SessionFolder(Path(store))
    from kvkeep.storage.sessions.shared import SharedSessions

    return SharedSessions(open_object_store(store))


def session_folder() -> SessionFolder:
    """Return the sessions in $KVKEEP_HOME, or else in the system's folder for user data.

    Those of older versions are still found in the cache folder, which cleaning tools may empty.
    """
    if home_is_set():
        return SessionFolder(home() / "sessions")
    from platformdirs import user_data_path

    return SessionFolder(user_data_path("kvkeep") / "sessions", legacy_root=home() / "sessions")


def session_names(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    names = saved_sessions(context.params.get("store")).names()
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
