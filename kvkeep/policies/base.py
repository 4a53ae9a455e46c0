"""What a policy is: the choice of segments, and what happens when the budget is reached."""

from typing import ClassVar, Protocol

from kvkeep.cache import KVCache


class Policy(Protocol):
    """Decides where new cells go. It holds the user's settings; the cells are in the cache.

    max_kv_size: the most cells held after any call.
    keep: how many of the first cells stay for ever.
    """

    name: ClassVar[str]
    max_kv_size: int
    keep: int

    def room(self, cache: KVCache) -> int | None:
        """How many more tokens the cache can take; None if there is no end."""

    def open(self, cache: KVCache, wanted: int) -> int:
        """Makes the last segment the one for the next tokens.

        Returns how many of the `wanted` (at least 1) go there in one step: at least 1.
        """

    def settings(self) -> dict[str, int]:
        """What `make_policy` needs, beside the name, to make this policy again."""

    def set_keep(self, cache: KVCache, keep: int) -> None:
        """Changes `keep` on a cache in use. Raises InvalidArgument before changing anything."""
