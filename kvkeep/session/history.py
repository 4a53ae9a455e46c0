"""Append-only sequences of token ids and serials that share storage."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload


class History(Sequence[int]):
    """An immutable sequence of numbers, one for each token; appending returns another history.

    It equals any sequence of the same numbers; a slice of it is a list. Histories that extend each
    other share storage, so that appending a token costs the same at any length.
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("_length", "_storage")

    def __init__(self, typecode: str, numbers: Iterable[int] = ()):
        """typecode: of `array`, such as "i" for 32 bits."""
        self._storage = _Storage(array(typecode, numbers))
        self._length = len(self._storage.numbers)

    def extended(self, numbers: Sequence[int]) -> "History":
        """Return a history with more numbers at its end."""
        return History._of(self._storage.extended(self._length, numbers), self._length, numbers)

    def first(self, count: int) -> "History":
        """Return a history of the first `count` numbers."""
        return History._of(self._storage, min(count, self._length))

    def replaced(self, start: int, end: int, numbers: Sequence[int]) -> "History":
        """Return a history with other numbers in place of `start ... end - 1`. Costs a copy."""
        copied = self.array()
        copied[start:end] = array(copied.typecode, numbers)
        return History._of(_Storage(copied), len(copied))

    def array(self) -> "array[int]":
        """Return a copy as an array."""
        return self._storage.numbers[: self._length]

    def tolist(self) -> list[int]:
        """Return a copy as a list."""
        return self.array().tolist()

    @classmethod
    def _of(cls, storage: "_Storage", length: int, more: Sequence[int] = ()) -> "History":
        history = cls.__new__(cls)
        history._storage, history._length = storage, length + len(more)
        return history

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step < 0:
                return self.array()[index].tolist()
            return self._storage.numbers[start:stop:step].tolist()
        if not -self._length <= index < self._length:
            raise IndexError(f"expected an index below {self._length}; found {index}")
        return self._storage.numbers[index % self._length]

    def __iter__(self) -> Iterator[int]:
        return iter(self.array())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, History):
            return self.array() == other.array()
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return len(other) == self._length and self.tolist() == list(other)
        return NotImplemented

    def __repr__(self) -> str:
        return repr(self.tolist())


class _Storage:
    """Numbers shared by histories. Only a history that reaches to their end appends in place."""

    __slots__ = ("_end", "numbers")

    def __init__(self, numbers: "array[int]"):
        self.numbers = numbers
        # The count of numbers, as a lock: a thread pops it while it appends, and another one that
        # finds none makes a copy instead of waiting.
        self._end = [len(numbers)]

    def extended(self, length: int, numbers: Sequence[int]) -> "_Storage":
        """Return storage with the first `length` numbers followed by others."""
        added = array(self.numbers.typecode, numbers)  # raises for anything that is no number
        end = self._take_end()
        if end == length:
            self.numbers.extend(added)
            self._end.append(length + len(added))
            return self
        if end is not None:
            self._end.append(end)
        return _Storage(self.numbers[:length] + added)

    def _take_end(self) -> int | None:
        try:
            return self._end.pop()
        except IndexError:
            return None
