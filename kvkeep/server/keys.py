"""API keys, the owners that they identify, and how their prompts are aligned."""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.storage.files.text import read_text_file

DEFAULT_OWNER = "0"  # the owner of everything on a server without keys
_MIN_KEY_LENGTH = 16  # characters of a key
# The settings that may follow a key in its line, such as "KEY alignment=in_place reread=64".
_SETTINGS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "alignment": ("mode", str),
    "min_saved": ("min_saved", int),
    "reread": ("reread", int),
    "reread_share": ("reread_share", float),
}
_NO_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


class ApiKeys:
    """The accepted API keys. Without any, all requests have one owner.

    An owner is an HMAC of the key under a secret of this server (RFC 2104), so that names of
    folders and responses reveal nothing about keys.
    """

    def __init__(
        self,
        keys: tuple[str, ...] = (),
        secret: bytes = b"",
        alignment: Mapping[str, Mapping[str, Any]] = _NO_SETTINGS,
    ):
        """alignment: fields of `AlignmentOptions` by key, which replace the server's."""
        self._secret = secret or secrets.token_bytes(32)
        self._owners = [self._digest(key) for key in keys]
        self._alignment = {self._digest(key): fields for key, fields in alignment.items()}

    def alignment(self, owner: str, default: AlignmentOptions) -> AlignmentOptions:
        """Return how an owner's prompts are aligned. default: the server's options."""
        return replace(default, **self._alignment.get(owner, {}))

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

        Settings for the key's prompts may follow it: see `_SETTINGS`.

        secret: a fleet's secret, or the folder with the server's, so that owners stay the same
        after a restart. Raises InvalidArgument for a file without keys, or with a short key.
        """
        if file is None:
            return cls()
        lines = [line.strip() for line in read_text_file(file).splitlines()]
        entries = [line.split() for line in lines if line and not line.startswith("#")]
        keys = tuple(key for key, *_ in entries)
        if not keys:
            raise InvalidArgument(f"{file} has no keys: write one key per line")
        if any(len(key) < _MIN_KEY_LENGTH for key in keys):
            raise InvalidArgument(f"{file}: a key must have {_MIN_KEY_LENGTH} characters or more")
        alignment = {key: _read_settings(words, file) for key, *words in entries}
        secret = secret if isinstance(secret, bytes) else _read_or_create_secret(secret)
        return cls(keys, secret, alignment)


def _read_settings(words: list[str], file: Path) -> dict[str, Any]:
    """Return the fields of `AlignmentOptions` that the words behind a key set."""
    fields: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            field, parse = _SETTINGS[name]
            fields[field] = parse(value)
        except (KeyError, ValueError):
            expected = "alignment=exact or in_place, min_saved=N, reread=N or reread_share=SHARE"
            message = f"{file}: expected {expected} behind a key; found {word!r}"
            raise InvalidArgument(message) from None
    try:
        AlignmentOptions(**fields)
    except InvalidArgument as error:
        raise InvalidArgument(f"{file}: {error}") from error
    return fields


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
