"""The configuration of a fleet, which its servers' processes receive."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvkeep.errors import InvalidArgument
from kvkeep.server.keys import ApiKeys

_MIN_SECRET = 32  # bytes of a secret's file
_NO_SECRET = bytes(32)


@dataclass(frozen=True)
class Setup:
    """The configuration of a server: the arguments of `load_model` and `kvkeep serve`, and more."""

    model: str
    dtype: str | None
    weights: str | None
    store: str  # URL
    secret: bytes
    settings: dict[str, Any]  # of sessions, without a calibration
    memory: int  # bytes of cells
    prefixes: bool  # whether prompts' prefixes are shared
    threads: int  # compute threads of each server
    lease: float  # seconds
    keys: ApiKeys
    hosts: tuple[str, ...]
    origins: tuple[str, ...]
    alias: str | None


@dataclass(frozen=True)
class Scale:
    """The bounds and parameters of autoscaling."""

    min_servers: int
    max_servers: int
    requests: int  # running requests per server that autoscaling aims at
    grace: float  # seconds that running requests have when a server is to stop


def read_secret(file: Path | None) -> bytes:
    """Return the 32-byte secret that all servers of a fleet share.

    Without a file it is zeros: then all who can write to the store are trusted. Raises
    InvalidArgument for a file that is too short.
    """
    if file is None:
        return _NO_SECRET
    content = file.read_bytes().strip()
    if len(content) < _MIN_SECRET:
        raise InvalidArgument(
            f"{file} holds {len(content)} bytes; a secret has {_MIN_SECRET} or more, as "
            "`openssl rand -hex 32` makes them"
        )
    return blake3(content, derive_key_context="kvkeep fleet secret, first form").digest()
