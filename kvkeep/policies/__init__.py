"""Policies: what a session remembers when its budget is reached. One file, one policy."""

import inspect
from collections.abc import Mapping
from typing import Any

from kvkeep.cache import BITS, Bits
from kvkeep.errors import InvalidArgument
from kvkeep.policies.archive import Archive
from kvkeep.policies.base import Policy
from kvkeep.policies.full import Full
from kvkeep.policies.self_extend import SelfExtend
from kvkeep.policies.shift import Shift
from kvkeep.policies.sliding import Sliding

__all__ = [
    "POLICIES",
    "Archive",
    "Full",
    "Policy",
    "SelfExtend",
    "Shift",
    "Sliding",
    "checked_bits",
    "longest",
    "make_policy",
]

POLICIES: dict[str, Any] = {
    policy.name: policy for policy in (Archive, Full, SelfExtend, Shift, Sliding)
}


def make_policy(name: str, max_kv_size: int, **settings: int | float | str | None) -> Policy:
    """The policy of that name; a setting that is None is left at its default.

    Raises InvalidArgument for an unknown name, a setting that the policy does not have, or a
    number out of range.
    """
    policy: Policy = _kind(name)(max_kv_size, **_given(name, settings))
    return policy


def checked_bits(name: str, kv_bits: str | None, far_bits: str | None) -> Bits:
    """In how many bits a session of that policy keeps its cells.

    Raises InvalidArgument for unknown bits, for both at once, and where nothing is far.
    """
    for option, bits in (("kv_bits", kv_bits), ("far_bits", far_bits)):
        if bits is not None and bits not in BITS:
            known = ", ".join(f'"{each}"' for each in BITS)
            raise InvalidArgument(f"{option} must be one of {known}; found {bits!r}")
    if kv_bits and far_bits:
        raise InvalidArgument(
            "kv_bits is of all cells and far_bits of all but the window's: give one of them"
        )
    if far_bits and _kind(name) is Full:
        raise InvalidArgument(
            f'far_bits is of cells beyond a window, and policy "{name}" has none: use kv_bits'
        )
    return Bits(kv_bits, far_bits)


def longest(name: str, trained: int, **settings: int | None) -> int:
    """The largest budget that a policy can have for a model trained to `trained` positions."""
    reach = getattr(_kind(name), "longest", None)
    return trained if reach is None else int(reach(trained, **_given(name, settings)))


def _kind(name: str) -> Any:
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise InvalidArgument(f"policy must be one of {known}; found {name!r}")
    return POLICIES[name]


def _given(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in settings.items() if value is not None}
    for key in given.keys() - set(inspect.signature(POLICIES[name]).parameters):
        raise InvalidArgument(f"policy {name!r} has no setting {key!r}")
    return given
