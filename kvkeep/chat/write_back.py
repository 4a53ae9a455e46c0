"""Histories in the tokens that the model sampled, where clients send answers back in other bytes.

The history is rendered a second time with marks in the place of these answers. The template's text
around the marks is encoded as ever; between, there are the sampled tokens. An answer is left as it
is rendered where the template does not write what the prompt of the answer had before it.
"""

import itertools
import re
import secrets
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from kvkeep.chat.messages import (
    Message,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.prefill import open_reasoning
from kvkeep.chat.rendered_calls import RenderedCall, parse_rendered_call
from kvkeep.chat.written import WrittenAnswer, tokens_digest
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.control_tokens import ChatText

# Random letters: no message has them, and no template changes them.
_MARK = "".join(secrets.choice(string.ascii_lowercase) for _ in range(16))
_MARK_PATTERN = re.compile(f"{_MARK}[a-j]{{6,}}(?:first|last)")  # see `_marks`
_CHANNEL_TURNS = ("<|start|>", "<|end|>", "<|call|>", "<|return|>")  # between messages in channels
_MAX_RENDERINGS = 4
PROBE_TOOL = Tool("kvkeeptool", "probe")


@dataclass(frozen=True)
class WrittenHistory:
    """A prompt's ids, how many of its answers are in sampled tokens, and these tokens."""

    ids: list[int]
    count: int
    num_tokens: int


class Render(Protocol):
    """Renders messages as those of a request.

    prompt: whether an answer's opening is at the end, None for as in the request.
    """

    def __call__(self, messages: Sequence[Message], prompt: bool | None = None) -> ChatText: ...


@dataclass(frozen=True)
class AnswerWriter:
    """Writes answers back into the history of one request."""

    codec: TextCodec
    output_format: OutputFormat
    render: Render

    def write_back(
        self,
        messages: Sequence[Message],
        found: Mapping[int, Sequence[WrittenAnswer]],
        plain: ChatText,
    ) -> WrittenHistory | None:
        """Return the history's ids with answers in sampled tokens; None if there are none.

        found: answers that say what a message says, by its index, the newest first. plain: the
        messages as they are rendered.
        """
        candidates = self._usable(found)
        for _ in range(_MAX_RENDERINGS):
            if not candidates:
                return None
            marked = list(messages)
            for index, answers in candidates.items():
                marked[index] = _marked(messages[index], answers[0].has_reasoning, index)
            try:
                sealed = self.render(marked).sealed
            except InvalidArgument:  # the template looks into the answers
                return None
            regions = self._regions(sealed, messages, candidates)
            if len(regions) < len(candidates):
                candidates = {index: candidates[index] for index in regions}
                continue
            pieces = _pieces(sealed, list(regions.values()))
            if not _are_in_order(pieces, plain.sealed):
                return None
            history = self._assemble(pieces, [(messages[i], candidates[i]) for i in regions])
            if isinstance(history, WrittenHistory):
                return history
            del candidates[list(regions)[history]]
        return None

    def turns_are_delimited(self) -> bool:
        """Whether control tokens set the turns of a conversation with `PROBE_TOOL` apart."""
        words = ("one", "two", "three", "four")
        one, two, three, four = (TextPart(f"kvkeep{word}") for word in words)
        call = ToolCall("kvkeep000", PROBE_TOOL.name, {"k": two.text})
        question, answer = Message("user", (one,)), Message("assistant", (four,))
        result = Message("tool", (ToolResult(call.id, (three,)),))
        for messages in (
            (question, Message("assistant", (two,)), Message("user", (three,)), answer),
            (question, Message("assistant", (call,)), result, answer),
        ):
            sealed = self.render(messages, prompt=False).sealed
            places = [sealed.find(f"kvkeep{word}") for word in words]
            for before, after in itertools.pairwise(places):
                if before < 0 or next(self._delimiters(sealed, before, after), None) is None:
                    return False
        return True

    def rendered_call(self) -> RenderedCall | None:
        """Return how the template writes a call of `PROBE_TOOL`; None if it is not JSON."""
        if self.output_format.channels:
            return None  # whose headers the constraint of reasoning writes
        question, answer = Message("user", (TextPart("-"),)), Message("assistant", (TextPart("-"),))
        call = ToolCall("kvkeep000", PROBE_TOOL.name, {"k": "-"})
        marked = _marked(Message("assistant", (call,)), False, 1)
        result = Message("tool", (ToolResult(call.id, (TextPart("-"),)),))
        sealed = self.render((question, marked, result, answer), prompt=False).sealed
        region = self._region(sealed, _unique_marks(sealed), 1, False, 0)
        if region is None:
            return None
        text = str(self.codec.unsealed(sealed[slice(*region)]))
        return parse_rendered_call(text, marked.calls[0], self.output_format)

    @cached_property
    def _opening(self) -> ChatText:
        """The template's text where an answer begins."""
        return self._opening_behind(Message("user", (TextPart("-"),)))

    @cached_property
    def _opening_behind_results(self) -> ChatText:
        """The template's text where an answer to results begins: none if their turn goes on."""
        user, call = Message("user", (TextPart("-"),)), ToolCall("kvkeep000", PROBE_TOOL.name, {})
        result = Message("tool", (ToolResult(call.id, (TextPart("-"),)),))
        return self._opening_behind(user, Message("assistant", (call,)), result)

    def _opening_behind(self, *messages: Message) -> ChatText:
        before, whole = (self.render(messages, prompt).sealed for prompt in (False, True))
        # Without it, some templates write another token at the end.
        pairs = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(before, whole, strict=False)
        )
        start = len(list(pairs))
        places = self.codec.control_places(whole, 0, len(whole))
        start = next((begin for begin, end, _ in places if begin < start < end), start)
        return self.codec.unsealed(whole[start:])

    def _usable(
        self, found: Mapping[int, Sequence[WrittenAnswer]]
    ) -> dict[int, list[WrittenAnswer]]:
        """Return the answers whose prompt ended as this template's prompts do."""
        in_reasoning = open_reasoning(self.output_format, self._opening) is not None
        result = {
            index: [
                answer
                for answer in answers
                if answer.has_reasoning == answers[0].has_reasoning
                and answer.starts_in_reasoning == in_reasoning
            ]
            for index, answers in found.items()
        }
        return {index: answers for index, answers in result.items() if answers}

    def _regions(
        self,
        sealed: str,
        messages: Sequence[Message],
        candidates: Mapping[int, Sequence[WrittenAnswer]],
    ) -> dict[int, tuple[int, int]]:
        """Return start and end of the answers in a marked history, by message."""
        regions, end = dict[int, tuple[int, int]](), 0
        unique_marks = _unique_marks(sealed)
        for index, answers in sorted(candidates.items()):
            text_first = not answers[0].has_reasoning and bool(messages[index].text.strip())
            before = messages[index - 1].role if index else "system"
            region = self._region(sealed, unique_marks, index, text_first, end, before)
            if region is not None:
                regions[index], end = region, region[1]
        return regions

    def _region(
        self,
        sealed: str,
        unique_marks: Set[str],
        index: int,
        text_first: bool,
        after: int,
        before: Role = "user",
    ) -> tuple[int, int] | None:
        """Return start and end of an answer behind a message of the role `before`, if clear."""
        first, last = _marks(index)
        if not {first, last} <= unique_marks:
            return None
        first_at = sealed.find(first, after)
        last_at = sealed.find(last, first_at)
        if min(first_at, last_at) < 0:
            return None
        if not self.output_format.channels and any(self._delimiters(sealed, first_at, last_at)):
            return None  # the template divides the answer
        start = self._start(sealed, first_at, after, self._opening.sealed)
        if start is None and before == "tool":
            start = self._start(sealed, first_at, after, self._opening_behind_results.sealed)
        end = next(self._delimiters(sealed, last_at, len(sealed)), None)
        if start is None or end is None or (text_first and self._has_text(sealed, start, first_at)):
            return None
        return start, end[0]

    def _start(self, sealed: str, first_at: int, after: int, opening: str) -> int | None:
        """Return where the prompt of an answer ended whose first mark is at `first_at`.

        opening: at the end of that prompt, sealed.
        """
        last_end = max((end for _, end in self._delimiters(sealed, after, first_at)), default=after)
        if not opening:
            return last_end
        start = sealed.rfind(opening, after, first_at) + len(opening)
        return start if start >= max(last_end, after + len(opening)) else None

    def _has_text(self, sealed: str, start: int, end: int) -> bool:
        """Whether there is text, other than markers of empty reasoning, between two places."""
        if self.output_format.channels:
            return False  # a header
        for begin, stop, _ in reversed(list(self.codec.control_places(sealed, start, end))):
            sealed, end = sealed[:begin] + sealed[stop:], end - (stop - begin)
        text = sealed[start:end]
        for markers in self.output_format.reasoning:
            for marker in (markers.start + markers.label, markers.end):
                text = text.replace(marker, "", 1)
        return bool(text.strip())

    def _delimiters(self, sealed: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of the control tokens that are none of an answer."""
        markers = self.output_format.control_markers
        if self.output_format.channels:
            markers -= frozenset(_CHANNEL_TURNS)
        for begin, stop, token in self.codec.control_places(sealed, start, end):
            if self.codec.control_text(token) not in markers:
                yield begin, stop

    def _assemble(
        self, pieces: Sequence[str], answers: Sequence[tuple[Message, Sequence[WrittenAnswer]]]
    ) -> WrittenHistory | int:
        """Return the ids, or the number of an answer of which it is not clear which one it is."""
        ids, num_tokens = self.codec.encode_sealed(pieces[0]), 0
        for number, (message, candidates) in enumerate(answers):
            answer = _chosen(message, candidates, ids)
            if answer is None:
                return number
            ids += [*answer.ids, *self.codec.encode_sealed(pieces[number + 1])]
            num_tokens += len(answer.ids)
        return WrittenHistory(ids, len(answers), num_tokens)


def _chosen(
    message: Message, candidates: Sequence[WrittenAnswer], prompt: Sequence[int]
) -> WrittenAnswer | None:
    """Return the answer that a message is; None if its reasoning may be another's."""
    if len(candidates) > 1 or candidates[0].has_reasoning:
        digest = tokens_digest(prompt)
        for is_it in (lambda a: a.prompt == digest, lambda a: a.has_call_ids_of(message)):
            if answer := next(filter(is_it, candidates), None):
                return answer
    newest = candidates[0]
    return newest if message.reasoning.strip() or not newest.reasoning else None


def _marks(index: int) -> tuple[str, str]:
    number = "".join(chr(ord("a") + int(digit)) for digit in f"{index:06}")
    return f"{_MARK}{number}first", f"{_MARK}{number}last"


def _unique_marks(sealed: str) -> Set[str]:
    """Return the marks that a rendering has once."""
    counts = Counter(_MARK_PATTERN.findall(sealed))
    return {mark for mark, count in counts.items() if count == 1}


def _marked(message: Message, has_reasoning: bool, index: int) -> Message:
    """Return a message with marks in its first and its last part, which may be one."""
    first, last = _marks(index)
    calls, has_text = message.calls, bool(message.text.strip())
    count = has_reasoning + has_text + len(calls)
    texts = [first] + [""] * (count - 1)
    texts[-1] += last
    parts: list[Part] = []
    if has_reasoning:
        parts.append(ReasoningPart(texts.pop(0)))
    if has_text:
        parts.append(TextPart(texts.pop(0) or message.text))
    for call, text in zip(calls, texts, strict=True):
        parts.append(replace(call, arguments={"k": text}) if text else call)
    return Message(message.role, tuple(parts))


def _pieces(sealed: str, regions: Sequence[tuple[int, int]]) -> list[str]:
    """Return what is around the regions."""
    starts = [0, *(end for _, end in regions)]
    ends = [*(start for start, _ in regions), len(sealed)]
    return [sealed[start:end] for start, end in zip(starts, ends, strict=True)]


def _are_in_order(pieces: Sequence[str], text: str) -> bool:
    """Whether the text is the pieces with other text between them."""
    first, *middle, last = pieces
    if not text.startswith(first):
        return False
    position = len(first)
    for piece in middle:
        position = text.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return text.endswith(last) and position <= len(text) - len(last)
