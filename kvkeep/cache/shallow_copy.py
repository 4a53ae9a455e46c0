"""Copies of objects that hold the same things."""

from typing import TypeVar

_Any = TypeVar("_Any")


def shallow_copy(thing: _Any) -> _Any:
    """As `copy.copy` of what keeps all that it has in its `__dict__`, but at once.

    For what is copied for each token: `copy.copy` goes by way of pickling.
    """
    copied = object.__new__(type(thing))
    copied.__dict__.update(thing.__dict__)
    return copied
