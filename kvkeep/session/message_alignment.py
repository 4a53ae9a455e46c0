"""A conversation whose session becomes other messages: its history, as a client rewrote it.

Messages are compared before tokens: an answer that says what one of the session says gets the
tokens that the session has of it, however the client wrote it. The rest is compared by tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from kvkeep import validation
from kvkeep.chat.messages import Chat, Message
from kvkeep.chat.openai_chat import parse_messages
from kvkeep.chat.renderer import RenderOptions
from kvkeep.chat.written import WrittenAnswers, prefix_digests, written_answer
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.session.aligning import align
from kvkeep.session.message_spans import reasoning_range
from kvkeep.session.turn_template import count_system_tokens

if TYPE_CHECKING:
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.alignment import AlignmentOptions, AlignmentReport
    from kvkeep.session.session import Session
    from kvkeep.session.spans import TokenRange
    from kvkeep.session.turn_template import TurnTemplate

_OWNER = ""  # of answers, which are those of one session
_ANSWER = re.compile(r"turn \d+ answer")
_SYSTEM_NAMES = ("opening", "system", "system text")
_NamedRange: TypeAlias = tuple[str, int, int]


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
    ranges = [spans[name] for name in spans if _ANSWER.fullmatch(name)]
    starts = sorted({start for start, _ in ranges})
    prompts = dict(zip(starts, prefix_digests(tokens, starts), strict=True))
    for start, end in ranges:
        ids, reader = tokens[start:end], renderer.new_reader()
        stream = TextStream(chat.codec, ())
        pieces = [piece for token in ids for piece in stream.push_pieces(token)]
        reader.push([*pieces, stream.flush()])
        reader.finish()
        answer = written_answer(
            *(reader.output, ids, renderer.output_format, chat.codec, ()),
            starts_in_reasoning=renderer.starts_in_reasoning,
        )
        if answer is not None:
            answer = replace(answer, prompt=prompts[start])
            answers.add(_OWNER, reader.output.message(), answer)
    return answers


def _name_turns(chat: ChatParts, messages: Sequence[Message]) -> None:
    """Name the turns in the session's text, as far as they are found there."""
    core = chat.session.core
    spans = chat.session.span_ranges
    old_names = [name for name in spans if name in _SYSTEM_NAMES or name.startswith("turn ")]
    names: dict[str, TokenRange] = {}
    try:
        for name, start, end in _turn_names(chat, messages):
            names[name] = core.token_range(start, end)
    finally:
        core.set_spans(names, removed=set(old_names))


def _turn_names(chat: ChatParts, messages: Sequence[Message]) -> Iterator[_NamedRange]:
    """Yield the names of the parts of turns, and their ranges."""
    tokens = list(chat.session.tokens)
    questions = [at for at, message in enumerate(messages) if message.role == "user"]
    if not questions:
        yield from _system_only_name(chat)
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
            yield from _system_names(chat, ranges, start)
            ids, offset = first_ids[start:], 0
        else:
            start = offset = _find(tokens, ids, end)
        if start < 0:
            break
        starts.append(start)
        ends.append(start + len(ids))
        question_start, question_end = ranges[-2]
        if question_start < question_end:
            yield f"turn {number} question", offset + question_start, offset + question_end
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(tokens)], strict=True), 1):
        yield f"turn {number}", start, end
        at = questions[number - 1] + 1
        later = questions[number] if number < len(questions) else len(messages)
        if [message.role for message in messages[at:later]] == ["assistant"]:
            yield from _answer_names(chat, number, ends[number - 1], end)


def _system_names(
    chat: ChatParts, ranges: "Sequence[TokenRange]", end: int
) -> Iterator[_NamedRange]:
    """Yield names of the tokens before the first turn. ranges: of the first turn's pieces."""
    if end:
        yield "opening" if chat.system is None else "system", 0, end
    if chat.system is not None and ranges[1][0] < ranges[1][1]:
        yield "system text", *ranges[1]


def _system_only_name(chat: ChatParts) -> Iterator[_NamedRange]:
    """Yield the system prompt's name if the session has nothing else, so that turns follow it."""
    if chat.system is not None:
        end = count_system_tokens(chat.codec, chat.system)
        if end == len(chat.session.tokens):
            yield "system", 0, end


def _answer_names(chat: ChatParts, turn: int, start: int, end: int) -> Iterator[_NamedRange]:
    """Yield names of an answer in a range that ends with the template's text after it."""
    closing, tokens = chat.codec.encode_sealed(chat.template.answer_end), chat.session.tokens
    if closing and tokens[end - len(closing) : end] == closing:
        end -= len(closing)
    if start >= end:
        return
    yield f"turn {turn} answer", start, end
    renderer = chat.session.core.model.renderer
    if found := reasoning_range(chat.codec, renderer, tokens[start:end]):
        yield f"turn {turn} reasoning", start + found[0], start + found[1]


def _find(tokens: Sequence[int], ids: Sequence[int], start: int) -> int:
    """Return where a run of ids begins at or after `start`; -1 if it is nowhere."""
    for at in range(start, len(tokens) - len(ids) + 1):
        if tokens[at] == ids[0] and tokens[at : at + len(ids)] == ids:
            return at
    return -1
