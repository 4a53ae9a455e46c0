"""Tools that a client adds to a conversation, described where they came instead of before it.

Chat templates describe tools before all messages. A tool that comes later, such as of an MCP server
that starts slowly, would change the prompt from there on. So the tools that a conversation began
with stay in their place, and later ones are described in its messages.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from kvkeep.chat.messages import Chat, Message, TextPart, Tool, normalized
from kvkeep.chat.tool_schemas import tool_line

HEADING = "From here on these functions can be called, too:"


@dataclass(frozen=True)
class _ToolHistory:
    """The tools of a conversation. late: with the number of messages before each group of them."""

    first: tuple[Tool, ...]
    late: tuple[tuple[int, tuple[Tool, ...]], ...] = ()

    @property
    def by_name(self) -> dict[str, Tool]:
        groups = (self.first, *(tools for _, tools in self.late))
        return {tool.name: tool for tools in groups for tool in tools}


class LateTools:
    """The tools of the last conversations of all owners. Thread-safe.

    A conversation is known by its messages up to the first of a user.
    """

    def __init__(self, max_conversations: int = 100):
        self._max_conversations = max_conversations
        self._histories: OrderedDict[tuple[str, bytes], _ToolHistory] = OrderedDict()
        self._lock = threading.Lock()

    def place(self, owner: str, chat: Chat, remember: bool = True) -> Chat:
        """Return a conversation with its later tools in their places; the same if it has none.

        Tools that the client has removed stay described, but cannot be called. remember: False for
        a part of a conversation.
        """
        key = owner, _beginning(chat.messages)
        with self._lock:
            history = self._histories.get(key)
            if remember:
                history = _continued(history, chat)
                self._histories[key] = history
                self._histories.move_to_end(key)
                if len(self._histories) > self._max_conversations:
                    self._histories.popitem(last=False)
        return chat if history is None else _placed(chat, history)


def _listed(chat: Chat) -> tuple[Tool, ...]:
    return tuple(tool for tool in chat.tools if not tool.deferred)


def _beginning(messages: Sequence[Message]) -> bytes:
    """Return a digest of the messages up to the first of a user."""
    digest = blake2b(digest_size=16)
    for message in messages:
        digest.update(f"{message.role}\0{message.text}\0".encode(errors="surrogatepass"))
        if message.role == "user":
            break
    return digest.digest()


def _continued(history: _ToolHistory | None, chat: Chat) -> _ToolHistory:
    """Return the history after a request. It begins anew where it is not that of the request.

    So if nothing was answered yet, if a tool has changed, if most tools are new, or if messages
    before a later tool are gone.
    """
    listed, messages = _listed(chat), chat.messages
    begun = any(message.role == "assistant" for message in messages)
    if history is None or not history.first or not begun:
        return _ToolHistory(listed)
    known = history.by_name
    new = tuple(tool for tool in listed if tool.name not in known)
    has_changed = any(known.get(tool.name, tool) != tool for tool in listed)
    is_shorter = any(count > len(messages) for count, _ in history.late)
    if has_changed or is_shorter or 2 * len(new) > len(listed):
        return _ToolHistory(listed)
    if not new:
        return history
    answered = [index for index, message in enumerate(messages) if message.role != "assistant"]
    return replace(history, late=(*history.late, (answered[-1] + 1, new)))


def _placed(chat: Chat, history: _ToolHistory) -> Chat:
    by_name, listed = history.by_name, _listed(chat)
    if listed == history.first and not history.late:
        return chat
    deferred = tuple(tool for tool in chat.tools if tool.deferred)
    messages = list(chat.messages)
    for count, tools in reversed(history.late):
        if count <= len(messages):
            messages.insert(count, Message("user", (TextPart(_description(tools)),)))
        deferred += tuple(replace(tool, deferred=True) for tool in tools)
    tools, choice = (*history.first, *deferred), chat.choice
    callable_names = {tool.name for tool in chat.tools}
    if choice.mode != "none" and not callable_names.issuperset(by_name):
        names = [tool.name for tool in tools] if choice.names is None else choice.names
        choice = replace(choice, names=tuple(name for name in names if name in callable_names))
    return replace(chat, messages=normalized(messages), tools=tools, choice=choice)


def _description(tools: Sequence[Tool]) -> str:
    return "\n".join([HEADING, *map(tool_line, tools)])
