"""API keys, the owners that they identify, and how their prompts are aligned."""

import fcntl
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.server.key_file import hash_key, read_key_file
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.storage.files.atomic import fsync_folder, make_folder

DEFAULT_OWNER = "0"  # the owner of everything on a server without keys
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

    Of keys only hashes are held. An owner is an HMAC of the key under a secret of this server
    (RFC 2104), so that names of folders and responses reveal nothing about keys. It is the same
    whether the key file has the key or its hash.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        secret: bytes = b"",
        alignment: Mapping[str, Mapping[str, Any]] = _NO_SETTINGS,
    ):
        """keys: as text. alignment: fields of `AlignmentOptions` by key, replacing the server's."""
        self._secret = secret or secrets.token_bytes(32)
        self._index_secret = secrets.token_bytes(32)
        self._alignment_by_key = dict[bytes, Mapping[str, Any]]()
        self._alignment_by_owner = dict[str, Mapping[str, Any]]()
        for key in keys:
            self._add(hash_key(key), alignment.get(key, {}))

    def alignment(self, owner: str, default: AlignmentOptions) -> AlignmentOptions:
        """Return how an owner's prompts are aligned. default: the server's options."""
        return replace(default, **self._alignment_by_owner.get(owner, {}))

    def owner(self, key: str | None) -> str | None:
        """Return the owner that a key identifies; None for a missing or unknown key."""
        if not self._alignment_by_key:
            return DEFAULT_OWNER
        fields = self._alignment_by_key.get(self._index(hash_key(key or "")))
        if fields is None or key is None:
            return None
        owner = hmac.new(self._secret, key.encode(), hashlib.sha256).hexdigest()[:32]
        self._alignment_by_owner[owner] = fields
        return owner

    def _add(self, key_hash: str, alignment: Mapping[str, Any]) -> None:
        self._alignment_by_key[self._index(key_hash)] = alignment

    def _index(self, key_hash: str) -> bytes:
        """Return a key of the table, which clients cannot predict.

        So the time that a lookup takes says nothing of how much of a guess is right.
        """
        return hmac.digest(self._index_secret, key_hash.encode(), "sha256")

    @classmethod
    def read(cls, file: Path | None, secret: bytes | Path) -> "ApiKeys":
        """Read a key file (`read_key_file`), whose settings are those of `_SETTINGS`.

        secret: a fleet's secret, or the folder with the server's, so that owners stay the same
        after a restart. Raises InvalidArgument for an invalid file.
        """
        if file is None:
            return cls()
        entries = read_key_file(file)
        alignment = [_read_settings(entry.settings, file) for entry in entries]
        result = cls(secret=secret if isinstance(secret, bytes) else _read_or_create_secret(secret))
        for entry, fields in zip(entries, alignment, strict=True):
            result._add(entry.key_hash, fields)
        return result


def _read_settings(words: Iterable[str], file: Path) -> dict[str, Any]:
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
    """Return the folder's secret. An empty file is one whose writer was killed."""
    file = folder / "secret"
    try:
        make_folder(folder)
        secret = file.read_bytes() if file.exists() else b""
        secret = secret or _create_secret(file)
    except OSError as error:
        raise StoreError(f"{file} cannot be used: {error.strerror or error}") from error
    if len(secret) != 32:
        raise StoreError(f"{file} is not a secret written by kvkeep: remove it")
    return secret


def _create_secret(file: Path) -> bytes:
    """Write a new secret, or return that of a server which wrote one meanwhile."""
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as stream:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        secret = stream.read()
        if not secret:
            secret = secrets.token_bytes(32)
            stream.write(secret)
            stream.flush()
            os.fsync(descriptor)
            fsync_folder(file.parent)
    return secret
