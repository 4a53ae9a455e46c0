"""A queue before the engine's admission, instead of an immediate refusal when it is full."""

import asyncio
import time
from asyncio import wrap_future
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvkeep.errors import NoRoom

T = TypeVar("T")
_RETRY_SECONDS = 0.05  # between attempts of the first in the queue


@dataclass
class AdmissionQueue:
    """Requests that wait until the engine has room, first come, first served for each owner.

    patience: seconds that a request waits before it is refused. max_waiting: requests of one owner
    that may wait; more are refused at once.
    """

    patience: float = 30.0
    max_waiting: int = 1024
    _locks: defaultdict[str, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    _waiting: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    async def admit(self, owner: str, submit: Callable[[], Future[T]]) -> T:
        """Submit a request, again if there is no room now. Raises NoRoom, and as `submit`."""
        if not self._waiting[owner]:
            try:
                return await _admitted(submit)
            except NoRoom as error:
                if error.retry_after == float("inf"):
                    raise
        if self._waiting[owner] >= self.max_waiting:
            raise NoRoom(
                f"too many requests: {self._waiting[owner]} are waiting; retry later",
                retry_after=self.patience,
            )
        self._waiting[owner] += 1
        try:
            return await self._admit_in_turn(owner, submit, time.monotonic() + self.patience)
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner], self._locks[owner]

    async def _admit_in_turn(
        self, owner: str, submit: Callable[[], Future[T]], deadline: float
    ) -> T:
        async with self._locks[owner]:
            while True:
                try:
                    return await _admitted(submit)
                except NoRoom as error:
                    if error.retry_after == float("inf") or time.monotonic() > deadline:
                        raise
                await asyncio.sleep(_RETRY_SECONDS)


async def _admitted(submit: Callable[[], Future[T]]) -> T:
    """Wait for a submission. If this is cancelled, its generations are, if it is a list of them."""
    submission = submit()
    try:
        return await wrap_future(submission)
    except asyncio.CancelledError:
        submission.add_done_callback(_cancel_generations)
        raise


def _cancel_generations(submission: Future[Any]) -> None:
    failed = submission.cancelled() or submission.exception() is not None
    result = None if failed else submission.result()
    for generation in result if isinstance(result, list) else ():
        generation.cancel()
