"""Listeners that are called when memory or a slot of an engine may have become free."""

from collections.abc import Callable


class Releases:
    """Ends of generations, deletions and other events after which a refused request may fit."""

    def __init__(self) -> None:
        self._listeners: dict[Callable[[], None], None] = {}

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Add a listener, from any thread; returns a function that removes it."""
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)

    def notify(self) -> None:
        """Call the listeners: in the engine's thread, after each event."""
        for listener in list(self._listeners):
            listener()
