"""Policies: what a session remembers when its budget is reached. One file, one policy."""

from dataclasses import fields
from typing import Any, TypedDict

from kvkeep import validation
from kvkeep.cache import BITS, Bits
from kvkeep.compression.methods.budget import Budget
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
    "PolicySettings",
    "SelfExtend",
    "Shift",
    "Sliding",
    "checked_bits",
    "longest",
    "make_policy",
]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Archive, Full, SelfExtend, Shift, Sliding)
}


class PolicySettings(TypedDict, total=False):
    """PolicySettings of policies by name, for `Model.session`; None for the policy's default."""

    discard: int | None
    group: int | None
    window: int | None
    method: str | None
    budget: Budget | None
    ratio: float | None


def make_policy(name: str, max_kv_size: int, **settings: int | float | str | None) -> Policy:
    """The policy of that name; a setting that is None is left at its default.

    Raises InvalidArgument for an unknown name, a setting that the policy does not have, or a
    number out of range.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    kind: Any = POLICIES[validation.one_of("policy", name, sorted(POLICIES))]
    for key in given:
        if key not in _settings(kind):
            having = [each.name for each in POLICIES.values() if key in _settings(each)]
            raise InvalidArgument(
                f'policy "{name}" has no setting {key!r}'
                + (f"; it is one of {', '.join(having)}" if having else "")
            )
    policy: Policy = kind(max_kv_size, **given)
    return policy


def longest(name: str, trained: int, **settings: int | float | str | None) -> int:
    """The largest budget that a policy can have for a model trained to `trained` positions.

    Raises as `make_policy`.
    """
    return make_policy(name, trained, **settings).longest(trained)


def _settings(kind: type[Policy]) -> list[str]:
    return [field.name for field in fields(kind)]


def checked_bits(policy: Policy | str, bits: Bits) -> Bits:
    """In how many bits a session of that policy, or of a policy of that name, keeps its cells.

    Raises InvalidArgument for unknown bits, for both at once, and where nothing is far.
    """
    name = policy if isinstance(policy, str) else policy.name
    for option, found in (("kv_bits", bits.kv), ("far_bits", bits.far)):
        if found is not None and not (isinstance(found, str) and found in BITS):
            known = ", ".join(f'"{each}"' for each in BITS)
            raise InvalidArgument(f"{option} must be one of {known}; found {found!r}")
    if bits.kv and bits.far:
        raise InvalidArgument(
            "kv_bits is of all cells and far_bits of all but the window's: give one of them"
        )
    if bits.far and name == Full.name:
        raise InvalidArgument(
            f'far_bits is of cells beyond a window, and policy "{name}" has none: use kv_bits'
        )
    return bits
