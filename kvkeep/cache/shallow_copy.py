"""Shallow copies of plain objects."""

from typing import TypeVar

_Object = TypeVar("_Object")


def shallow_copy(original: _Object) -> _Object:
    """Return a new object with the same attributes, all of which are in `__dict__`.

    Faster than `copy.copy`, which goes through the pickle protocol: sessions are copied once for
    each token.
    """
    copied = object.__new__(type(original))
    copied.__dict__.update(original.__dict__)
    return copied
