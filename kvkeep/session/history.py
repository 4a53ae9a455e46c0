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
    __slots__ = ("_end", "_length", "_numbers")

    def __init__(self, typecode: str, numbers: Iterable[int] = ()):
        """typecode: of `array`, such as "i" for 32 bits."""
        self._numbers = array(typecode, numbers)
        self._length = len(self._numbers)
        # The count of shared numbers, as a lock: a thread pops it while it appends, and another one
        # that finds none makes a copy instead of waiting.
        self._end = [self._length]

    def extended(self, numbers: Sequence[int]) -> "History":
        """Return a longer history: in place if this one reaches the shared end, else by a copy."""
        added_numbers = array(self._numbers.typecode, numbers)  # raises for non-numbers
        try:
            end = self._end.pop()
        except IndexError:
            return History(added_numbers.typecode, self.array() + added_numbers)
        if end != self._length:
            self._end.append(end)
            return History(added_numbers.typecode, self.array() + added_numbers)
        self._numbers.extend(added_numbers)
        self._end.append(end + len(added_numbers))
        return self._with_length(end + len(added_numbers))

    def first(self, count: int) -> "History":
        """Return the history of the first `count` numbers, or all; storage is shared."""
        return self._with_length(min(count, self._length))

    def _with_length(self, length: int) -> "History":
        history = History.__new__(History)
        history._numbers, history._end, history._length = self._numbers, self._end, length
        return history

    def replaced(self, start: int, end: int, numbers: Sequence[int]) -> "History":
        """Return a history with other numbers in place of `start ... end - 1`. Costs a copy."""
        copied = self.array()
        copied[start:end] = array(copied.typecode, numbers)
        return History(copied.typecode, copied)

    def last(self, count: int) -> "array[int]":
        """Return a copy of the last `count` numbers, or of all, as an array."""
        return self._numbers[max(0, self._length - count) : self._length]

    def array(self) -> "array[int]":
        """Return a copy as an array."""
        return self._numbers[: self._length]

    def tolist(self) -> list[int]:
        return self.array().tolist()

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
            return self._numbers[start:stop:step].tolist()
        if not -self._length <= index < self._length:
            raise IndexError(f"expected an index below {self._length}; found {index}")
        return self._numbers[index % self._length]

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
