"""A chat in a session: each turn renders and prefills only what is new."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvkeep import validation
from kvkeep.chat.output import OutputEvent, TextDelta
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.session.message_spans import reasoning_range
from kvkeep.session.rendering import (
    common_prefix_length,
    encode_pieces,
    overlap_length,
    placeholder_for,
    split_at_text,
)

if TYPE_CHECKING:
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.compaction import CompactionReport
    from kvkeep.session.sampling import Sampling
    from kvkeep.session.session import Session
    from kvkeep.session.spans import TokenRange
    from kvkeep.storage.snapshots.snapshot import Snapshot

CHAT_NOTES_KEY = "chat"  # the key of `Conversation.notes` in a snapshot
_ANSWER_PLACEHOLDER = placeholder_for()  # stands for any answer
_ANSWERED_TURN = (("user", "-"), ("assistant", _ANSWER_PLACEHOLDER))


def count_system_tokens(codec: "TextCodec", system: str) -> int:
    """Return how many of a chat's first tokens are its system prompt, with the template around it.

    Raises InvalidArgument if the template takes none, UnsupportedModel if there is none.
    """
    pieces = _first_turn_pieces(codec, system, placeholder_for(system))
    before_system, text, after_system = pieces[:3]
    try:
        system_only = _render(codec, ("system", system))
    except KvkeepError:
        system_only = ""
    # Some templates put it inside the first user turn: then it ends where the user's text begins.
    system_end = after_system
    if system_only.startswith(before_system + text) and "".join(pieces).startswith(system_only):
        system_end = system_only[len(before_system + text) :]
    # If it ends inside a word, its last token differs from that of the whole rendering.
    ids, _ = encode_pieces(codec, [before_system, text, system_end])
    return common_prefix_length(encode_pieces(codec, pieces)[0], ids)


def saved_system(notes: Mapping[str, Any]) -> str | None:
    """Return the system prompt in a snapshot's notes. Raises InvalidArgument if it is no text."""
    chat = notes.get(CHAT_NOTES_KEY, {})
    system = chat.get("system") if isinstance(chat, dict) else chat
    return None if system is None else validation.text("the snapshot's system prompt", system)


class Conversation:
    """A chat in a session: the tokens to prefill for each turn, and the spans of each turn.

    The text in the session is what the template would render of the whole conversation, but only
    its newest turn is ever rendered, so that each turn of an endless chat costs the same. Texts of
    the template are sealed (see `ControlTokens`): no text of a message can be a control token.

    Turns are spans of the session, which follow every edit: "system" and "turn 3" include the
    template's tokens around them ("opening" if the template writes something before the first turn
    without a system prompt); "system text", "turn 3 question" and "turn 3 answer" exclude them.
    No token is part text and part template (exceptions: see `encode_pieces`), so that a text span
    can be replaced by its name.

    codec: the model's tokenizer and chat template. system: the system prompt. speculate: whether
    answers are generated with speculation; see `Session.stream`.
    """

    speculate = False

    def __init__(
        self,
        session: "Session",
        codec: "TextCodec",
        eos_token_ids: tuple[int, ...],
        system: str | None,
    ):
        self.session = session
        self.codec = codec
        self._eos_token_ids = eos_token_ids
        self.system = system
        self._last_turn = max(self.turns, default=0)
        _render_first_turn(codec, system, "")  # raises if there is no template

    def fork(self) -> "Conversation":
        """Return the same conversation in a fork of the session."""
        fork = Conversation(self.session.fork(), self.codec, self._eos_token_ids, self.system)
        fork.speculate = self.speculate
        return fork

    @property
    def notes(self) -> dict[str, str | None]:
        """The conversation's part of a snapshot's notes, beside spans and tokens."""
        return {"system": self.system}

    @property
    def turns(self) -> list[int]:
        """The numbers of the turns; a deleted one leaves a gap."""
        return turn_numbers(self.session.span_ranges)

    @property
    def last_turn(self) -> int:
        """The number of the newest turn; 0 if there is none. Cheap at any length."""
        while self._last_turn and f"turn {self._last_turn}" not in self.session.span_ranges:
            self._last_turn -= 1
        return self._last_turn

    def begin_turn(self, question: str) -> list[int]:
        """Return the tokens to prefill so that the model answers: those not in memory yet.

        An answer that was cut off is closed first; a complete one has its end-of-turn token in
        memory already. An end token that is not the template's is removed from the session, unless
        a bounded session cannot be rewound.
        """
        tokens, spans = self.session.tokens, self.session.span_ranges
        if not tokens:
            return self._encode_first_turn(question)[0]
        opening, *rest = self._later_turn_pieces(question)
        _, system_end = spans.get("system", spans.get("opening", (0, None)))
        if system_end == len(tokens):  # no turn follows the system prompt
            return encode_pieces(self.codec, [opening, *rest])[0]
        closing_ids = self.codec.encode_sealed(self._answer_end)
        ids, _ = encode_pieces(self.codec, [self._answer_end + opening, *rest])
        if tokens[-1] in self._eos_token_ids and tokens[-1] != ids[0]:
            # An end token other than the template's: no turn followed it in training.
            with suppress(InvalidArgument):  # evicted states and tokens cannot be rewound
                self.session.rewind(1)
        return ids[overlap_length(self.session.tokens, ids[: len(closing_ids)]) :]

    def name_turn(self, question: str, num_prefilled: int, num_generated: int = 0) -> None:
        """Name a turn's spans. num_prefilled: its prompt's tokens. num_generated: its answer's."""
        end, previous_turn = len(self.session.tokens) - num_generated, self.last_turn
        ids, ranges = encode_pieces(self.codec, self._later_turn_pieces(question))
        prefilled = self.session.tokens[end - num_prefilled : end]
        turn_length = len(ids) if prefilled[-len(ids) :] == ids else num_prefilled
        start, turn = end - turn_length, f"turn {previous_turn + 1}"
        if previous_turn:
            # The end of an answer belongs to its turn, so that a turn can be deleted as a whole.
            name = f"turn {previous_turn}"
            self.session.name(name, self.session.span_ranges[name][0], start)
        elif num_prefilled == end and start:
            self._name_system(question, start)
        self.session.name(turn, start, end)
        self._last_turn = previous_turn + 1
        if turn_length == num_prefilled == end and prefilled != ids:
            # The template writes the first turn differently.
            ids, ranges = self._encode_first_turn(question)
        self._name_text(f"{turn} question", ranges[-2], end - len(ids))

    @property
    def is_open(self) -> bool:
        """Whether the newest turn has no answer yet."""
        turn, spans = f"turn {self.last_turn}", self.session.span_ranges
        return turn in spans and f"{turn} answer" not in spans

    def end_turn(self) -> None:
        """Name the span of the newest turn's answer, which is complete."""
        if not self.last_turn:
            return
        turn, tokens = f"turn {self.last_turn}", self.session.tokens
        start, answer_start = self.session.span_ranges[turn]
        end = len(tokens)
        self.session.name(turn, start, end)
        if end > answer_start and tokens[-1] in self._eos_token_ids:
            end -= 1
        self._name_text(f"{turn} answer", (answer_start, end))
        renderer = self.session.core.model.renderer
        if found := reasoning_range(self.codec, renderer, tokens[answer_start:end]):
            self._name_text(f"{turn} reasoning", found, answer_start)

    def compact(self, target: float = 0.5, **settings: Any) -> "CompactionReport":
        """Bring the session to `target` cells or fewer; see `Session.compact`.

        The newest turns, the system prompt and pins stay exact.
        """
        return self.session.compact(target, **settings)

    def undo(self) -> int:
        """Rewind the last turn; return its token count. Raises InvalidArgument if it cannot."""
        if not self.last_turn:
            raise InvalidArgument("there is no turn to remove")
        count = len(self.session.tokens) - self.session.span_ranges[f"turn {self.last_turn}"][0]
        self.session.rewind(count)
        return count

    def stream(
        self, question: str, max_tokens: int | None = None, sampling: "Sampling | None" = None
    ) -> Iterator[str]:
        """Prefill a user's message, then yield the text of the answer as it is generated.

        Without the model's reasoning, which `events` has too. The answer ends at an end token,
        after `max_tokens`, or as `sampling` says; a caller that stops iterating ends it there.
        sampling: None for the model's `default_sampling`.

        An interrupt or error during the prefill takes the message back, unless older tokens were
        evicted for it. Raises InvalidArgument and ContextFull as `Session.feed`.
        """
        with closing(self.events(question, max_tokens, sampling)) as events:
            for event in events:
                if isinstance(event, TextDelta):
                    yield event.text

    def events(
        self, question: str, max_tokens: int | None = None, sampling: "Sampling | None" = None
    ) -> Generator[OutputEvent, None, None]:
        """Answer a user's message as `stream`; yield the text and the reasoning as events."""
        validation.text("question", question)
        if self.is_open:
            self.end_turn()  # of an answer that was cut off
        ids, start = self.begin_turn(question), len(self.session.tokens)
        try:
            self.session.feed(ids)
        except (KeyboardInterrupt, KvkeepError):
            with suppress(InvalidArgument):  # evicted tokens cannot be rewound
                self.session.rewind(len(self.session.tokens) - start)
            raise
        self.name_turn(question, len(ids))
        sampling = sampling or self.session.core.model.default_sampling
        try:
            yield from self.read_answer(max_tokens, sampling)
        finally:
            self.end_turn()

    def read_answer(
        self, max_tokens: int | None, sampling: "Sampling"
    ) -> Generator[OutputEvent, None, None]:
        """Generate the newest turn's answer, whose prompt is evaluated; yield its events.

        An error is raised once the events of all tokens in the session were yielded.
        """
        from kvkeep.session.decoding import stream_pieces  # imports torch

        core = self.session.core
        reader = core.model.renderer.new_reader()
        end_ids, speculate = self._eos_token_ids, self.speculate
        stream = stream_pieces(core, max_tokens, sampling, end_ids, speculate)
        with closing(stream):
            try:
                for pieces in stream:
                    yield from reader.push(pieces)
            except GeneratorExit:
                raise
            except BaseException:
                yield from reader.finish()
                raise
        yield from reader.finish()

    def say(
        self, question: str, max_tokens: int | None = None, sampling: "Sampling | None" = None
    ) -> str:
        """Return the whole answer to a user's message; see `stream`."""
        return "".join(self.stream(question, max_tokens, sampling))

    def snapshot(self) -> "Snapshot":
        """Return a snapshot of the session with the system prompt in its notes."""
        return replace(self.session.snapshot(), notes={CHAT_NOTES_KEY: self.notes})

    def _name_system(self, question: str, end: int) -> None:
        """Name the tokens before the first turn: the first `end`."""
        self.session.name("opening" if self.system is None else "system", 0, end)
        if self.system is not None:
            _, ranges = self._encode_first_turn(question)
            self._name_text("system text", ranges[1])

    def _name_text(self, name: str, token_range: tuple[int, int], offset: int = 0) -> None:
        """Name a message's text, unless it is empty. offset: added to the range."""
        start, end = token_range
        if start < end:
            self.session.name(name, offset + start, offset + end)

    def _encode_first_turn(self, question: str) -> "tuple[list[int], list[TokenRange]]":
        return encode_pieces(self.codec, _first_turn_pieces(self.codec, self.system, question))

    @cached_property
    def _answer_end(self) -> str:
        """The text that the template writes after an answer."""
        rendered = _render(self.codec, *_ANSWERED_TURN)
        end = rendered.partition(_ANSWER_PLACEHOLDER)[2]
        return end if self._render_after_answer("-").startswith(end) else ""

    def _later_turn_pieces(self, question: str) -> tuple[str, str, str]:
        """Return a later turn up to where its answer begins: before, of and after the question."""
        placeholder, skipped_length = placeholder_for(question), len(self._answer_end)
        rendered = self._render_after_answer(question)[skipped_length:]
        with_placeholder = self._render_after_answer(placeholder)[skipped_length:]
        return split_at_text(rendered, with_placeholder, placeholder)

    def _render_after_answer(self, question: str) -> str:
        """Return what the template writes after an answer, up to the next question's answer."""
        rendered = _render(self.codec, *_ANSWERED_TURN, ("user", question))
        return rendered.partition(_ANSWER_PLACEHOLDER)[2]


def _first_turn_pieces(codec: "TextCodec", system: str | None, question: str) -> list[str]:
    """Return the first turn and everything before it, in pieces.

    The question is the last piece but one, and the system prompt's text, if there is one, the
    second. Either is "" if the template does not write it as one piece.
    """
    placeholder = placeholder_for(system, question)
    rendered = _render_first_turn(codec, system, question)
    with_placeholder = _render_first_turn(codec, system, placeholder)
    before_question, text, after_question = split_at_text(rendered, with_placeholder, placeholder)
    if system is None:
        return [before_question, text, after_question]
    before_system, system_text, rest = split_at_text(
        rendered, _render_first_turn(codec, placeholder, question), placeholder
    )
    between_length = len(rest) - len(text) - len(after_question)
    if not system_text or between_length < 0:
        return ["", "", before_question, text, after_question]
    return [before_system, system_text, rest[:between_length], text, after_question]


def _render_first_turn(codec: "TextCodec", system: str | None, question: str) -> str:
    system_messages = [] if system is None else [("system", system)]
    return _render(codec, *system_messages, ("user", question))


def _render(codec: "TextCodec", *messages: tuple[str, str]) -> str:
    """Render (role, content) pairs, up to where the answer begins if the last is of the user.

    A template that refuses system messages, such as Gemma 2's, gets the system prompt before the
    first user's text.
    """
    template_messages = [{"role": role, "content": content} for role, content in messages]
    add_generation_prompt = messages[-1][0] == "user"
    try:
        return codec.chat(template_messages, add_generation_prompt).sealed
    except InvalidArgument:
        if len(messages) < 2 or messages[0][0] != "system":
            raise
    (_, system), (role, text), *others = messages
    return _render(codec, (role, f"{system}\n\n{text}"), *others)


def turn_numbers(span_names: Iterable[str]) -> list[int]:
    """Return the numbers of the turns among span names, ascending."""
    suffixes = [name.removeprefix("turn ") for name in span_names if name.startswith("turn ")]
    return sorted(int(suffix) for suffix in suffixes if suffix.isdecimal())
