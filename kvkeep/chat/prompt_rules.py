"""Prompt rules: named changes of a conversation before its rendering, for prefix reuse.

Clients put text that differs with each session or request before text that stays the same, which
then misses the prefix cache. A rule drops or moves such text. It knows its exact form, and changes
no message that merely quotes it. Rules that are on by default drop only what says nothing to a
model; the others change what the model reads.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvkeep.chat.messages import Chat, Message, Part, TextPart, normalized
from kvkeep.errors import InvalidArgument

# Claude Code's first system block: pairs such as "cc_version=2.1.177; cch=36ee5;", for billing.
_BILLING_HEADER = re.compile(
    r"\s*x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\n]*;)+"
    r"(?:[ \t]*[\w.-]+=[^;\s]*(?=\n|\Z))?[ \t]*\n{0,2}"  # the last semicolon may be missing
)
_MAX_LINE = 200  # characters of a line that states only a date or an id
_BULLET = r"[ \t]*(?:[-*][ \t]+)?(?:\*\*)?"
_ID_LINE = re.compile(
    _BULLET + r"(?:session|conversation|thread|chat|request|message|trace|run)[ _-]?id(?:\*\*)?"
    r"[ \t]*[:=](?:\*\*)?[ \t]*[`\"']?[\w.:-]{4,}[`\"']?[ \t]*",
    re.IGNORECASE,
)
_DATE_LINE = re.compile(
    _BULLET + r"(?:<(current_?(?:date|time|datetime))>[^<>]*\d[^<>]*</\1>"
    r"|(?:(?:today['\u2019]s|(?:the )?current) (?:date(?:(?: and |/| ?& ?)time)?|time|datetime)"
    r"|conversation started)(?:\*\*)?[ \t]*(?:is\b|:).*\d.*"
    r"|today is .*\d.*)",
    re.IGNORECASE,
)
# What agents write before the first question: blocks of tags, or a message.
_CONTEXT_OPENING = re.compile(r"^<(system-reminder|environment_context)>\n", re.MULTILINE)
_CONTEXT_MESSAGE = "This is the Qwen Code. We are setting up the context for our chat."
_REMINDER_START, _REMINDER_END = "<system-reminder>", "</system-reminder>"


@dataclass(frozen=True)
class PromptRule:
    """A named change of conversations.

    default: whether it is on unless it is switched off. apply: returns the changed conversation, or
    the same object if there is nothing to change.
    """

    name: str
    description: str  # a sentence without the full stop
    default: bool
    apply: Callable[[Chat], Chat]


def apply_rules(chat: Chat, rules: Sequence[PromptRule]) -> tuple[Chat, tuple[str, ...]]:
    """Return a conversation changed by the rules, and the names of those that changed it."""
    applied = list[str]()
    for rule in rules:
        changed = rule.apply(chat)
        if changed is not chat:
            applied.append(rule.name)
        chat = changed
    return chat, tuple(applied)


def select_rules(selection: str) -> tuple[PromptRule, ...]:
    """Return the rules of a selection, in their fixed order.

    selection: a list with commas. A name switches a rule on, and a name after "-" switches it off;
    "default", "none" and "all" replace what is before them. The list begins with the default rules:
    "dates,-billing-header" is "default,dates,-billing-header". Raises InvalidArgument.
    """
    by_name = {rule.name: rule for rule in PROMPT_RULES}
    default_names = {rule.name for rule in PROMPT_RULES if rule.default}
    sets = {"default": default_names, "none": set[str](), "all": set(by_name)}
    selected = set(default_names)
    for entry in (entry.strip() for entry in selection.split(",")):
        name = entry.removeprefix("-")
        if entry in sets:
            selected = set(sets[entry])
        elif name not in by_name:
            raise InvalidArgument(
                f"prompt rules are {', '.join(by_name)}, or default, none or all, with commas "
                f"between them; found {entry!r:.100}"
            )
        elif entry.startswith("-"):
            selected.discard(name)
        else:
            selected.add(name)
    return tuple(rule for rule in PROMPT_RULES if rule.name in selected)


def without_billing_header(text: str) -> str:
    """Return a text without Claude Code's billing header at its beginning."""
    match = _BILLING_HEADER.match(text)
    return text[match.end() :] if match else text


def _drop_billing_header(chat: Chat) -> Chat:
    """Drop the header at the beginning of the first system message."""
    text = _system_text(chat)
    rest = without_billing_header(text)
    return chat if rest == text else _with_system_text(chat, rest)


def _drop_session_ids(chat: Chat) -> Chat:
    rest, id_lines = _split_lines(_system_text(chat), _ID_LINE)
    return _with_system_text(chat, rest) if id_lines else chat


def _move_dates(chat: Chat) -> Chat:
    """Move lines that state the date behind the last message that is not the model's.

    They come from the system message, and from the context that a client puts before the first
    question. Behind the last message they change nothing that is before it.
    """
    messages = list(chat.messages)
    later = [i for i, message in enumerate(messages) if i and message.role != "assistant"]
    last = later[-1] if later else 0
    if not messages or (last == 0 and messages[0].role != "user"):
        return chat
    rest, date_lines = _split_lines(_system_text(chat), _DATE_LINE)
    first = next((i for i, message in enumerate(messages) if message.role == "user"), last)
    parts = list(messages[first].parts)
    for index, part in enumerate(parts):
        if isinstance(part, TextPart):
            text, lines = _split_context(part.text)
            parts[index] = TextPart(text)
            date_lines += lines
    if not date_lines:
        return chat
    messages[first] = replace(messages[first], parts=tuple(parts))
    text = "\n".join(line.strip() for line in date_lines)
    if messages[last].role == "user":
        separator = "\n\n" if messages[last].parts else ""
        dated = (*messages[last].parts, TextPart(separator + text))
        messages[last] = replace(messages[last], parts=dated)
    else:
        messages.insert(last + 1, Message("user", (TextPart(text),)))
    moved = replace(chat, messages=normalized(messages))
    if rest != _system_text(chat):
        moved = _with_system_text(moved, rest)
    return chat if moved == chat else moved


def _split_context(text: str) -> tuple[str, list[str]]:
    """Return a user's text without the lines that date its context, and these lines.

    The context is in a block of tags that agents write, or the whole text of a message that begins
    as Qwen Code's.
    """
    if text.startswith(_CONTEXT_MESSAGE):
        return _split_lines(text, _DATE_LINE)
    kept, lines, position = list[str](), list[str](), 0
    for start, end in _context_blocks(text):
        rest, block_lines = _split_lines(text[start:end], _DATE_LINE)
        kept += [text[position:start], rest]
        lines += block_lines
        position = end
    return "".join([*kept, text[position:]]), lines


def _context_blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each block of tags that are alone in their lines.

    The time grows with the length of the text, also of one with many tags that are not closed.
    """
    position, unclosed = 0, set[str]()
    for opening in _CONTEXT_OPENING.finditer(text):
        tag = opening[1]
        if opening.start() < position or tag in unclosed:
            continue
        closing = re.compile(rf"\n</{tag}>$", re.MULTILINE).search(text, opening.end())
        if closing is None:  # nor is any later one closed
            unclosed.add(tag)
            continue
        yield opening.start(), (position := closing.end())


def _drop_reminders(chat: Chat) -> Chat:
    """Drop reminders from users' messages after the first, which has the project's instructions.

    A message of reminders alone is dropped, unless it is the last.
    """
    first = next((i for i, message in enumerate(chat.messages) if message.role == "user"), 0)
    last, messages, changed = len(chat.messages) - 1, list[Message](), False
    for index, message in enumerate(chat.messages):
        if message.role == "user" and index > first:
            parts = tuple(_without_reminders(part) for part in message.parts)
            stays = any(not isinstance(part, TextPart) or part.text.strip() for part in parts)
            if parts != message.parts and (stays or index < last):
                changed = True
                if not stays:
                    continue
                message = replace(message, parts=parts)
        messages.append(message)
    return replace(chat, messages=normalized(messages)) if changed else chat


def _without_reminders(part: Part) -> Part:
    """Return a part without the reminders that begin a line of its text and end one."""
    if not isinstance(part, TextPart) or _REMINDER_START not in part.text:
        return part
    text, kept, position = part.text, list[str](), 0
    while (start := text.find(_REMINDER_START, position)) >= 0:
        end = text.find(_REMINDER_END, start)
        if end < 0:
            break
        end += len(_REMINDER_END)
        begins_line = start == 0 or text[start - 1] == "\n"
        ends_line = end == len(text) or text[end] == "\n"
        kept.append(text[position:start] if begins_line and ends_line else text[position:end])
        while begins_line and ends_line and end < len(text) and text[end] == "\n":
            end += 1
        position = end
    return TextPart("".join([*kept, text[position:]]))


def _split_lines(text: str, pattern: re.Pattern[str]) -> tuple[str, list[str]]:
    """Return a text without the lines that match a pattern as a whole, and these lines."""
    kept, matching = list[str](), list[str]()
    for line in text.split("\n"):
        matches = len(line) <= _MAX_LINE and pattern.fullmatch(line)
        (matching if matches else kept).append(line)
    return "\n".join(kept), matching


def _system_text(chat: Chat) -> str:
    """Return the text at the beginning of the first message if it is a system message, or ""."""
    first = chat.messages[0] if chat.messages else Message("user")
    part = first.parts[0] if first.role == "system" and first.parts else None
    return part.text if isinstance(part, TextPart) else ""


def _with_system_text(chat: Chat, text: str) -> Chat:
    """Replace the text of `_system_text`. A system message that is empty then is dropped."""
    first, *rest = chat.messages
    parts = (*((TextPart(text),) if text else ()), *first.parts[1:])
    kept = [replace(first, parts=parts)] if parts or not rest else []
    return replace(chat, messages=normalized([*kept, *rest]))


LATE_TOOLS = "late-tools"
PROMPT_RULES = (
    PromptRule(
        "billing-header",
        "drops the line x-anthropic-billing-header that begins Claude Code's system text",
        True,
        _drop_billing_header,
    ),
    PromptRule(
        "session-ids",
        "drops lines of the system text that state only the id of a session or request",
        False,
        _drop_session_ids,
    ),
    PromptRule(
        "dates",
        "moves lines that state the date or time from the system text behind the last message",
        False,
        _move_dates,
    ),
    PromptRule(
        "reminders",
        "drops <system-reminder> blocks from user messages after the first",
        False,
        _drop_reminders,
    ),
    PromptRule(
        LATE_TOOLS,
        "describes tools that come in the middle of a conversation there, and not before it",
        False,
        lambda chat: chat,  # by `LateTools`, which knows the conversation's earlier requests
    ),
)
DEFAULT_RULES = select_rules("default")
