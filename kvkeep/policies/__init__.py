"""Policies: what a session does when its budget is reached."""

from dataclasses import fields
from typing import Any, TypedDict

from kvkeep import validation
from kvkeep.cache import BITS, Bits
from kvkeep.compression.methods.base import Budget
from kvkeep.errors import InvalidArgument
from kvkeep.policies.archive import Archive
from kvkeep.policies.base import Policy
from kvkeep.policies.full import Full, SelfExtend
from kvkeep.policies.sliding import Shift, Sliding

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
    "largest_budgets",
    "make_policy",
]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Archive, Full, SelfExtend, Shift, Sliding)
}


class PolicySettings(TypedDict, total=False):
    """Settings of policies by name, for `Model.session`; None for the policy's default."""

    discard: int | None
    group: int | None
    window: int | None
    method: str | None
    budget: Budget | None
    ratio: float | None


def make_policy(name: str, max_kv_size: int, **settings: int | float | str | None) -> Policy:
    """Return the policy of a name; a setting that is None takes its default.

    Raises InvalidArgument for an unknown name, a setting that the policy does not have, or a number
    out of range.
    """
    policy_class: Any = POLICIES[validation.one_of("policy", name, sorted(POLICIES))]
    chosen = {key: value for key, value in settings.items() if value is not None}
    settings_by_policy = {key: {field.name for field in fields(POLICIES[key])} for key in POLICIES}
    for setting in chosen:
        if setting not in settings_by_policy[name]:
            others = [key for key, names in settings_by_policy.items() if setting in names]
            public_names = {*PolicySettings.__annotations__, "keep", "max_kv_size"}
            known = public_names & settings_by_policy[name]
            raise InvalidArgument(
                f'policy "{name}" has no setting {setting!r}; '
                + (f"it is a setting of {', '.join(others)}; " if others else "")
                + f'"{name}" has {", ".join(sorted(known))}'
            )
    policy: Policy = policy_class(max_kv_size, **chosen)
    return policy


def largest_budgets(trained_length: int) -> dict[str, int]:
    """Return the largest budget of each policy, with its default settings.

    trained_length: for how many positions the model was trained.
    """
    size = max(trained_length, 32)  # an archive, which divides it, takes no less
    return {name: policy(size).max_budget(trained_length) for name, policy in POLICIES.items()}


def checked_bits(policy: Policy | str, bits: Bits) -> Bits:
    """Return the bits of cells, checked for a policy (or its name).

    Raises InvalidArgument for unknown bits, for `kv` with `far`, and for `far` if the policy has no
    cells outside a window.
    """
    name = policy if isinstance(policy, str) else policy.name
    for option, value in (("kv_bits", bits.kv), ("far_bits", bits.far)):
        if value is not None and not (isinstance(value, str) and value in BITS):
            known = ", ".join(f'"{bits_name}"' for bits_name in BITS)
            raise InvalidArgument(f"{option} must be one of {known}; found {value!r}")
    if bits.kv and bits.far:
        raise InvalidArgument(
            "kv_bits applies to all cells, far_bits to all but the window's: use only one of them"
        )
    if bits.far and name == Full.name:
        raise InvalidArgument(
            f'far_bits applies to cells outside a window, and policy "{name}" has none: use kv_bits'
        )
    return bits
