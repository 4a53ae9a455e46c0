"""Policies: what a session remembers when its budget is reached. One file, one policy."""

import inspect
from typing import Any

from kvkeep.errors import InvalidArgument
from kvkeep.policies.base import Policy
from kvkeep.policies.full import Full
from kvkeep.policies.shift import Shift
from kvkeep.policies.sliding import Sliding

__all__ = ["POLICIES", "Full", "Policy", "Shift", "Sliding", "make_policy"]

POLICIES: dict[str, Any] = {policy.name: policy for policy in (Full, Shift, Sliding)}


def make_policy(name: str, max_kv_size: int, **settings: int | None) -> Policy:
    """The policy of that name; a setting that is None is left at its default.

    Raises InvalidArgument for an unknown name, a setting that the policy does not have, or a
    number out of range.
    """
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise InvalidArgument(f"policy must be one of {known}; found {name!r}")
    given = {key: value for key, value in settings.items() if value is not None}
    accepted = set(inspect.signature(POLICIES[name]).parameters)
    for key in given.keys() - accepted:
        raise InvalidArgument(f"policy {name!r} has no setting {key!r}")
    policy: Policy = POLICIES[name](max_kv_size, **given)
    return policy
