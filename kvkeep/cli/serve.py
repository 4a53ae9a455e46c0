"""`kvkeep serve`: serve a model over HTTP."""

from pathlib import Path
from typing import Any

from kvkeep.cli.lazy import OptionsOnlyCommand
from kvkeep.cli.memory import check_prefix_limit
from kvkeep.cli.options import (
    command,
    compact_at_option,
    is_in_command_line,
    option,
    option_group,
    size_option,
)
from kvkeep.cli.output import format_size, say
from kvkeep.cli.serving_options import ServingOptions, require_server_packages
from kvkeep.cli.store import default_server_folder, require_no_server
from kvkeep.errors import InvalidArgument
from kvkeep.models.hub.library import home
from kvkeep.storage.objects import is_url
from kvkeep.storage.prefixes.quota import DEFAULT_MAX_BYTES


@command(cls=OptionsOnlyCommand, hint="name a model with -m: kvkeep serve -m {}")
def serve(
    serving: ServingOptions = option_group(ServingOptions),
    store: str | None = option(
        metavar="FOLDER|URL",
        show_default="kvkeep's own folder",
        help="Folder or object store (s3://bucket/prefix) for sessions.",
    ),
    prefix_cache_bytes: int = size_option(
        default=format_size(DEFAULT_MAX_BYTES),
        help="Maximum disk space of the prefix cache, for each API key.",
    ),
    allow_edit: bool | None = option(
        "--allow-edit/--no-allow-edit",
        default=None,
        show_default="allowed without API keys and other hosts",
        help="Allow the web page to chat and to edit sessions.",
    ),
    compact_at: float | None = compact_at_option(),
    verbose: bool = option("-v", is_flag=True, help="Print a line for each request."),
) -> None:
    """Serve a model over HTTP: the OpenAI and Anthropic APIs, sessions, and a web page.

    Requests are decoded together; each gets the same tokens as if it ran alone. A prefix that a
    prompt shares with an earlier one is not prefilled again.
    """
    if verbose and serving.quiet:
        raise InvalidArgument("leave out --quiet or --verbose: one prints less, the other more")
    serving.require_api_keys_if_exposed()
    require_server_packages()
    from kvkeep.server.connections import raise_file_limit

    raise_file_limit()
    serving.memory.check()
    check_prefix_limit(serving.prefix_cache, store)
    edits = serving.is_for_one_user() if allow_edit is None else allow_edit
    options = {
        **vars(serving),
        "allow_edit": edits,
        "compact_at": compact_at,
        "verbose": verbose,
    }
    if store is not None and is_url(store):
        _serve_shared(serving, store, options)
    else:
        if is_in_command_line("secret_file"):
            raise InvalidArgument("--secret-file is for an object store: add --store URL")
        folder = None if store is None else Path(store)
        _serve_folder(serving, folder, prefix_cache_bytes, options)
    from kvkeep.server.lifecycle import end_process

    end_process()


def _serve_shared(serving: ServingOptions, store: str, options: dict[str, Any]) -> None:
    from kvkeep.fleet.config import read_secret

    secret = read_secret(serving.secret_file)
    serving.require_secret()
    model = serving.load()
    from kvkeep.engine import Limits
    from kvkeep.fleet.replica import Replica
    from kvkeep.server.keys import ApiKeys
    from kvkeep.server.lifecycle import run_server

    server = Replica(
        model,
        store,
        secret,
        settings=serving.session_settings(model),
        limits=Limits(memory=serving.max_bytes),
        share_prefixes=serving.uses_prefix_cache(),
        alignment=serving.alignment_options(),
        speculation=serving.speculation_options(),
        codec=serving.codec,
    )
    with server.engine:
        keys = ApiKeys.read(serving.api_key_file, secret)
        run_server(server.engine, keys, options, server.middleware, server.leases.drain)


def _serve_folder(
    serving: ServingOptions, store: Path | None, prefix_bytes: int, options: dict[str, Any]
) -> None:
    """Serve with sessions in a folder; None for kvkeep's own, with prompts in the cache folder."""
    folder = default_server_folder() if store is None else store
    require_no_server(folder)
    prefix_folder = (home() / "server" if store is None else store) / "prefixes"
    model = serving.load()
    from kvkeep.engine import Engine, Limits
    from kvkeep.server.keys import ApiKeys
    from kvkeep.server.lifecycle import run_server
    from kvkeep.storage.prefixes.store import stores_of_owners

    prefixes = stores_of_owners(prefix_folder, serving.codec, prefix_bytes)
    with Engine(
        model,
        settings=serving.session_settings(model),
        limits=Limits(memory=serving.max_bytes),
        folder=folder / "sessions",
        stores=prefixes if serving.uses_prefix_cache() else None,
        alignment=serving.alignment_options(),
        speculation=serving.speculation_options(),
        codec=serving.codec,
    ) as engine:
        for line in engine.losses:
            say(line)
        keys = ApiKeys.read(serving.api_key_file, folder)
        run_server(engine, keys, options)
