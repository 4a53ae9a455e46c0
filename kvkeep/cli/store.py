"""Options for the session store, and the store that a command uses."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.models.hub.library import home, home_is_set
from kvkeep.storage.objects.address import is_url, open_object_store
from kvkeep.storage.sessions.folder import SessionFolder

if TYPE_CHECKING:
    from kvkeep.storage.sessions.interface import SessionStore
    from kvkeep.storage.sessions.shared import SessionPath

_STORE, _SECRET = "kvkeep.store", "kvkeep.secret"  # keys in the meta dict of click's context


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Put the value of `--store` or `--secret-file` into the context, for `named_store` etc."""
    context.meta[_STORE if parameter.name == "store" else _SECRET] = value
    return value


def store_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--store` to a command."""
    return click.option(
        "--store",
        metavar="FOLDER|URL",
        envvar="KVKEEP_STORE",
        show_default="in kvkeep's own",
        expose_value=False,
        callback=_remember,
        help="Where sessions are kept, and prompts if it is a URL, as s3://bucket/prefix.",
    )(command)


def secret_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--secret-file` to a command."""
    return click.option(
        "--secret-file",
        metavar="FILE",
        envvar="KVKEEP_SECRET_FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        expose_value=False,
        callback=_remember,
        help="Known to all who share the prefix cache of a --store that is a URL.",
    )(command)


def named_store() -> str | None:
    """Return the value of `--store`; None for the default folder on this machine."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(_STORE)


def named_secret() -> bytes:
    """Read the file of `--secret-file`. Raises InvalidArgument if it holds no secret."""
    from kvkeep.fleet.setup import read_secret

    context = click.get_current_context(silent=True)
    return read_secret(None if context is None else context.meta.get(_SECRET))


def saved_sessions() -> "SessionStore[Path | SessionPath]":
    """Return the sessions in the store that the command uses."""
    store = named_store()
    if store is None:
        return session_folder()
    if not is_url(store):
        return SessionFolder(Path(store))
    from kvkeep.storage.sessions.shared import SharedSessions

    return SharedSessions(open_object_store(store))


def session_folder() -> SessionFolder:
    """Return the default sessions: in $KVKEEP_HOME, or else in the system's folder for user data.

    Sessions of older versions, in the cache folder, are still found. They are no longer saved
    there, because cleaning tools may empty it.
    """
    if home_is_set():
        return SessionFolder(home() / "sessions")
    from platformdirs import user_data_path

    return SessionFolder(user_data_path("kvkeep") / "sessions", older=home() / "sessions")
