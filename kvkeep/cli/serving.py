"""Options and checks that `kvkeep serve` and `kvkeep fleet` share."""

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.memory import SINKS, MemoryChoice, memory_options
from kvkeep.cli.options import nbytes, whole_number
from kvkeep.cli.output import shown_bytes
from kvkeep.cli.restore import require_room_for_a_chat
from kvkeep.cli.which_model import prefill_step
from kvkeep.errors import InvalidArgument

if TYPE_CHECKING:
    from kvkeep import Model

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_STEP = prefill_step(
    128
)  # other requests wait for a step, so it is shorter than in one-user commands
_KEEP = click.option(
    "--keep",
    metavar="N",
    type=whole_number(0),
    default=SINKS,
    help="First tokens that are never forgotten.",
)
_OPTIONS = (
    click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="Where to listen."),
    click.option(
        "--port", metavar="N", type=click.IntRange(0, 65535), default=8080, help="0 for any."
    ),
    click.option(
        "--memory",
        "most_bytes",
        metavar="SIZE",
        type=nbytes,
        default="4GB",
        help="For the cells of all sessions.",
    ),
    click.option(
        "--secret-file",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Known to all servers of one object store, and to nobody else.",
    ),
    click.option(
        "--prefix-cache", is_flag=True, help="Keep evaluated beginnings of prompts on disk."
    ),
    click.option(
        "--api-key-file",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Keys that are let in, one in each line.",
    ),
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
    """Add the server options to a command, and the memory options, passed on as `memory`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return memory_options(_KEEP, _STEP)(command)


def session_settings(choice: MemoryChoice, model: "Model", memory: int) -> dict[str, Any]:
    """Return the settings of the sessions that a server creates.

    memory: bytes for the cells of all sessions. Raises InvalidArgument if no chat fits in a
    session, or if a full session does not fit in the memory, since every request without a limit on
    its answer would then be refused.
    """
    require_room_for_a_chat(model, choice)
    settings = choice.settings(model, choice.keep if choice.keep is not None else SINKS)
    tokens, needed = _full_session(model, settings)
    if needed <= memory:
        return settings
    fitting = _longest_fitting(model, settings, tokens, memory)
    smaller = f", or --max-kv-size {fitting} or less" if fitting else ""
    raise InvalidArgument(
        f"a session of {tokens:,} tokens takes up to {shown_bytes(needed)}, and --memory is "
        f"{shown_bytes(memory)}: give --memory {shown_bytes(needed)} or more{smaller}"
    )


def _full_session(model: "Model", settings: dict[str, Any]) -> tuple[int, int]:
    """Return the budget of a session in tokens, and the most bytes that its cells take."""
    from kvkeep.engine.record import max_session_bytes

    session = model.session(**settings)
    return session.max_kv_size, max_session_bytes(session, None)


def _longest_fitting(model: "Model", settings: dict[str, Any], tokens: int, memory: int) -> int:
    """Return the largest budget below `tokens` of a session that fits in `memory` bytes, or 0."""

    def fits(budget: int) -> bool:
        try:
            return _full_session(model, {**settings, "max_kv_size": budget})[1] <= memory
        except InvalidArgument:  # too few tokens for the policy
            return False

    fitting = bisect_left(range(1, tokens), True, key=lambda budget: not fits(budget))
    return fitting if fitting and fits(fitting) else 0


def require_safe(host: str, keys: Path | None) -> None:
    """Raise InvalidArgument for a server that is reachable from elsewhere without API keys."""
    if host not in _LOOPBACK and keys is None:
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
    """Raise InvalidArgument for API keys over an object store without a shared secret.

    Owners of sessions are derived from keys with the secret that all servers of the store have.
    """
    if options["api_key_file"] is not None and options["secret_file"] is None:
        raise InvalidArgument(
            "--api-key-file with an object store needs --secret-file: the owners of sessions are "
            "derived from a secret that all servers share; make one, for example with "
            "`openssl rand -hex 32 > secret`"
        )
