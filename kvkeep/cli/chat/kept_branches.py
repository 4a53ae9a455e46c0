"""The branches of a named chat besides the current one: each is saved as a session of its own."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvkeep.cli.keeper import Keeper
from kvkeep.cli.stderr import say
from kvkeep.cli.store import saved_sessions
from kvkeep.errors import KvkeepError, Locked
from kvkeep.session.conversation import CHAT, Conversation

_LONGEST = 90  # characters of a name, with room for a number


def branch_session_names(session: str, branch: str) -> Iterator[str]:
    """Names for the session of a branch, in the order in which to try them."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{session}-{branch}")[:_LONGEST]
    yield name
    yield from (f"{name}-{number}" for number in count(2))


@dataclass
class _Kept:
    name: str
    keeper: Keeper
    lock: ExitStack


class KeptBranches:
    """Sessions of branches that are not current, under locks that are held until `close`."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def save(
        self, session: str, others: Mapping[str, Conversation], notes: Mapping[str, Any]
    ) -> None:
        """Save each branch that changed since it was saved.

        session: the name of the chat. notes: kept beside each. Raises StoreError.
        """
        for branch, conversation in others.items():
            all_notes = {**notes, CHAT: conversation.notes}
            kept = self._kept.get(branch)
            if kept is None:
                self._kept[branch] = self._first(session, branch, conversation, all_notes)
                say(f"branch {branch} is saved as session {self._kept[branch].name}")
            else:
                kept.keeper.follow(conversation.session, all_notes)
                kept.keeper.save()

    def dismiss(self, branch: str) -> None:
        """Remove the session of a branch that is current, and saved as the chat itself."""
        kept = self._kept.pop(branch, None)
        if kept is not None:
            kept.lock.close()
            with suppress(KvkeepError, OSError):  # an older copy is left over
                saved_sessions().remove(kept.name)

    def names(self) -> dict[str, str]:
        """The session of each branch."""
        return {branch: kept.name for branch, kept in self._kept.items()}

    def close(self) -> None:
        for kept in self._kept.values():
            kept.lock.close()

    def _first(
        self, session: str, branch: str, conversation: Conversation, notes: dict[str, Any]
    ) -> _Kept:
        for name in branch_session_names(session, branch):
            with ExitStack() as lock:
                try:
                    place = lock.enter_context(saved_sessions().lock(name))
                except Locked:
                    continue
                if place.exists():
                    continue
                keeper = Keeper(conversation.session, place, f"session {name}", notes)
                keeper.write()
                return _Kept(name, keeper, lock.pop_all())
        raise AssertionError("there are names without end")
