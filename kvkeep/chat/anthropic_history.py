"""The part of a conversation of Anthropic's API that its prompt has.

A summary stands for the messages before it, and a system message that clears itself is left out
once a user's message follows. Tools that change within an answer are described behind it, and not
as words of the model.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvkeep.chat.anthropic_tool_changes import CHANGE_TYPES, is_summary, last_changes, only_changes
from kvkeep.chat.fields import optional_mapping


class HistoryEntry(NamedTuple):
    """A message of the prompt. number, start: of it and its first block in the request."""

    number: int
    message: Any
    start: int = 0


def entries_in_force(messages: Sequence[Any]) -> list[HistoryEntry]:
    """Return the messages that the prompt has. Raises InvalidArgument for malformed changes."""
    entries = [HistoryEntry(number, message) for number, message in enumerate(messages)]
    return list(_with_answers_split(_without_cleared(_from_summary_on(entries))))


def message_role(message: Any) -> Any:
    return optional_mapping(message).get("role")


def _from_summary_on(entries: list[HistoryEntry]) -> list[HistoryEntry]:
    """Return the entries from the last summary on, with the changes of tools before it."""
    for entry in reversed(entries):
        if message_role(entry.message) != "assistant":
            continue
        content = _blocks(entry.message)
        start = max((n for n, block in enumerate(content) if is_summary(block)), default=None)
        if start is not None:
            summarized = [each.message for each in entries[: entry.number]]
            summarized.append({**entry.message, "content": content[: start + 1]})
            block = {**content[start], "tool_changes": last_changes(summarized)}
            message = {**entry.message, "content": [block, *content[start + 1 :]]}
            return [HistoryEntry(entry.number, message, start), *entries[entry.number + 1 :]]
    return entries


def _without_cleared(entries: list[HistoryEntry]) -> Iterator[HistoryEntry]:
    """Yield the entries without the texts that are for a user's turn before the last one alone."""
    of_users = [entry.number for entry in entries if message_role(entry.message) == "user"]
    last_of_user = max(of_users, default=0)
    for entry in entries:
        if entry.number < last_of_user and _clears_itself(entry.message):
            changes = only_changes(entry.message.get("content"))
            if changes:
                yield entry._replace(message={**entry.message, "content": changes})
        else:
            yield entry


def _with_answers_split(entries: Iterator[HistoryEntry]) -> Iterator[HistoryEntry]:
    """Yield the entries with changes of tools in an answer moved behind it, and behind results."""
    moved, last = list[Any](), 0
    for entry in entries:
        message, content = entry.message, optional_mapping(entry.message).get("content")
        if moved and message_role(message) == "user" and isinstance(content, (str, list)):
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            start = -len(moved)
            entry = HistoryEntry(entry.number, {**message, "content": [*moved, *blocks]}, start)
        elif moved:
            yield HistoryEntry(last, {"role": "user", "content": moved})
        moved, last = [], entry.number
        if message_role(message) == "assistant" and (moved := only_changes(content)):
            rest = [block for block in _blocks(message) if not _is_change(block)]
            if not rest:
                continue
            entry = entry._replace(message={**message, "content": rest})
        yield entry
    if moved:
        yield HistoryEntry(last, {"role": "user", "content": moved})


def _is_change(block: Any) -> bool:
    return optional_mapping(block).get("type") in CHANGE_TYPES


def _clears_itself(message: Any) -> bool:
    """Whether a message's text is for the user's turn before it alone."""
    is_until_next: bool = optional_mapping(message).get("clear_at") == "next_user_message"
    return is_until_next and message_role(message) == "system"


def _blocks(message: Any) -> list[Any]:
    content = optional_mapping(message).get("content")
    return content if isinstance(content, list) else []
