"""Options for the session store, and the store of a command."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.shell_completion import CompletionItem

from kvkeep.cli.options import file_option
from kvkeep.models.hub.library import home, home_is_set
from kvkeep.storage.objects import is_url, open_object_store
from kvkeep.storage.sessions.folder import SessionFolder

if TYPE_CHECKING:
    from kvkeep.storage.sessions.interface import SessionStore
    from kvkeep.storage.sessions.shared import SessionPath


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Keep the value of an option for `_remembered`."""
    context.meta[f"kvkeep.{parameter.name}"] = value
    return value


def _remembered(option: str) -> Any:
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(f"kvkeep.{option}")


store_option = click.option(
    "--store",
    metavar="FOLDER|URL",
    envvar="KVKEEP_STORE",
    show_default="in kvkeep's own",
    expose_value=False,
    callback=_remember,
    help="Where sessions are kept, and prompts if it is a URL, as s3://bucket/prefix.",
)
secret_option = file_option(
    "--secret-file",
    envvar="KVKEEP_SECRET_FILE",
    exists=True,
    expose_value=False,
    callback=_remember,
    help="Known to all who share the prefix cache of a --store that is a URL.",
)


def named_store() -> str | None:
    """Return the value of `--store`; None for the default folder."""
    return cast(str | None, _remembered("store"))


def named_secret() -> bytes:
    """Read the file of `--secret-file`. Raises InvalidArgument if it holds no secret."""
    from kvkeep.fleet.setup import read_secret

    return read_secret(_remembered("secret_file"))


def saved_sessions() -> "SessionStore[Path | SessionPath]":
    """Return the sessions in the command's store."""
    store = named_store()
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

    return SessionFolder(user_data_path("kvkeep") / "sessions", older=home() / "sessions")


def session_names(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [CompletionItem(n) for n in saved_sessions().names() if n.startswith(incomplete)]
