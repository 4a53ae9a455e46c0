"""A chat in a session: each turn renders and prefills only what is new."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvkeep import validation
from kvkeep.chat.output import OutputEvent, TextDelta
from kvkeep.errors import InvalidArgument
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.session.rendering import encode_pieces, overlap_length
from kvkeep.session.turn_spans import TurnSpans
from kvkeep.session.turn_template import TurnTemplate
from kvkeep.types import AlignmentMode

if TYPE_CHECKING:
    from kvkeep.chat.continuation import ContinuedReader
    from kvkeep.chat.output_reader import OutputReader
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.alignment import AlignmentReport
    from kvkeep.session.compaction import CompactionReport
    from kvkeep.session.sampling import Sampling
    from kvkeep.session.session import Session
    from kvkeep.storage.snapshots.snapshot import Snapshot

CHAT_NOTES_KEY = "chat"  # the key of `Conversation.notes` in a snapshot


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

    speculate = True

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
        self.template = TurnTemplate(codec)
        self.template.first_turn_pieces(system, "")  # raises if there is no template
        self._turn_spans = TurnSpans(session, codec, self.template, eos_token_ids)

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
        return self._turn_spans.numbers

    @property
    def last_turn(self) -> int:
        """The number of the newest turn; 0 if there is none. Cheap at any length."""
        return self._turn_spans.newest

    def begin_turn(self, question: str) -> list[int]:
        """Return the tokens to prefill so that the model answers: those not in memory yet.

        An answer that was cut off is closed first; a complete one has its end-of-turn token in
        memory already. An end token that is not the template's is removed from the session, unless
        a bounded session cannot be rewound.
        """
        ids, removes_end = self._next_prompt(question)
        if removes_end:
            try:
                self.session.rewind(1)
            except InvalidArgument:  # evicted states and tokens cannot be rewound
                ids, _ = self._next_prompt(question, keeps_end=True)
        return ids

    def require_room(self, question: str) -> None:
        """Raise ContextFull if the session has no room for a user's message."""
        ids, removes_end = self._next_prompt(question)
        self.session.core.memory.require_room(len(ids) - removes_end)

    def _next_prompt(self, question: str, keeps_end: bool = False) -> tuple[list[int], bool]:
        """Return the tokens to prefill, and whether the end token before them is removed first.

        An end token other than the template's is: no turn followed it in training. keeps_end:
        whether it stays all the same.
        """
        tokens, spans = self.session.tokens, self.session.span_ranges
        if not tokens:
            return self.template.encode_first_turn(self.system, question)[0], False
        opening, *rest = self.template.later_turn_pieces(question)
        _, system_end = spans.get("system", spans.get("opening", (0, None)))
        if system_end == len(tokens):  # no turn follows the system prompt
            return encode_pieces(self.codec, [opening, *rest])[0], False
        closing_ids = self.codec.encode_sealed(self.template.answer_end)
        ids, _ = encode_pieces(self.codec, [self.template.answer_end + opening, *rest])
        removes_end = tokens[-1] in self._eos_token_ids and tokens[-1] != ids[0] and not keeps_end
        kept = tokens.first(len(tokens) - removes_end)
        return ids[overlap_length(kept, ids[: len(closing_ids)]) :], removes_end

    def name_turn(
        self,
        question: str,
        num_prefilled: int,
        num_generated: int = 0,
        unread: Sequence[int] = (),
    ) -> None:
        """Name a turn's spans. num_prefilled: its prompt's tokens. num_generated: its answer's.

        unread: the prompt's tokens after those, of a turn that was cut off; see `cancel_turn`.
        """
        self._turn_spans.name_turn(self.system, question, num_prefilled, num_generated, unread)

    def cancel_turn(self, question: str, prompt: Sequence[int], num_prefilled: int) -> bool:
        """Remove a message of which the first `num_prefilled` tokens of `prompt` were prefilled.

        prompt: what `begin_turn` returned. If tokens before it were evicted meanwhile, it cannot be
        removed: then what was prefilled stays as a turn without an answer, which the next turn
        closes, and which can be deleted. Returns whether the message was removed.
        """
        try:
            self.session.rewind(num_prefilled)
        except InvalidArgument:  # evicted tokens cannot be rewound
            self.name_turn(question, num_prefilled, unread=prompt[num_prefilled:])
            return False
        return True

    @property
    def is_open(self) -> bool:
        """Whether the newest turn has no answer yet."""
        return self._turn_spans.is_open

    def reopen_turn(self) -> None:
        """Make the newest answer go on where it ended: the next tokens belong to it.

        The end token of an answer that is complete is removed; an answer that was rewound begins
        anew. Raises InvalidArgument if there is no answer or whole question, if text follows it, or
        if the end token cannot be rewound.
        """
        self._turn_spans.reopen()

    def answer_tokens(self) -> "Sequence[int]":
        """Return the newest answer's tokens so far, after `reopen_turn`."""
        tokens = self.session.tokens
        _, start = self.session.span_ranges.get(f"turn {self.last_turn}", (0, len(tokens)))
        return tokens[start:]

    def answer_reader(self) -> "Callable[[], ContinuedReader]":
        """Return a function that makes a reader for what follows in the newest answer.

        The answer is empty, or goes on after `reopen_turn`. The function may be called later, and
        in another thread.
        """
        renderer, tokens = self.session.core.model.renderer, self.session.tokens
        _, start = self.session.span_ranges.get(f"turn {self.last_turn}", (0, len(tokens)))
        return partial(_continued_reader, self.codec, renderer.new_reader, tokens, start)

    def end_turn(self) -> None:
        """Name the span of the newest turn's answer, which is complete."""
        with interrupts_deferred():
            self._turn_spans.name_answer()

    def compact(self, target: float = 0.5, **settings: Any) -> "CompactionReport":
        """Bring the session to `target` cells or fewer; see `Session.compact`.

        The newest turns, the system prompt and pins stay exact.
        """
        return self.session.compact(target, **settings)

    def align(
        self,
        messages: "Sequence[Mapping[str, Any]]",
        *,
        mode: AlignmentMode = "in_place",
        progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> "AlignmentReport":
        """Make messages the session's whole text, reusing the cells that it has of them.

        For a history that changed: with another system prompt, without old messages, or with others
        between them. An answer that says what one of the session says keeps its tokens; tokens that
        differ are edited in place. A system prompt that is never evicted stays so, however long it
        becomes. If the last message is a user's, `answer` answers it.

        messages: dicts with `role` and `content`, as in OpenAI's API. progress, options:
        `min_saved`, `reread` and `reread_share`, as of `Session.align`, whose errors this raises.
        """
        from kvkeep.session.alignment import AlignmentOptions
        from kvkeep.session.message_alignment import ChatParts, align_messages

        parts = ChatParts(self.session, self.codec, self.template, self.system)
        try:
            return align_messages(parts, messages, AlignmentOptions(mode, **options), progress)
        finally:  # also after a Ctrl-C that came when the session had changed
            self.system = parts.system
            self._turn_spans.recount()

    def answer(self, max_tokens: int | None = None, sampling: "Sampling | None" = None) -> str:
        """Answer the newest turn, whose prompt is evaluated; return the text, as `say` does."""
        if not self.is_open:
            raise InvalidArgument("the newest turn has an answer: say something, or align messages")
        if not self.template.is_question_end(self.session.tokens, len(self.session.tokens)):
            raise InvalidArgument("the newest message was cut off: say something, or undo it")
        max_tokens, sampling = self._checked(max_tokens, sampling)
        try:
            events = list(self.read_answer(max_tokens, sampling))
        finally:
            self.end_turn()
        return "".join(event.text for event in events if isinstance(event, TextDelta))

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

        An interrupt or error during the prefill removes the message, as `cancel_turn`. Raises
        InvalidArgument and ContextFull as `Session.feed`.
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
        max_tokens, sampling = self._checked(max_tokens, sampling)
        self.require_room(question)
        if self.is_open:
            self.end_turn()  # of an answer that was cut off
        ids, start = self.begin_turn(question), len(self.session.tokens)
        is_named = False
        try:
            self.session.feed(ids)
            with interrupts_deferred():
                self.name_turn(question, len(ids))
                is_named = True
        except BaseException:
            if not is_named:
                self.cancel_turn(question, ids, len(self.session.tokens) - start)
            raise
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
        reader = self.answer_reader()()
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

    def _checked(
        self, max_tokens: int | None, sampling: "Sampling | None"
    ) -> "tuple[int | None, Sampling]":
        """Return the arguments of an answer. Raises InvalidArgument."""
        from kvkeep.session.sampling import Sampling  # imports torch

        if sampling is None:
            sampling = self.session.core.model.default_sampling
        validation.instance("sampling", sampling, Sampling)
        return validation.optional_integer("max_tokens", max_tokens, 0), sampling


def _continued_reader(
    codec: "TextCodec", new_reader: "Callable[[], OutputReader]", tokens: Sequence[int], start: int
) -> "ContinuedReader":
    """Return a reader for what follows an answer that begins after `start` of the tokens."""
    from kvkeep.chat.continuation import ContinuedReader
    from kvkeep.session.streaming import TextStream  # imports the tokenizers

    stream = TextStream(codec, ())
    beginning = [piece for token in tokens[start:] for piece in stream.push_pieces(token)]
    return ContinuedReader(new_reader, beginning)
