"""The followers of a generation: those of one request that wait until it is prefilled."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from kvkeep.engine.generation import Generation
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.usage import Reuse
from kvkeep.errors import Cancelled


class Followers:
    """Generations that wait for another one, the *first*, to prefill their common prompt."""

    def __init__(self, registry: SessionRegistry):
        self._registry = registry
        self._by_first: dict[Generation, Sequence[Generation]] = {}

    def __iter__(self) -> Iterator[Generation]:
        return chain.from_iterable(self._by_first.values())

    def add(self, first: Generation, followers: Sequence[Generation]) -> None:
        self._by_first[first] = followers

    def start(self, first: Generation) -> Iterator[Generation]:
        """Fork the prefilled session for each follower, and yield those that have started."""
        record, followers = first.record, self._by_first.pop(first, ())
        record.reserved_bytes //= 1 + len(followers)  # each fork reserves its own
        for follower in followers:
            if follower.cancelled:
                follower.fail_as_cancelled()
                follower.report_end()
                continue
            try:
                fork = self._registry.add(record.live.fork(), record.owner, named=False)
                self._registry.reserve(fork, follower.request.max_tokens)
            except Exception as error:
                follower.fail(error)
                follower.report_end()
                continue
            fork.step_aligned_tokens, fork.activity = record.step_aligned_tokens, "generating"
            fork.first_edit = record.first_edit
            fork.suggest_title(follower.request.title)
            follower.record = fork
            reuse = first.reuse if first.reuse.mode == "in_place" else Reuse()  # the same cells
            num_tokens = len(follower.request.prompt)
            follower.start(
                None, replace(reuse, tokens=num_tokens, source="session", session=record.name)
            )
            yield follower

    def fail(self, first: Generation) -> None:
        """Fail the followers of a generation that ended before its prompt was prefilled."""
        for follower in self._by_first.pop(first, ()):
            follower.fail(first.error or Cancelled("the prompt was not completely prefilled"))
            follower.report_end()
