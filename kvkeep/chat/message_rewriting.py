"""Rewriting of messages that a chat template cannot render into ones that it can."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile

from kvkeep.chat.late_tools import HEADING
from kvkeep.chat.messages import (
    Message,
    Part,
    Place,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
    call_places,
    content_text,
    normalized,
)
from kvkeep.chat.output import arguments_text
from kvkeep.chat.template_traits import TemplateTraits
from kvkeep.chat.tool_schemas import tool_line

_BETWEEN_TEXTS = "\n\n"
TOOLS_UNKNOWN = "tools: described in the system text, as the chat template knows none"
TOOLS_REFUSED = "tools: described in the system text, as the chat template fails on their schemas"
_CALL_FORM = (
    'To call one, answer:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
)
_USER_FIRST = "an empty user message precedes the assistant's"
TEXT_LEFT_OUT = "messages: the chat template leaves out the text beside calls"


def _required(change: str) -> str:
    return f"messages: {change}, as the chat template requires"


USER_FIRST = _required(_USER_FIRST)


def rewrite_messages(
    messages: Sequence[Message], tools: Sequence[Tool], traits: TemplateTraits
) -> tuple[tuple[Message, ...], list[str]]:
    """Return messages that a template with these traits renders, and what was changed, in words.

    tools: those of the request. Calls and results that the template cannot render become text in
    the form of Hermes models: https://github.com/NousResearch/Hermes-Function-Calling. A template
    without a system role gets the system text before the first user's text.
    """
    warnings: list[str] = []
    result = [_with_errors_named(message) for message in messages]
    if tools and not traits.tools:
        result = _with_description(result, tools)
        warnings.append(TOOLS_UNKNOWN)
    has_calls = any(message.calls or message.results for message in result)
    takes_calls = traits.calls and (traits.calls_without_tools or bool(tools and traits.tools))
    if has_calls and not takes_calls:
        result = [_with_calls_as_text(message) for message in result]
        warnings.append("messages: calls and results are text, as the chat template knows none")
    elif has_calls:
        if not traits.parallel_calls:
            result = _one_call_each(result)
        if traits.text_with_calls == "dropped" and any(m.calls and m.text for m in result):
            warnings.append(TEXT_LEFT_OUT)
    for applies, rewrite, warning in (
        (
            takes_calls and not traits.lone_results,
            _lone_results_as_text,
            "a result without a call is a user's",
        ),
        (not traits.empty_answer, _without_empty_answers, "an empty answer is a space"),
        (not traits.system_midway, _without_later_system, "a later system message is a user's"),
        (not traits.system, _without_system, "the system text is part of the first user message"),
        (not traits.system_alone, _user_after_system, "an empty user message is at the end"),
        (not traits.assistant_first, _user_first, _USER_FIRST),
        (not traits.user_after_result, _text_in_result, "text after a result is part of it"),
    ):
        if applies and (rewritten := rewrite(list(normalized(result)))) is not None:
            result = rewritten
            warnings.append(_required(warning))
    return normalized(result), warnings


def _with_errors_named(message: Message) -> Message:
    """Say in the text of a failed call's result that it is an error; templates have no field."""
    if not any(part.is_error for part in message.results):
        return message
    parts = (
        _named_error(part) if isinstance(part, ToolResult) and part.is_error else part
        for part in message.parts
    )
    return Message(message.role, tuple(parts))


def _named_error(result: ToolResult) -> ToolResult:
    text = content_text(result.content).strip()
    if not text:
        return replace(result, content=(TextPart("(error)"),))
    if text.lower().startswith(("error", "(error")):
        return result
    return replace(result, content=(TextPart("Error: "), *result.content))


def tool_description(tools: Sequence[Tool]) -> str:
    """Describe tools, and how to call them, for a system message."""
    functions = "\n".join(map(tool_line, tools))
    return f"You may call these functions:\n{functions}\n\n{_CALL_FORM}"


def with_call_form(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
    """Return messages with the form of calls behind the first description of added tools.

    tools: those that are described in messages. A template without others writes no form.
    """
    descriptions = set(map(tool_line, tools))
    for number, message in enumerate(messages):
        for index, part in enumerate(message.parts):
            if not isinstance(part, TextPart) or HEADING not in part.text:
                continue
            lines = part.text.split("\n")
            for start, pair in enumerate(pairwise(lines), 1):
                if pair[0] == HEADING and pair[1] in descriptions:
                    described = takewhile(descriptions.__contains__, lines[start:])
                    end = start + len(list(described))
                    text = "\n".join([*lines[:end], _CALL_FORM, *lines[end:]])
                    parts = (*message.parts[:index], TextPart(text), *message.parts[index + 1 :])
                    changed = replace(message, parts=parts)
                    return (*messages[:number], changed, *messages[number + 1 :])
    return tuple(messages)


def _with_description(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    description = TextPart(tool_description(tools))
    if messages[0].role != "system":
        return [Message("system", (description,)), *messages]
    first = messages[0]
    between = (TextPart(_BETWEEN_TEXTS),) if first.parts else ()
    return [Message("system", (*first.parts, *between, description)), *messages[1:]]


def _with_calls_as_text(message: Message) -> Message:
    if message.role == "tool":
        return _results_as_text(message.results)
    return Message(message.role, tuple(_call_as_text(message.parts)))


def _results_as_text(results: Iterable[ToolResult]) -> Message:
    texts = [
        f"<tool_response>\n{content_text(result.content)}\n</tool_response>" for result in results
    ]
    return Message("user", (TextPart("\n".join(texts)),))


def _lone_results_as_text(messages: list[Message]) -> list[Message] | None:
    """Make results whose call is not before them users' texts; None if there are none."""
    result: list[Message] = []
    known_ids: set[str] = set()
    for message in messages:
        known_ids.update(call.id for call in message.calls)
        lone = [part for part in message.results if part.call_id not in known_ids]
        if lone:
            others = tuple(part for part in message.results if part.call_id in known_ids)
            result += [Message("tool", others)] if others else []
            message = _results_as_text(lone)
        result.append(message)
    return None if result == messages else result


def _without_empty_answers(messages: list[Message]) -> list[Message] | None:
    """Put a space into empty messages of the assistant; None if there are none."""
    result = [
        Message("assistant", (*message.parts, TextPart(" ")))
        if message.role == "assistant" and not message.text and not message.calls
        else message
        for message in messages
    ]
    return None if result == messages else result


def _call_as_text(parts: Iterable[Part]) -> Iterable[Part]:
    """Yield the parts with calls as text, each in lines of its own."""
    has_text = False
    for part in parts:
        if isinstance(part, ToolCall):
            call = f'{{"name": {json.dumps(part.name)}, "arguments": {arguments_text(part)}}}'
            start = "\n" if has_text else ""
            yield TextPart(f"{start}<tool_call>\n{call}\n</tool_call>")
        else:
            yield part
        has_text = has_text or not isinstance(part, ReasoningPart)


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Put each call into a message of its own, with its result behind it."""
    results = defaultdict[Place, list[Place]](list)  # by their call
    for result_place, call_place in call_places(messages).items():
        if len(messages[call_place[0]].calls) > 1:
            results[call_place].append(result_place)
    moved = {place for places in results.values() for place in places}
    rewritten: list[Message] = []
    for number, message in enumerate(messages):
        calls = message.calls
        if message.role == "tool":
            parts = enumerate(message.results)
            left = [part for index, part in parts if (number, index) not in moved]
            rewritten += [Message("tool", (part,)) for part in left]
        elif len(calls) < 2:
            rewritten.append(message)
        else:
            others = tuple(part for part in message.parts if not isinstance(part, ToolCall))
            for index, call in enumerate(calls):
                rewritten.append(Message("assistant", (*(others if index == 0 else ()), call)))
                rewritten += [
                    Message("tool", (messages[place[0]].results[place[1]],))
                    for place in results[number, index]
                ]
    return rewritten


def _without_later_system(messages: list[Message]) -> list[Message] | None:
    """Make system messages behind the first one users' messages; None if there are none."""
    if not any(message.role == "system" for message in messages[1:]):
        return None
    return [
        Message("user", (TextPart(f"<system>\n{message.text}\n</system>"),))
        if index and message.role == "system"
        else message
        for index, message in enumerate(messages)
    ]


def _without_system(messages: list[Message]) -> list[Message] | None:
    """Put the system text before the first user's text; None if there is none."""
    if messages[0].role != "system":
        return None
    return [Message("user", messages[0].parts), *messages[1:]]


def _user_after_system(messages: list[Message]) -> list[Message] | None:
    """Put an empty user message behind the system's, if that is all; else None."""
    is_alone = [message.role for message in messages] == ["system"]
    return [*messages, Message("user")] if is_alone else None


def _user_first(messages: list[Message]) -> list[Message] | None:
    """Put an empty user message before the assistant's, if that comes first; else None."""
    start = 1 if messages[0].role == "system" else 0
    if start == len(messages) or messages[start].role == "user":
        return None
    return [*messages[:start], Message("user"), *messages[start:]]


def _text_in_result(messages: list[Message]) -> list[Message] | None:
    """Append users' texts right behind results to the last result; None if there are none."""
    result: list[Message] = []
    for message in messages:
        last = result[-1] if result else None
        if message.role == "user" and last is not None and last.results:
            *before, tool_result = last.results
            content = (*tool_result.content, TextPart(_BETWEEN_TEXTS + message.text))
            appended = ToolResult(
                tool_result.call_id, content, tool_result.is_error, tool_result.kind
            )
            result[-1] = Message("tool", (*before, appended))
        else:
            result.append(message)
    return result if len(result) < len(messages) else None
