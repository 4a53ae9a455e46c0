"""What `kvkeep serve` and `kvkeep fleet` are both asked for."""

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
_STEP = prefill_step(128)  # others wait for a step, so it is shorter than where nobody does
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
    """Adds them to a command, with those of a session's memory as `memory`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return memory_options(_KEEP, _STEP)(command)


def session_settings(choice: MemoryChoice, model: "Model", memory: int) -> dict[str, Any]:
    """The settings of the sessions that a server creates.

    memory: bytes for the cells of all sessions. Raises InvalidArgument where no chat fits in a
    session, or one full session not in the memory: every request that does not limit its answer
    would be refused.
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
    """The budget of a session in tokens, and the most bytes that its cells come to take."""
    from kvkeep.engine.record import max_session_bytes

    session = model.session(**settings)
    return session.max_kv_size, max_session_bytes(session, None)


def _longest_fitting(model: "Model", settings: dict[str, Any], tokens: int, memory: int) -> int:
    """The largest budget, below `tokens`, of a session that fits in `memory` bytes; 0 for none."""

    def fits(budget: int) -> bool:
        try:
            return _full_session(model, {**settings, "max_kv_size": budget})[1] <= memory
        except InvalidArgument:  # too few tokens for the policy
            return False

    fitting = bisect_left(range(1, tokens), True, key=lambda budget: not fits(budget))
    return fitting if fitting and fits(fitting) else 0


def require_safe(host: str, keys: Path | None) -> None:
    if host not in _LOOPBACK and keys is None:
        raise InvalidArgument(
            f"at {host} others than you can reach the server: give the keys that are to be let in "
            "by --api-key-file, or stay at 127.0.0.1"
        )


def require_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InvalidArgument(
            f"the server needs more ({error.name} is missing): pip install 'kvkeep[server]'"
        ) from None


def require_secret(options: dict[str, Any]) -> None:
    """Raises InvalidArgument where servers of one store could not tell whose a key is."""
    if options["api_key_file"] is not None and options["secret_file"] is None:
        raise InvalidArgument(
            "with --api-key-file and an object store, whose a session is is told by a secret that "
            "all servers know: make one, as by `openssl rand -hex 32 > secret`, and give it by "
            "--secret-file"
        )
