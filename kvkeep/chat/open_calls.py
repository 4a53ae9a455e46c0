"""The calls of a conversation that have no result so far, found in constant time."""

from collections import defaultdict, deque


class OpenCalls:
    """Open calls in their order. Several may have the same id, or the same name."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}  # by the call's number
        self._numbers = deque[int]()  # in each queue, numbers of calls that are closed are skipped
        self._by_id = defaultdict[str, deque[int]](deque)
        self._by_name = defaultdict[str, deque[int]](deque)
        self._count = 0

    def __contains__(self, call_id: str) -> bool:
        return self._first(self._by_id.get(call_id)) is not None

    def add(self, call_id: str, name: str = "") -> None:
        for queue in (self._numbers, self._by_id[call_id], self._by_name[name]):
            queue.append(self._count)
        self._ids[self._count] = call_id
        self._count += 1

    def close(self, call_id: str) -> None:
        """Close the first call with an id, if there is one."""
        number = self._first(self._by_id.get(call_id))
        if number is not None:
            del self._ids[number]

    def close_next(self, name: str = "") -> str:
        """Close the first call of a name, or else the first call. Returns its id, "" if none."""
        number = self._first(self._by_name.get(name))
        number = self._first(self._numbers) if number is None else number
        return "" if number is None else self._ids.pop(number)

    def _first(self, queue: deque[int] | None) -> int | None:
        """Return the first number in a queue of a call that is still open."""
        while queue and queue[0] not in self._ids:
            queue.popleft()
        return queue[0] if queue else None
