"""Branches of a chat, and the saving of those that are not current."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvkeep.cli.output import counted, megabytes, say
from kvkeep.cli.session_writer import SessionWriter
from kvkeep.cli.store import saved_sessions
from kvkeep.errors import InvalidArgument, KvkeepError, Locked
from kvkeep.session.conversation import CHAT, Conversation

FIRST = "main"


class Branches:
    """name: of the branch that is talked in; current: its conversation."""

    def __init__(self, conversation: Conversation):
        self.name = FIRST
        self._all = {FIRST: conversation}

    @property
    def current(self) -> Conversation:
        return self._all[self.name]

    @property
    def conversations(self) -> Mapping[str, Conversation]:
        return self._all

    @property
    def others(self) -> list[str]:
        return [name for name in self._all if name != self.name]

    def branch(self, name: str) -> None:
        """Begins a branch where the current one is, and goes there. Memory is shared."""
        name = name or self._free_name()
        if not re.fullmatch(r"[\w.-]+", name):
            raise InvalidArgument(f"a branch's name is one word; found {name!r}")
        if name in self._all:
            raise InvalidArgument(f"there is a branch {name} already; /switch {name} goes there")
        self._all[name] = self.current.fork()
        self.name = name

    def replace(self, conversation: Conversation) -> None:
        """The current branch goes on in another session."""
        self._all[self.name] = conversation

    def switch(self, name: str) -> None:
        if name not in self._all:
            known = ", ".join(self._all)
            raise InvalidArgument(f"there is no branch {name!r}; there are: {known}")
        self.name = name

    def lines(self) -> list[str]:
        """One for each branch, the current one marked."""
        width = max(map(len, self._all))
        return [
            f"{'*' if name == self.name else ' '} {name:<{width}}  {_size(conversation)}"
            for name, conversation in self._all.items()
        ]

    def _free_name(self) -> str:
        number = len(self._all) + 1
        while f"branch-{number}" in self._all:
            number += 1
        return f"branch-{number}"


def _size(conversation: Conversation) -> str:
    session = conversation.session
    turns = counted(len(conversation.turns), "turn")
    tokens = counted(len(session.tokens), "token")
    cells = session.cache.cells
    return f"{turns}, {tokens}, {megabytes(cells * session.cache.layout.cell_bytes)}"


_LONGEST = 90  # characters of a name, with room for a number


def branch_session_names(session: str, branch: str) -> Iterator[str]:
    """Names for the session of a branch, in the order in which to try them."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{session}-{branch}")[:_LONGEST]
    yield name
    yield from (f"{name}-{number}" for number in count(2))


@dataclass
class _SavedBranch:
    name: str
    writer: SessionWriter
    lock: ExitStack


class BranchWriter:
    """Sessions of branches that are not current, under locks that are held until `close`."""

    def __init__(self) -> None:
        self._kept: dict[str, _SavedBranch] = {}

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
                kept.writer.follow(conversation.session, all_notes)
                kept.writer.save()

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
    ) -> _SavedBranch:
        for name in branch_session_names(session, branch):
            with ExitStack() as lock:
                try:
                    place = lock.enter_context(saved_sessions().lock(name))
                except Locked:
                    continue
                if place.exists():
                    continue
                writer = SessionWriter(conversation.session, place, f"session {name}", notes)
                writer.write()
                return _SavedBranch(name, writer, lock.pop_all())
        raise AssertionError("there are names without end")
