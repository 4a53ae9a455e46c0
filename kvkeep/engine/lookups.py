"""Lookups of prompts in prefix caches, in other threads, while the engine computes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kvkeep.engine.generation import Generation
from kvkeep.runtime.worker import release_openmp_threads
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS

_MAX_LOOKUPS = 4  # at a time; what they have found is held until it is loaded


class PrefixLookups:
    """The lookups of prompts that are to be prefilled. Used in the engine's thread.

    Prompts that share a first block are not looked up at the same time: once the first of them is
    evaluated and stored, the others find its blocks.
    """

    def __init__(self, on_done: Callable[[], object]):
        """on_done: called at the end of each lookup, in another thread."""
        self._on_done = on_done
        self._executor = ThreadPoolExecutor(_MAX_LOOKUPS, "kvkeep-lookup")
        self._futures = dict[Generation, Future[None]]()

    def is_ready(self, generation: Generation) -> bool:
        """Whether a generation can be prefilled, or its lookup started, without waiting."""
        if generation in self._futures:
            return self._futures[generation].done()
        if not generation.needs_lookup:
            return True
        if len(self._futures) == _MAX_LOOKUPS:
            return False
        first_block = _first_block(generation)
        return all(_first_block(other) != first_block for other in self._futures)

    def start(self, generation: Generation) -> None:
        """Start the lookup of a generation that is ready for it."""
        future = self._executor.submit(partial(_look_up, generation.begin_lookup()))
        self._futures[generation] = future
        future.add_done_callback(lambda _: self._on_done())

    def finish(self, generation: Generation) -> None:
        """Raise the error of a generation's lookup, if there was one that failed."""
        future = self._futures.pop(generation, None)
        if future is not None:
            future.result()

    def discard(self, generation: Generation) -> None:
        """Cancel the lookup of an ended generation.

        A lookup that has started runs to its end; its result is dropped.
        """
        future = self._futures.pop(generation, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """Start no more lookups, and wait for none."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _first_block(generation: Generation) -> tuple[str, Sequence[int]]:
    """Return what two prompts must have in common to share a stored block."""
    return generation.record.owner, generation.request.prompt[:BLOCK_TOKENS]


def _look_up(lookup: Callable[[], None]) -> None:
    try:
        lookup()
    except Exception:
        raise
    except BaseException as error:  # raised in the engine's thread, it would end it
        raise RuntimeError(f"a lookup ended with {error!r}") from error
    finally:
        release_openmp_threads()  # rounded cells are decoded in it
