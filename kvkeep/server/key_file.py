"""The file with the API keys of a server: as SHA-256 hashes, or as text.

A hash is enough, and a slow one such as scrypt would protect no better: keys that `new_key` draws
have 256 random bits, which cannot be guessed, and each request would pay for it.
"""

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.atomic import write_atomic
from kvkeep.storage.files.text import read_text_file

MIN_KEY_LENGTH = 16  # characters of a key
_HASH_PREFIX = "sha256:"  # of a word that is a key's hash, in hexadecimal
_KEY_PREFIX = "kvkeep_"  # by which scanners for secrets know a key
_HASH = re.compile(rf"{_HASH_PREFIX}[0-9a-f]{{64}}")
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # a bearer token (RFC 6750)
_SETTING = re.compile(r"[a-z_]+=\S+")


@dataclass(frozen=True)
class KeyEntry:
    """One line of a key file. key_hash: as of `hash_key`. settings: the words behind the key."""

    key_hash: str
    settings: tuple[str, ...]
    is_hashed: bool  # in the file


def new_key() -> str:
    """Return a random key."""
    return _KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the word that stands for a key in a file."""
    return _HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


def read_key_file(file: Path) -> Sequence[KeyEntry]:
    """Read a key file; empty lines and those that begin with # are skipped.

    Raises InvalidArgument for a file without keys, with a short key, with a damaged hash, or with
    what is no key.
    """
    entries = _parse_entries(read_text_file(file), file)
    if not entries:
        raise InvalidArgument(f"{file} has no keys: add one with `kvkeep keys new {file}`")
    return entries


def add_key(file: Path, note: str | None = None) -> str:
    """Add a new key's hash to a file, which may be missing, and return the key.

    note: a comment above it. Raises InvalidArgument for a note of more than one line, and for a
    file that is no key file.
    """
    if note is not None and not note.isprintable():
        raise InvalidArgument(f"expected a note in one line; found {note!r}")
    file.touch(0o600)
    text = read_text_file(file)
    _parse_entries(text, file)
    separator = "" if not text or text.endswith("\n") else "\n"
    comment = "" if note is None else f"# {note}\n"
    key = new_key()
    write_atomic(file, f"{text}{separator}{comment}{hash_key(key)}\n".encode())
    return key


def hash_keys_in_place(file: Path) -> int:
    """Replace the keys in a file by their hashes, and return how many there were.

    Comments and settings stay. Raises as `read_key_file`.
    """
    count = sum(not entry.is_hashed for entry in read_key_file(file))
    lines = read_text_file(file).splitlines(keepends=True)
    if count:
        write_atomic(file, "".join(_with_hash(line) for line in lines).encode())
    return count


def _parse_entries(text: str, file: Path) -> list[KeyEntry]:
    lines = [line.strip() for line in text.splitlines()]
    return [_parse_entry(line, file) for line in lines if line and not line.startswith("#")]


def _parse_entry(line: str, file: Path) -> KeyEntry:
    key, *settings = line.split()
    if _HASH.fullmatch(key):
        return KeyEntry(key, tuple(settings), True)
    if key.startswith(_HASH_PREFIX):
        raise InvalidArgument(f"{file}: expected 64 hexadecimal digits behind {_HASH_PREFIX}")
    if len(key) < MIN_KEY_LENGTH:
        raise InvalidArgument(f"{file}: a key must have {MIN_KEY_LENGTH} characters or more")
    if not _KEY.fullmatch(key) or not all(map(_SETTING.fullmatch, settings)):
        raise InvalidArgument(
            f"{file}: not a key file: each line needs a key of ASCII letters, digits and -._~+/, "
            "and may have settings such as alignment=in_place behind it"
        )
    return KeyEntry(hash_key(key), tuple(settings), False)


def _with_hash(line: str) -> str:
    words = line.split(maxsplit=1)
    if not words or words[0].startswith(("#", _HASH_PREFIX)):
        return line
    return line.replace(words[0], hash_key(words[0]), 1)
