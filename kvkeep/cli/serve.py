"""`kvkeep serve`: serve a model over HTTP; options and checks that `kvkeep fleet` shares."""

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.lazy import OptionsOnly
from kvkeep.cli.memory import MemoryChoice, keep_option, memory_options, uses_prefixes
from kvkeep.cli.options import file_option, size_option
from kvkeep.cli.output import say, shown_bytes
from kvkeep.cli.which_model import prefill_step
from kvkeep.errors import InvalidArgument
from kvkeep.models.hub.library import home
from kvkeep.storage.objects import is_url

if TYPE_CHECKING:
    from kvkeep import Model

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Shorter than in commands for one user, since other requests wait for a step.
_PREFILL_STEP = prefill_step(128)
_OPTIONS = (
    click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="Where to listen."),
    click.option(
        "--port", metavar="N", type=click.IntRange(0, 65535), default=8080, help="0 for any."
    ),
    size_option("--memory", "max_bytes", default="4GB", help="For the cells of all sessions."),
    file_option(
        "--secret-file",
        exists=True,
        help="Known to all servers of one object store, and to nobody else.",
    ),
    click.option(
        "--prefix-cache", is_flag=True, help="Keep evaluated beginnings of prompts on disk."
    ),
    file_option("--api-key-file", exists=True, help="Keys that are let in, one in each line."),
    click.option(
        "--allow-host",
        metavar="NAME",
        multiple=True,
        help="Another name of this server. Repeatable.",
    ),
    click.option(
        "--allow-origin", metavar="URL", multiple=True, help="A page that may ask it. Repeatable."
    ),
    click.option(
        "--alias", metavar="NAME", show_default="its own", help="The model's name for clients."
    ),
    click.option(
        "--grace",
        metavar="SECONDS",
        type=click.FloatRange(0, 3600),
        default=10.0,
        help="For running answers to end, when the server is to stop.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors."),
)


def serving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the server's options to a command, and the memory options as `memory`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    keep = keep_option("First tokens that are never forgotten.")
    return memory_options(keep, _PREFILL_STEP)(command)


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
    else:
        _serve_folder(memory, options)


def _serve_shared(memory: MemoryChoice, options: dict[str, Any]) -> None:
    from kvkeep.fleet.setup import read_secret

    secret = read_secret(options["secret_file"])
    require_secret(options)
    model = memory.load(progress=not options["quiet"])
    from kvkeep.engine import Limits
    from kvkeep.fleet.replica import open_replica
    from kvkeep.server.keys import ApiKeys
    from kvkeep.server.lifecycle import serve_on

    server = open_replica(
        model,
        options["store"],
        secret,
        settings=session_settings(memory, model, options["max_bytes"]),
        limits=Limits(memory=options["max_bytes"]),
        prefixes=uses_prefixes(memory, options["prefix_cache"]),
    )
    with server.engine:
        keys = ApiKeys.read(options["api_key_file"], secret)
        serve_on(server.engine, keys, options, server.middleware, server.leases.drain)


def _serve_folder(memory: MemoryChoice, options: dict[str, Any]) -> None:
    model = memory.load(progress=not options["quiet"])
    from kvkeep.engine import Engine, Limits
    from kvkeep.server.keys import ApiKeys
    from kvkeep.server.lifecycle import serve_on

    folder = Path(options["store"]) if options["store"] else home() / "server"
    with Engine(
        model,
        settings=session_settings(memory, model, options["max_bytes"]),
        limits=Limits(memory=options["max_bytes"]),
        folder=folder / "sessions",
        stores=folder / "prefixes" if uses_prefixes(memory, options["prefix_cache"]) else None,
    ) as engine:
        for line in engine.losses:
            say(line)
        serve_on(engine, ApiKeys.read(options["api_key_file"], folder), options)


def session_settings(memory: MemoryChoice, model: "Model", max_bytes: int) -> dict[str, Any]:
    """Return the settings of the sessions that a server creates.

    max_bytes: for the cells of all sessions. Raises InvalidArgument if no chat fits in a session,
    or if a full session needs more: requests without a limit would be refused.
    """
    memory.require_room_for_a_chat(model)
    settings = memory.settings(model)
    tokens, needed = _full_session(model, settings)
    if needed <= max_bytes:
        return settings
    fitting = _largest_fitting_budget(model, settings, tokens, max_bytes)
    smaller = f", or --max-kv-size {fitting} or less" if fitting else ""
    raise InvalidArgument(
        f"a session of {tokens:,} tokens takes up to {shown_bytes(needed)}, and --memory is "
        f"{shown_bytes(max_bytes)}: give --memory {shown_bytes(needed)} or more{smaller}"
    )


def _full_session(model: "Model", settings: dict[str, Any]) -> tuple[int, int]:
    """Return the budget of a session in tokens, and the most bytes that its cells take."""
    from kvkeep.engine.record import max_session_bytes

    session = model.session(**settings)
    return session.max_kv_size, max_session_bytes(session, None)


def _largest_fitting_budget(
    model: "Model", settings: dict[str, Any], tokens: int, max_bytes: int
) -> int:
    """Return the largest budget below `tokens` whose full session fits in `max_bytes`, or 0."""

    def fits(budget: int) -> bool:
        try:
            return _full_session(model, {**settings, "max_kv_size": budget})[1] <= max_bytes
        except InvalidArgument:  # too few tokens for the policy
            return False

    fitting = bisect_left(range(1, tokens), True, key=lambda budget: not fits(budget))
    return fitting if fitting and fits(fitting) else 0


def require_safe(host: str, key_file: Path | None) -> None:
    """Raise InvalidArgument if other machines can reach a server without API keys."""
    if host not in _LOOPBACK and key_file is None:
        raise InvalidArgument(
            f"at {host} the server can be reached from other machines: give API keys with "
            "--api-key-file, or listen on 127.0.0.1"
        )


def require_installed() -> None:
    """Raise InvalidArgument if the packages of the server extra are missing."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InvalidArgument(
            f"the server needs more ({error.name} is missing): pip install 'kvkeep[server]'"
        ) from None


def require_secret(options: dict[str, Any]) -> None:
    """Raise InvalidArgument for API keys over an object store without --secret-file."""
    if options["api_key_file"] is not None and options["secret_file"] is None:
        raise InvalidArgument(
            "--api-key-file with an object store needs --secret-file: the owners of sessions are "
            "derived from a secret that all servers share; make one, for example with "
            "`openssl rand -hex 32 > secret`"
        )
