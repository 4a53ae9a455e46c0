"""`kvkeep serve`: serve a model over HTTP."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.lazy import OptionsOnly
from kvkeep.cli.memory import MemoryChoice, shares_prefixes
from kvkeep.cli.output import say
from kvkeep.cli.serving import (
    require_installed,
    require_safe,
    require_secret,
    serving_options,
    session_settings,
)
from kvkeep.models.hub.source import home
from kvkeep.storage.objects.address import is_url

if TYPE_CHECKING:
    from kvkeep.engine import Engine


@click.command(cls=OptionsOnly, hint="name a model with -m: kvkeep serve -m {}")
@serving_options
@click.option(
    "--store",
    metavar="FOLDER|URL",
    show_default="in kvkeep's own",
    help="Where sessions are kept: a folder, or an object store, as s3://bucket/prefix.",
)
@click.option("--allow-edit", is_flag=True, help="The page may change sessions, and chat.")
def serve(memory: MemoryChoice, **options: Any) -> None:
    """Serve a model over HTTP: OpenAI's API, and sessions.

    Every request is evaluated by one engine: answers are written together, each as if it were
    alone. What a request has in common with an earlier one is not evaluated again.
    """
    require_safe(options["host"], options["api_key_file"])
    require_installed()
    memory.check()
    if options["store"] is not None and is_url(options["store"]):
        _serve_shared(memory, options)
        return
    engine = _engine(memory, options)
    from kvkeep.server.keys import ApiKeys
    from kvkeep.server.lifecycle import serve_on

    try:
        serve_on(engine, ApiKeys.read(options["api_key_file"], options["folder"]), options)
    finally:
        engine.close()


def _serve_shared(choice: MemoryChoice, options: dict[str, Any]) -> None:
    """Serve sessions from an object store that other servers may share."""
    from kvkeep.fleet.setup import read_secret

    secret = read_secret(options["secret_file"])
    require_secret(options)
    model = choice.load(progress=not options["quiet"])
    from kvkeep.engine import Limits
    from kvkeep.fleet.replica import open_replica
    from kvkeep.server.keys import ApiKeys
    from kvkeep.server.lifecycle import serve_on

    server = open_replica(
        model,
        options["store"],
        secret,
        settings=session_settings(choice, model, options["most_bytes"]),
        limits=Limits(memory=options["most_bytes"]),
        prefixes=shares_prefixes(choice, options["prefix_cache"]),
    )
    try:
        keys = ApiKeys.shared(options["api_key_file"], secret)
        serve_on(server.engine, keys, options, server.middleware, server.drain)
    finally:
        server.engine.close()


def _engine(choice: MemoryChoice, options: dict[str, Any]) -> "Engine":
    """Load the model and start an engine whose sessions are in a folder."""
    model = choice.load(progress=not options["quiet"])
    from kvkeep.engine import Engine, Limits

    folder = Path(options["store"]) if options["store"] else home() / "server"
    engine = Engine(
        model,
        settings=session_settings(choice, model, options["most_bytes"]),
        limits=Limits(memory=options["most_bytes"]),
        folder=folder / "sessions",
        stores=folder / "prefixes" if shares_prefixes(choice, options["prefix_cache"]) else None,
    )
    options["folder"] = folder
    for line in engine.losses:
        say(line)
    return engine
