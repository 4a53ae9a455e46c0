"""The options of a server and its sessions, which `kvkeep serve` and `kvkeep fleet` share."""

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from kvkeep.chat.prompt_rules import PROMPT_RULES, select_rules
from kvkeep.cli.memory import (
    CODEC_HELP,
    CODEC_NAMES,
    MEMORY_SECTION,
    MemoryOptions,
    keep_option,
    uses_prefix_cache,
)
from kvkeep.cli.model_options import prefill_step_option
from kvkeep.cli.options import (
    SPECULATE_OPTION,
    FiniteRange,
    checked_type,
    choice_option,
    file_option,
    option,
    option_group,
    size_option,
)
from kvkeep.cli.output import format_size
from kvkeep.errors import InvalidArgument
from kvkeep.server.host_names import ANY_ORIGIN, OPAQUE_ORIGIN, parse_host, parse_origin
from kvkeep.types import AlignmentMode, ContextPolicy

if TYPE_CHECKING:
    from kvkeep import Model
    from kvkeep.session.alignment import AlignmentOptions
    from kvkeep.session.drafts import SpeculationOptions
    from kvkeep.storage.snapshots.codec import Codec

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_RULE_NAMES = ", ".join(
    f"{rule.name} (default)" if rule.default else rule.name for rule in PROMPT_RULES
)


def _parse_rules(selection: str) -> str:
    """Return a selection of prompt rules. Raises InvalidArgument if it is none."""
    select_rules(selection)
    return selection


@dataclass(frozen=True)
class ServingOptions:
    """The options for a server and its sessions."""

    memory: MemoryOptions = option_group(
        MemoryOptions,
        section=MEMORY_SECTION,
        keep=keep_option(),
        # Shorter than in commands for one user, since other requests wait for a step.
        prefill_step=prefill_step_option(128),
    )
    host: str = option(metavar="ADDRESS", default="127.0.0.1", help="Address to listen on.")
    port: int = option(
        metavar="N", type=click.IntRange(0, 65535), default=8080, help="Port; 0: any free one."
    )
    max_bytes: int = size_option(
        "--memory", default="4GB", help="Memory for the KV cache of all sessions."
    )
    secret_file: Path | None = file_option(
        exists=True, help="Secret that all servers of one object store share."
    )
    codec: "Codec" = choice_option(CODEC_NAMES, CODEC_HELP, default=CODEC_NAMES[0])
    prefix_cache: bool = option(is_flag=True, help="Keep evaluated prompt prefixes on disk.")
    api_key_file: Path | None = file_option(
        exists=True, help="API keys or their hashes (kvkeep keys); every request then needs one."
    )
    allow_host: tuple[str, ...] = option(
        metavar="NAME",
        type=checked_type(parse_host),
        multiple=True,
        help="Accept this host name too; repeatable.",
    )
    allow_origin: tuple[str, ...] = option(
        metavar="URL",
        type=checked_type(parse_origin),
        multiple=True,
        help="Accept browser requests from this origin (CORS); repeatable; *: from any, "
        "with --api-key-file.",
    )
    alias: str | None = option(
        metavar="NAME", show_default="its own", help="Model name in API responses."
    )
    output_format: str | None = option(
        metavar="NAME",
        show_default="by the chat template",
        help="Format of the model's reasoning and tool calls, such as hermes or mistral.",
    )
    context_policy: ContextPolicy = choice_option(
        get_args(ContextPolicy),
        "For prompts longer than the context: refuse (status 400, on which agents compact), or "
        "slide (evict the oldest tokens).",
        default="refuse",
    )
    prompt_rules: str = option(
        metavar="RULES",
        type=checked_type(_parse_rules),
        default="default",
        help=f"Rules that change prompts so that more of them is reused: {_RULE_NAMES}; with "
        "commas, -NAME to switch one off, or none or all.",
    )
    alignment: AlignmentMode = choice_option(
        get_args(AlignmentMode),
        "Reuse of earlier prompts: exact (the common prefix only), or in_place (also equal text "
        "after a difference; not exact). A request can override it.",
        default="exact",
    )
    min_saved: int = option(
        metavar="N",
        type=click.IntRange(0),
        default=256,
        help="Minimum prompt tokens that alignment in place must save over exact reuse; otherwise "
        "reuse is exact.",
    )
    reread: int = option(
        metavar="N",
        type=click.IntRange(0),
        default=16,
        help="Maximum tokens to evaluate again after each edit in place.",
    )
    reread_share: float = option(
        metavar="SHARE",
        type=FiniteRange(0, 1),
        default=0.05,
        help="Limit on re-evaluation in place: stop once this share of the prompt's tokens is "
        "evaluated, new ones included. --reread tokens in total are always allowed. 1: no limit.",
    )
    speculate: bool = SPECULATE_OPTION
    grace: float = option(
        metavar="SECONDS",
        type=FiniteRange(0, 3600),
        default=10.0,
        help="Time for running requests to finish at shutdown.",
    )
    quiet: bool = option("-q", is_flag=True, help="Print errors only.")

    def require_api_keys_if_exposed(self) -> None:
        """Raise InvalidArgument if other machines or any web page can use it without API keys."""
        if self.api_key_file is not None:
            return
        if self.host not in _LOOPBACK:
            raise InvalidArgument(
                f"{self.host} can be reached from other machines: set API keys with "
                "--api-key-file, or listen on 127.0.0.1"
            )
        if every := {ANY_ORIGIN, OPAQUE_ORIGIN}.intersection(self.allow_origin):
            raise InvalidArgument(
                f"--allow-origin {every.pop()} lets every web page read and change all sessions: "
                "set API keys with --api-key-file, or name the origins"
            )

    def is_for_one_user(self) -> bool:
        """Whether only this machine reaches the server, by its own names and without API keys."""
        return self.host in _LOOPBACK and self.api_key_file is None and not self.allow_host

    def require_secret(self) -> None:
        """Raise InvalidArgument if --api-key-file is given without --secret-file."""
        if self.api_key_file is not None and self.secret_file is None:
            raise InvalidArgument(
                "--api-key-file with an object store needs --secret-file: session owners are "
                "derived from a secret that all servers share. Make one, for example with `openssl "
                "rand -hex 32 > secret`"
            )

    def load(self) -> "Model":
        model = self.memory.load(progress=not self.quiet)
        if self.output_format is not None:
            model.renderer.choose_output_format(self.output_format)
        return model

    def session_settings(self, model: "Model") -> dict[str, Any]:
        """Return the settings of the sessions that a server creates.

        Raises InvalidArgument if no chat fits in a session, or if a full session needs more than
        the memory for all sessions: requests without a limit would be refused.
        """
        self.memory.require_room_for_chat(model)
        settings = self.memory.settings(model)
        budget, needed = _session_size(model, settings)
        if needed <= self.max_bytes:
            return settings
        fitting_budget = _largest_budget(model, settings, budget, self.max_bytes)
        hint = f", or --max-kv-size {fitting_budget} or less" if fitting_budget else ""
        raise InvalidArgument(
            f"a session of {budget:,} tokens needs up to {format_size(needed)}, and --memory is "
            f"{format_size(self.max_bytes)}: use --memory {format_size(needed)} or more{hint}"
        )

    def alignment_options(self) -> "AlignmentOptions":
        from kvkeep.session.alignment import AlignmentOptions

        counts = (self.min_saved, self.reread, self.reread_share)
        return AlignmentOptions(self.alignment, *counts)

    def speculation_options(self) -> "SpeculationOptions":
        from kvkeep.session.drafts import SpeculationOptions

        return SpeculationOptions(self.speculate)

    def uses_prefix_cache(self) -> bool:
        return uses_prefix_cache(self.memory, self.prefix_cache)


def _session_size(model: "Model", settings: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens and bytes of a full session. settings: arguments of `Model.session`."""
    from kvkeep.engine.memory_bound import max_session_bytes

    session = model.session(**settings)
    return session.max_kv_size, max_session_bytes(session, None)


def _largest_budget(model: "Model", settings: dict[str, Any], limit: int, max_bytes: int) -> int:
    """Return the largest budget below `limit` whose full session fits in `max_bytes`, or 0."""

    def size(budget: int) -> int:
        try:
            return _session_size(model, {**settings, "max_kv_size": budget})[1]
        except InvalidArgument:  # too few tokens for the policy
            return 0

    largest = bisect_right(range(1, limit), max_bytes, key=size)
    return largest if largest and size(largest) else 0


def require_server_packages() -> None:
    """Raise InvalidArgument if the packages of the server extra are missing."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InvalidArgument(
            f"kvkeep serve needs {error.name}: pip install 'kvkeep[server]'"
        ) from None
