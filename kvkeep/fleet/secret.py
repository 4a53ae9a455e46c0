"""The secret that all servers of a fleet know."""

from pathlib import Path

from blake3 import blake3

from kvkeep.errors import InvalidArgument

_LEAST = 32  # bytes of a file
_NONE = bytes(32)


def read_secret(file: Path | None) -> bytes:
    """32 bytes; of no file: none that is secret, so that whoever may write to the store is trusted.

    Raises InvalidArgument for a file that holds too little to be secret.
    """
    if file is None:
        return _NONE
    content = file.read_bytes().strip()
    if len(content) < _LEAST:
        raise InvalidArgument(
            f"{file} holds {len(content)} bytes; a secret has {_LEAST} or more, as "
            "`openssl rand -hex 32` makes them"
        )
    return blake3(content, derive_key_context="kvkeep fleet secret, first form").digest()
