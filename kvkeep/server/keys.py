"""API keys and the owners that they identify."""

import hashlib
import hmac
import secrets
from contextlib import suppress
from pathlib import Path

from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.storage.files.text import read_text_file

DEFAULT_OWNER = "0"  # the owner of everything on a server without keys
_MIN_KEY_LENGTH = 16  # characters of a key


class ApiKeys:
    """The accepted API keys. Without any, all requests have one owner.

    An owner is an HMAC of the key under a secret of this server (RFC 2104), so that names of
    folders and responses reveal nothing about keys.
    """

    def __init__(self, keys: tuple[str, ...] = (), secret: bytes = b""):
        self._secret = secret or secrets.token_bytes(32)
        self._owners = [self._digest(key) for key in keys]

    def owner(self, key: str | None) -> str | None:
        """Return the owner that a key identifies; None for a missing or unknown key."""
        if not self._owners:
            return DEFAULT_OWNER
        digest = self._digest(key or "")  # compared with all, each in constant time
        match_count = sum(hmac.compare_digest(owner, digest) for owner in self._owners)
        return digest if match_count and key is not None else None

    def _digest(self, key: str) -> str:
        return hmac.new(self._secret, key.encode(), hashlib.sha256).hexdigest()[:32]

    @classmethod
    def read(cls, file: Path | None, secret: bytes | Path) -> "ApiKeys":
        """Read a file with one key a line; empty lines and those that begin with # are skipped.

        secret: a fleet's secret, or the folder with the server's, so that owners stay the same
        after a restart. Raises InvalidArgument for a file without keys, or with a short key.
        """
        if file is None:
            return cls()
        lines = [line.strip() for line in read_text_file(file).splitlines()]
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if not keys:
            raise InvalidArgument(f"{file} has no keys: write one key per line")
        if any(len(key) < _MIN_KEY_LENGTH for key in keys):
            raise InvalidArgument(f"{file}: a key must have {_MIN_KEY_LENGTH} characters or more")
        return cls(keys, secret if isinstance(secret, bytes) else _read_or_create_secret(secret))


def _read_or_create_secret(folder: Path) -> bytes:
    file = folder / "secret"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            file.touch(0o600, exist_ok=False)
            file.write_bytes(secrets.token_bytes(32))
        secret = file.read_bytes()
    except OSError as error:
        raise StoreError(f"{file} cannot be used: {error.strerror or error}") from error
    if len(secret) != 32:
        raise StoreError(f"{file} is not a secret written by kvkeep: remove it")
    return secret
