"""A conversation whose session becomes other messages: its history, as a client rewrote it.

Messages are compared before tokens: an answer that says what one of the session says gets the
tokens that the session has of it, however the client wrote it. The rest is compared by tokens.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvkeep import validation
from kvkeep.chat.messages import Chat, Message
from kvkeep.chat.openai_chat import parse_messages
from kvkeep.chat.renderer import RenderOptions
from kvkeep.chat.written import WrittenAnswers, written_answer
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.session.aligning import align
from kvkeep.session.message_spans import reasoning_range
from kvkeep.session.turn_template import count_system_tokens

if TYPE_CHECKING:
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.alignment import AlignmentOptions, AlignmentReport
    from kvkeep.session.session import Session
    from kvkeep.session.turn_template import TurnTemplate

_OWNER = ""  # of answers, which are those of one session
_ANSWER = re.compile(r"turn \d+ answer")


@dataclass
class ChatParts:
    """The parts of a conversation. system: its system prompt, which alignment replaces."""

    session: "Session"
    codec: "TextCodec"
    template: "TurnTemplate"
    system: str | None


def align_messages(
    chat: ChatParts,
    messages: Sequence[Mapping[str, Any]],
    options: "AlignmentOptions",
    progress: Callable[[int], None] | None = None,
) -> "AlignmentReport":
    """Make messages the text of a conversation's session; see `Conversation.align`."""
    is_list = isinstance(messages, Iterable) and not isinstance(messages, (str, bytes, Mapping))
    parsed = Chat(parse_messages(list(messages) if is_list else messages))
    roles = [message.role for message in parsed.messages]
    opens_answer = roles[-1] != "assistant" and set(roles) != {"system"}
    render_options = RenderOptions(continue_final=False, generation_prompt=opens_answer)
    find = partial(_answers(chat).find, _OWNER, restore_reasoning=False)
    prompt = chat.session.core.model.renderer.render(parsed, render_options, find)
    systems = [message.text for message in parsed.messages if message.role == "system"]
    system = systems[0] if systems else None
    progress = validation.progress(progress)
    min_keep = _count_tokens_to_keep(chat, system)
    report = align(chat.session.core, prompt.ids, options, progress, min_keep)
    with interrupts_deferred():
        chat.system = system
        _name_turns(chat, parsed.messages)
    return report


def _count_tokens_to_keep(chat: ChatParts, system: str | None) -> int:
    """Return how many tokens a system prompt has, if policies that keep tokens are to keep it.

    Not if the session was set not to keep its system prompt, nor in an archive that had none.
    """
    session = chat.session
    _, old_end = session.span_ranges.get("system", (0, 0))
    keeps = old_end <= session.keep if old_end else session.policy in ("sliding", "shift")
    return count_system_tokens(chat.codec, system) if system is not None and keeps else 0


def _answers(chat: ChatParts) -> WrittenAnswers:
    """Return the answers in the session, by what they say."""
    from kvkeep.session.streaming import TextStream  # imports the tokenizers

    answers, renderer = WrittenAnswers(), chat.session.core.model.renderer
    tokens, spans = chat.session.tokens, chat.session.span_ranges
    for start, end in (spans[name] for name in spans if _ANSWER.fullmatch(name)):
        ids, reader = list(tokens[start:end]), renderer.new_reader()
        stream = TextStream(chat.codec, ())
        for token in ids:
            reader.push(stream.push_pieces(token))
        reader.push([stream.flush()])
        reader.finish()
        answer = written_answer(
            *(reader.output, ids, renderer.output_format, chat.codec, tokens[:start]),
            starts_in_reasoning=renderer.starts_in_reasoning,
        )
        if answer is not None:
            answers.add(_OWNER, reader.output.message(), answer)
    return answers


def _name_turns(chat: ChatParts, messages: Sequence[Message]) -> None:
    """Name the turns in the session's text, as far as they are found there."""
    session, tokens = chat.session, list(chat.session.tokens)
    for name in list(session.span_ranges):
        if name in ("opening", "system", "system text") or name.startswith("turn "):
            session.core.set_span(name, None)
    questions = [at for at, message in enumerate(messages) if message.role == "user"]
    if not questions:
        _name_only_system(chat)
        return
    starts, ends = list[int](), list[int]()  # of prompts, each from its turn's first token
    for number, at in enumerate(questions, 1):
        text, end = messages[at].text, ends[-1] if ends else 0
        ids, ranges = chat.template.encode_later_turn(text)
        if number == 1:
            first_ids, ranges = chat.template.encode_first_turn(chat.system, text)
            if tokens[: len(first_ids)] != first_ids:
                return
            start = len(first_ids) - len(ids)
            start = start if first_ids[max(0, start) :] == ids else 0
            _name_system(chat, ranges, start)
            ids, offset = first_ids[start:], 0
        else:
            start = offset = _find(tokens, ids, end)
        if start < 0:
            break
        starts.append(start)
        ends.append(start + len(ids))
        question_start, question_end = ranges[-2]
        if question_start < question_end:
            name = f"turn {number} question"
            session.name(name, offset + question_start, offset + question_end)
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(tokens)], strict=True), 1):
        session.name(f"turn {number}", start, end)
        at = questions[number - 1] + 1
        later = questions[number] if number < len(questions) else len(messages)
        if [message.role for message in messages[at:later]] == ["assistant"]:
            _name_answer(chat, number, ends[number - 1], end)


def _name_system(chat: ChatParts, ranges: Sequence[tuple[int, int]], end: int) -> None:
    """Name the tokens before the first turn. ranges: of the pieces of the first turn."""
    if end:
        chat.session.name("opening" if chat.system is None else "system", 0, end)
    if chat.system is not None and ranges[1][0] < ranges[1][1]:
        chat.session.name("system text", *ranges[1])


def _name_only_system(chat: ChatParts) -> None:
    """Name the system prompt if the session has nothing else, so that turns follow it."""
    if chat.system is not None:
        end = count_system_tokens(chat.codec, chat.system)
        if end == len(chat.session.tokens):
            chat.session.name("system", 0, end)


def _name_answer(chat: ChatParts, turn: int, start: int, end: int) -> None:
    """Name a turn's answer in a range that ends with the template's text after it."""
    closing, tokens = chat.codec.encode_sealed(chat.template.answer_end), chat.session.tokens
    if closing and tokens[end - len(closing) : end] == closing:
        end -= len(closing)
    if start >= end:
        return
    chat.session.name(f"turn {turn} answer", start, end)
    renderer = chat.session.core.model.renderer
    if found := reasoning_range(chat.codec, renderer, tokens[start:end]):
        chat.session.name(f"turn {turn} reasoning", start + found[0], start + found[1])


def _find(tokens: Sequence[int], ids: Sequence[int], start: int) -> int:
    """Return where a run of ids begins at or after `start`; -1 if it is nowhere."""
    for at in range(start, len(tokens) - len(ids) + 1):
        if tokens[at] == ids[0] and tokens[at : at + len(ids)] == ids:
            return at
    return -1
