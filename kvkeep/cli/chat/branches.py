"""Branches of a chat, and the names of their sessions."""

import re
from collections.abc import Iterator
from itertools import count

from kvkeep.cli.output import format_mb, plural
from kvkeep.errors import InvalidArgument
from kvkeep.session.conversation import Conversation

_FIRST_BRANCH = "main"
_MAX_NAME_LENGTH = 90  # characters of a session's name, before a number is appended


class Branches:
    """The branches of a chat: forks of one conversation, one of which is current."""

    def __init__(self, conversation: Conversation):
        self.current_name = _FIRST_BRANCH
        self.conversations = {_FIRST_BRANCH: conversation}

    @property
    def current(self) -> Conversation:
        return self.conversations[self.current_name]

    @property
    def other_names(self) -> list[str]:
        return [name for name in self.conversations if name != self.current_name]

    def create(self, name: str) -> None:
        """Fork the current branch and switch to the fork. name: "" for "branch-2" and so on."""
        if not name:
            numbered = (f"branch-{number}" for number in count(len(self.conversations) + 1))
            name = next(name for name in numbered if name not in self.conversations)
        if not re.fullmatch(r"[\w.-]+", name):
            raise InvalidArgument(f"a branch name must be one word; found {name!r}")
        if name in self.conversations:
            raise InvalidArgument(f"branch {name} already exists; /switch {name} opens it")
        self.conversations[name] = self.current.fork()
        self.current_name = name

    def switch(self, name: str) -> None:
        """Make a branch current. Raises InvalidArgument if there is none of that name."""
        if name not in self.conversations:
            raise InvalidArgument(
                f"there is no branch {name!r}; the branches are {', '.join(self.conversations)}"
            )
        self.current_name = name

    def lines(self) -> list[str]:
        """Return a line for each branch; a star marks the current one."""
        width, lines = max(map(len, self.conversations)), list[str]()
        for name, conversation in self.conversations.items():
            turns = plural(len(conversation.turns), "turn")
            tokens = plural(len(conversation.session.tokens), "token")
            cache = conversation.session.cache
            size = format_mb(cache.cells * cache.layout.cell_bytes)
            marker = "*" if name == self.current_name else " "
            lines.append(f"{marker} {name:<{width}}  {turns}, {tokens}, {size}")
        return lines


def branch_session_names(session: str, branch: str) -> Iterator[str]:
    """Yield names for the session of a branch; the caller takes the first unused one."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{session}-{branch}")[:_MAX_NAME_LENGTH]
    yield name
    yield from (f"{name}-{number}" for number in count(2))
