"""Branches of a chat, and the sessions that save those that are not current."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvkeep.cli.output import counted, megabytes, say
from kvkeep.cli.session_file import SessionWriter
from kvkeep.cli.store import saved_sessions
from kvkeep.errors import InvalidArgument, KvkeepError, Locked
from kvkeep.session.conversation import CHAT, Conversation

_FIRST = "main"


class Branches:
    """The branches of a chat: forks of one conversation, one of which is current.

    name: the name of the current branch.
    """

    def __init__(self, conversation: Conversation):
        self.name = _FIRST
        self._all = {_FIRST: conversation}

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
        """Fork the current branch and switch to the fork, which shares its memory.

        name: "" for a free one. Raises InvalidArgument for an invalid name or one in use.
        """
        if not name:
            numbered = (f"branch-{number}" for number in count(len(self._all) + 1))
            name = next(name for name in numbered if name not in self._all)
        if not re.fullmatch(r"[\w.-]+", name):
            raise InvalidArgument(f"a branch's name is one word; found {name!r}")
        if name in self._all:
            raise InvalidArgument(f"there is a branch {name} already; /switch {name} goes there")
        self._all[name] = self.current.fork()
        self.name = name

    def replace(self, conversation: Conversation) -> None:
        """Replace the conversation of the current branch."""
        self._all[self.name] = conversation

    def switch(self, name: str) -> None:
        """Make another branch current. Raises InvalidArgument if there is none of that name."""
        if name not in self._all:
            raise InvalidArgument(f"there is no branch {name!r}; there are: {', '.join(self._all)}")
        self.name = name

    def lines(self) -> list[str]:
        """Return a line for each branch; a star marks the current one."""
        width, lines = max(map(len, self._all)), list[str]()
        for name, conversation in self._all.items():
            turns = counted(len(conversation.turns), "turn")
            tokens = counted(len(conversation.session.tokens), "token")
            cache = conversation.session.cache
            size = megabytes(cache.cells * cache.layout.cell_bytes)
            mark = "*" if name == self.name else " "
            lines.append(f"{mark} {name:<{width}}  {turns}, {tokens}, {size}")
        return lines


_MAX_NAME = 90  # characters of a name, before a number is appended


def branch_session_names(session: str, branch: str) -> Iterator[str]:
    """Yield names for the session of a branch, in the order in which to try them."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{session}-{branch}")[:_MAX_NAME]
    yield name
    yield from (f"{name}-{number}" for number in count(2))


@dataclass
class _SavedBranch:
    session_name: str
    writer: SessionWriter
    lock: ExitStack


class BranchWriter:
    """The saved sessions of branches that are not current, locked until `close`."""

    def __init__(self) -> None:
        self._saved: dict[str, _SavedBranch] = {}

    def save(
        self, session: str, branches: Mapping[str, Conversation], notes: Mapping[str, Any]
    ) -> None:
        """Save each branch that changed since it was saved.

        session: the name of the chat. notes: saved beside each session. Raises StoreError.
        """
        for branch, conversation in branches.items():
            all_notes = {**notes, CHAT: conversation.notes}
            saved = self._saved.get(branch)
            if saved is None:
                self._saved[branch] = self._create(session, branch, conversation, all_notes)
                say(f"branch {branch} is saved as session {self._saved[branch].session_name}")
            else:
                saved.writer.follow(conversation.session, all_notes)
                saved.writer.save()

    def dismiss(self, branch: str) -> None:
        """Remove the session of a branch that is current now, and so saved as the chat itself."""
        saved = self._saved.pop(branch, None)
        if saved is not None:
            saved.lock.close()
            with suppress(KvkeepError, OSError):  # on failure, an outdated copy remains
                saved_sessions().remove(saved.session_name)

    def names(self) -> dict[str, str]:
        """Return the session name of each saved branch."""
        return {branch: saved.session_name for branch, saved in self._saved.items()}

    def close(self) -> None:
        for saved in self._saved.values():
            saved.lock.close()

    def _create(
        self, session: str, branch: str, conversation: Conversation, notes: dict[str, Any]
    ) -> _SavedBranch:
        """Save a branch under the first name that is free, and keep its lock."""
        for name in branch_session_names(session, branch):
            with ExitStack() as lock:
                try:
                    file = lock.enter_context(saved_sessions().lock(name))
                except Locked:
                    continue
                if file.exists():
                    continue
                writer = SessionWriter(conversation.session, file, f"session {name}", notes)
                writer.write()
                return _SavedBranch(name, writer, lock.pop_all())
        raise AssertionError("unreachable: the names are infinite")
