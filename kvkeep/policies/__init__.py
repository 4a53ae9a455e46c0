"""Policies: what a session remembers when its budget is reached. One file, one policy."""

from collections.abc import Callable

from kvkeep.errors import InvalidArgument
from kvkeep.policies.base import Policy
from kvkeep.policies.full import Full
from kvkeep.policies.sliding import Sliding

__all__ = ["POLICIES", "Full", "Policy", "Sliding", "make_policy"]

POLICIES: dict[str, Callable[[int, int], Policy]] = {
    Full.name: lambda max_kv_size, keep: Full(max_kv_size),
    Sliding.name: Sliding,
}


def make_policy(name: str, max_kv_size: int, keep: int) -> Policy:
    """The policy of that name. Raises InvalidArgument for an unknown name or a bad number."""
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise InvalidArgument(f"policy must be one of {known}; found {name!r}")
    return POLICIES[name](max_kv_size, keep)
