"""Conversations that began as one: each goes its own way, and one of them is talked in."""

import re
from collections.abc import Mapping

from kvkeep.cli.report import counted, megabytes
from kvkeep.errors import InvalidArgument
from kvkeep.session.conversation import Conversation

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
