"""`kvkeep serve`: one model for many, over HTTP."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.memory import SINKS, MemoryChoice, memory_options
from kvkeep.cli.options import nbytes, whole_number
from kvkeep.cli.saying import say
from kvkeep.cli.which_model import prefill_step
from kvkeep.errors import InvalidArgument
from kvkeep.models.source import home
from kvkeep.objects.address import is_url

if TYPE_CHECKING:
    from kvkeep.engine import Engine

_STEP = prefill_step(128)  # others wait for a step, so it is shorter than where nobody does
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_KEEP = click.option(
    "--keep",
    metavar="N",
    type=whole_number(0),
    default=SINKS,
    help="First tokens that are never forgotten.",
)


@click.command()
@memory_options(_KEEP, _STEP)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="Where to listen.")
@click.option("--port", metavar="N", type=click.IntRange(0, 65535), default=8080, help="0 for any.")
@click.option(
    "--memory",
    "most_bytes",
    metavar="SIZE",
    type=nbytes,
    default="4GB",
    help="For the cells of all sessions.",
)
@click.option(
    "--store",
    metavar="FOLDER|URL",
    show_default="in kvkeep's own",
    help="Where sessions are kept: a folder, or an object store, as s3://bucket/prefix.",
)
@click.option(
    "--secret-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What all servers of one object store know: who may use its prompts, and whose keys are.",
)
@click.option("--prefix-cache", is_flag=True, help="Keep evaluated beginnings of prompts on disk.")
@click.option(
    "--api-key-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keys that are let in, one in each line.",
)
@click.option(
    "--allow-host", metavar="NAME", multiple=True, help="Another name of this server. Repeatable."
)
@click.option(
    "--allow-origin", metavar="URL", multiple=True, help="A page that may ask it. Repeatable."
)
@click.option("--allow-edit", is_flag=True, help="The page may change sessions, and chat.")
@click.option(
    "--alias", metavar="NAME", show_default="its own", help="The model's name for clients."
)
@click.option(
    "--grace",
    metavar="SECONDS",
    type=click.FloatRange(0, 3600),
    default=10.0,
    help="For running answers to end, when the server is to stop.",
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
def serve(memory: MemoryChoice, **options: Any) -> None:
    """Serve a model over HTTP: OpenAI's API, and sessions.

    Every request is evaluated by one engine: answers are written together, each as if it were
    alone. What a request has in common with an earlier one is not evaluated again.
    """
    _require_safe(options["host"], options["api_key_file"])
    _require_installed()
    memory.check()
    if options["store"] is not None and is_url(options["store"]):
        _serve_shared(memory, options)
        return
    engine = _engine(memory, options)
    from kvkeep.server.keys import Keys
    from kvkeep.server.running import serve_on

    try:
        serve_on(engine, Keys.read(options["api_key_file"], options["folder"]), options)
    finally:
        engine.close()


def _serve_shared(choice: MemoryChoice, options: dict[str, Any]) -> None:
    """Over an object store, which other servers may use too."""
    from kvkeep.fleet.secret import read_secret

    secret = read_secret(options["secret_file"])
    require_secret(options)
    model = choice.load(progress=not options["quiet"])
    from kvkeep.engine import Limits
    from kvkeep.fleet.replica import replica
    from kvkeep.server.keys import Keys
    from kvkeep.server.running import serve_on

    found = replica(
        model,
        options["store"],
        secret,
        settings=choice.settings(model, choice.keep if choice.keep is not None else SINKS),
        limits=Limits(memory=options["most_bytes"]),
        prefixes=options["prefix_cache"],
    )
    try:
        keys = Keys.shared(options["api_key_file"], secret)
        serve_on(found.engine, keys, options, found.around)
    finally:
        found.engine.close()


def require_secret(options: dict[str, Any]) -> None:
    if options["api_key_file"] is not None and options["secret_file"] is None:
        raise InvalidArgument(
            "with --api-key-file and an object store, whose a session is is told by a secret that "
            "all servers know: make one, as by `openssl rand -hex 32 > secret`, and give it by "
            "--secret-file"
        )


def _engine(choice: MemoryChoice, options: dict[str, Any]) -> "Engine":
    model = choice.load(progress=not options["quiet"])
    from kvkeep.engine import Engine, Limits

    folder = Path(options["store"]) if options["store"] else home() / "server"
    engine = Engine(
        model,
        settings=choice.settings(model, choice.keep if choice.keep is not None else SINKS),
        limits=Limits(memory=options["most_bytes"]),
        folder=folder / "sessions",
        stores=folder / "prefixes" if options["prefix_cache"] else None,
    )
    options["folder"] = folder
    for line in engine.losses:
        say(line)
    return engine


def _require_safe(host: str, keys: Path | None) -> None:
    if host not in _LOOPBACK and keys is None:
        raise InvalidArgument(
            f"at {host} others than you can reach the server: give the keys that are to be let in "
            "by --api-key-file, or stay at 127.0.0.1"
        )


def _require_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InvalidArgument(
            f"the server needs more ({error.name} is missing): pip install 'kvkeep[server]'"
        ) from None
