"""The configuration of a fleet, which its servers' processes receive."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvkeep.errors import InvalidArgument
from kvkeep.server.keys import ApiKeys
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.drafts import SpeculationOptions
from kvkeep.storage.snapshots.codec import Codec
from kvkeep.types import ContextPolicy, DtypeName, WeightFormat

if TYPE_CHECKING:
    from kvkeep.model import Model

_MIN_SECRET_BYTES = 32  # in the file
_NO_SECRET = bytes(32)


@dataclass(frozen=True)
class ReplicaConfig:
    """The configuration of each server: the arguments of `load_model`, `kvkeep serve` and more."""

    model: str  # the name of the model to load
    dtype: DtypeName
    weight_format: WeightFormat | None  # None for that of the model's file
    output_format: str | None  # of answers, by name; None for that of the chat template
    store_url: str
    secret: bytes  # shared by all servers, from `read_secret`
    session_settings: dict[str, Any]  # defaults of new sessions, with their calibration
    memory_bytes: int  # limit on cells in memory
    share_prefixes: bool  # whether servers share prefilled prefixes of prompts
    threads: int  # compute threads of each server
    lease_seconds: float
    api_keys: ApiKeys
    hosts: tuple[str, ...]  # allowed Host headers, beside the local ones
    origins: tuple[str, ...]  # allowed Origin headers, beside the server's own
    alias: str | None  # the model's name in the APIs; None for the last part of `model`
    context_policy: ContextPolicy = "refuse"  # for prompts longer than the context
    compact_at: float | None = None  # the part of a session beyond which a turn compacts it first
    prompt_rules: str = "default"  # see `kvkeep.chat.prompt_rules.select_rules`
    # Of requests that do not choose one.
    alignment: AlignmentOptions = field(default_factory=AlignmentOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    codec: Codec = "exact"

    def load(self) -> "Model":
        """Load the model."""
        from kvkeep import load_model

        model = load_model(self.model, dtype=self.dtype, weights=self.weight_format)
        if self.output_format is not None:
            model.renderer.choose_output_format(self.output_format)
        return model


@dataclass(frozen=True)
class Autoscaling:
    """The bounds and parameters of autoscaling."""

    min_servers: int
    max_servers: int
    target_requests: int  # running requests per server that autoscaling aims at
    grace_seconds: float  # that running requests have when a server is to stop


def read_secret(file: Path | None) -> bytes:
    """Return the 32-byte secret that all servers of a fleet share.

    Without a file it is zeros: then all who can write to the store are trusted. Raises
    InvalidArgument for a file that is too short.
    """
    if file is None:
        return _NO_SECRET
    content = file.read_bytes().strip()
    if len(content) < _MIN_SECRET_BYTES:
        raise InvalidArgument(
            f"{file} has {len(content)} bytes; a secret needs at least {_MIN_SECRET_BYTES}. Make "
            "one with `openssl rand -hex 32`"
        )
    return blake3(content, derive_key_context="kvkeep fleet secret, first form").digest()
