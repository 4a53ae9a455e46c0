"""Where one file is, or is to be: a path of this machine, or a key in a store."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TypeVar, cast, overload

from kvkeep.errors import InvalidArgument, NoObject
from kvkeep.storage.objects.address import is_url, open_objects
from kvkeep.storage.objects.interface import Objects, Pieces, Stored
from kvkeep.storage.objects.reading import ObjectFile


class Status(Protocol):
    @property
    def st_size(self) -> int: ...
    @property
    def st_mtime(self) -> float: ...


class Place(Protocol):
    """What reading asks of a place; a `pathlib.Path` is one."""

    @property
    def stem(self) -> str: ...
    def exists(self) -> bool: ...
    def open(self, mode: Literal["rb"]) -> BinaryIO: ...
    def stat(self) -> Status:
        """Raises FileNotFoundError."""


class Target(Protocol):
    """What is written to that is no path: whole, or as it was."""

    def receive(self, pieces: Pieces) -> None:
        """Raises StoreError."""


@dataclass(frozen=True)
class Seen:
    """As `os.stat_result` has it. st_mtime: seconds since 1970."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True)
class ObjectPlace:
    """An object, there or not."""

    objects: Objects
    key: str

    def __str__(self) -> str:
        return f"{self.objects.url}/{self.key}"

    @property
    def stem(self) -> str:
        return self.key.rpartition("/")[2].rpartition(".")[0]

    def exists(self) -> bool:
        try:
            self.objects.look(self.key)
        except NoObject:
            return False
        return True

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        return opened(self.objects, self.objects.look(self.key))

    def stat(self) -> Seen:
        return status(self.objects, self.key)

    def receive(self, pieces: Pieces) -> None:
        self.objects.put_pieces(self.key, pieces)


P = TypeVar("P")


@overload
def place_of(place: str) -> Path | ObjectPlace: ...
@overload
def place_of(place: P) -> P: ...
def place_of(place: object) -> object:
    """A path, or the object that a URL names; what is a place already stays what it is.

    Raises InvalidArgument for a URL that names no object.
    """
    if not isinstance(place, str):
        return place
    if not is_url(place):
        return Path(place)
    store, _, key = place.rpartition("/")
    if not key or store.endswith(":/"):
        raise InvalidArgument(
            f"{place} names a store; expected an object in it, as {place}/a.kvkeep"
        )
    return ObjectPlace(open_objects(store), key)


def opened(objects: Objects, stored: Stored) -> BinaryIO:
    """An object as it was when it was looked at."""
    return cast(BinaryIO, io.BufferedReader(ObjectFile(objects, stored), 1 << 16))


def status(objects: Objects, key: str) -> Seen:
    """Raises FileNotFoundError."""
    try:
        found = objects.look(key)
    except NoObject as error:
        raise FileNotFoundError(str(error)) from error
    return Seen(found.size, found.modified)
