"""Who asks: API keys, and the owners that they stand for."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.storage.files.text import read_text_file

ANYBODY = "0"  # the owner where there are no keys
_LEAST = 16  # characters of a key


class Keys:
    """The keys that are let in; none: everybody is one owner.

    An owner is an HMAC of the key under a secret of this server (RFC 2104), so that names of
    folders and answers tell nothing of keys.
    """

    def __init__(self, keys: tuple[str, ...] = (), secret: bytes = b""):
        self._secret = secret or secrets.token_bytes(32)
        self._owners = [self._digest(key) for key in keys]

    @property
    def wanted(self) -> bool:
        """Whether a key must be given."""
        return bool(self._owners)

    def owner(self, key: str | None) -> str | None:
        """Whose key that is; None for nobody's. All keys are compared, each in constant time."""
        if not self.wanted:
            return ANYBODY
        digest = self._digest(key or "")
        found = None
        for owner in self._owners:
            if hmac.compare_digest(owner, digest):
                found = owner
        return None if key is None else found

    def _digest(self, key: str) -> str:
        return hmac.new(self._secret, key.encode(), hashlib.sha256).hexdigest()[:32]

    @classmethod
    def read(cls, file: Path | None, folder: Path) -> "Keys":
        """Of a file with a key in each line; empty lines and those that begin with # do not count.

        folder: where the server's secret is kept, so that owners stay who they are. Raises
        InvalidArgument for a file without a key, or with one that is too short to be secret.
        """
        return cls() if file is None else cls(_keys_in(file), _secret(folder))

    @classmethod
    def shared(cls, file: Path | None, secret: bytes) -> "Keys":
        """As `read`, with a secret that other servers have too: an owner is the same at each."""
        return cls() if file is None else cls(_keys_in(file), secret)


def _keys_in(file: Path) -> tuple[str, ...]:
    lines = [line.strip() for line in read_text_file(file).splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise InvalidArgument(f"{file} holds no key: write one in each line")
    if any(len(key) < _LEAST for key in keys):
        raise InvalidArgument(f"{file}: a key has {_LEAST} characters or more")
    return keys


def _secret(folder: Path) -> bytes:
    """The one that is kept in the folder; made where there is none yet."""
    file = folder / "secret"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            found = file.read_bytes()
            if len(found) != 32:
                raise StoreError(f"{file} is no secret of kvkeep's: remove it") from None
            return found
        with os.fdopen(descriptor, "wb") as opened:
            made = secrets.token_bytes(32)
            opened.write(made)
        return made
    except OSError as error:
        raise StoreError(f"{file} cannot be used: {error.strerror or error}") from error
