"""The spans that name the turns of a chat in its session."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvkeep.errors import InvalidArgument
from kvkeep.session.message_spans import reasoning_range
from kvkeep.session.turn_template import TurnTemplate

if TYPE_CHECKING:
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.session import Session


class TurnSpans:
    """The spans of the turns of a chat: each turn, and within it question, reasoning and answer.

    They follow every edit of the session: see `Conversation`.
    """

    def __init__(
        self,
        session: "Session",
        codec: "TextCodec",
        template: TurnTemplate,
        eos_token_ids: Sequence[int],
    ):
        self._session, self._codec, self._template = session, codec, template
        self._eos_token_ids = eos_token_ids
        self.recount()

    def recount(self) -> None:
        """Find the newest turn again, after spans were named elsewhere."""
        self._newest_turn = max(self.numbers, default=0)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the turns; a deleted one leaves a gap."""
        return turn_numbers(self._session.span_ranges)

    @property
    def newest(self) -> int:
        """The number of the newest turn; 0 if there is none. Cheap at any length."""
        while self._newest_turn and f"turn {self._newest_turn}" not in self._session.span_ranges:
            self._newest_turn -= 1
        return self._newest_turn

    @property
    def is_open(self) -> bool:
        """Whether the newest turn has no answer yet."""
        turn, spans = f"turn {self.newest}", self._session.span_ranges
        return turn in spans and f"{turn} answer" not in spans

    def name_turn(
        self,
        system: str | None,
        question: str,
        num_prefilled: int,
        num_generated: int,
        unread: Sequence[int],
    ) -> None:
        """Name the spans of a turn without those of its answer; see `Conversation.name_turn`.

        system: the chat's system prompt, which is before the first turn.
        """
        end, previous_turn = len(self._session.tokens) - num_generated, self.newest
        ids, ranges = self._template.encode_later_turn(question)
        prompt = [*self._session.tokens[end - num_prefilled : end], *unread]
        turn_length = len(ids) if prompt[-len(ids) :] == ids else len(prompt)
        full_end, turn = end + len(unread), f"turn {previous_turn + 1}"
        start = min(full_end - turn_length, end)
        if previous_turn:
            # The end of an answer belongs to its turn, so that a turn can be deleted as a whole.
            name = f"turn {previous_turn}"
            turn_start, turn_end = self._session.span_ranges[name]
            if turn_end == end - num_prefilled:  # no text was fed since then
                self._session.name(name, turn_start, start)
        elif len(prompt) == full_end and start:
            self._name_system(system, question, start)
        if start == end:
            return
        self._session.name(turn, start, end)
        self._newest_turn = previous_turn + 1
        if turn_length == len(prompt) == full_end and prompt != ids:
            # The template writes the first turn differently.
            ids, ranges = self._template.encode_first_turn(system, question)
        self._name_text(f"{turn} question", ranges[-2], full_end - len(ids))

    def name_answer(self) -> None:
        """Name the newest turn's answer, which is complete, and the reasoning in it."""
        if not self.newest:
            return
        turn, tokens = f"turn {self.newest}", self._session.tokens
        start, answer_start = self._session.span_ranges[turn]
        end = len(tokens)
        self._session.name(turn, start, end)
        if end > answer_start and tokens[-1] in self._eos_token_ids:
            end -= 1
        self._name_text(f"{turn} answer", (answer_start, end))
        renderer = self._session.core.model.renderer
        if found := reasoning_range(self._codec, renderer, tokens[answer_start:end]):
            self._name_text(f"{turn} reasoning", found, answer_start)

    def reopen(self) -> None:
        """Make the next tokens belong to the newest answer; see `Conversation.reopen_turn`."""
        turn, spans = f"turn {self.newest}", self._session.span_ranges
        tokens = self._session.tokens
        end = len(tokens) - (bool(tokens) and tokens[-1] in self._eos_token_ids)
        if self.is_open and self._template.is_question_end(tokens, end):
            answer_start = end
        elif f"{turn} answer" in spans and spans[turn][1] == len(tokens):
            answer_start, _ = spans[f"{turn} answer"]
        else:
            raise InvalidArgument(
                "there is no answer at the session's end to continue: send content, a new message"
            )
        if end < len(tokens):
            self._session.rewind(1)
        self._session.name(turn, spans[turn][0], answer_start)

    def _name_system(self, system: str | None, question: str, end: int) -> None:
        """Name the tokens before the first turn: the first `end`."""
        self._session.name("opening" if system is None else "system", 0, end)
        if system is not None:
            _, ranges = self._template.encode_first_turn(system, question)
            self._name_text("system text", ranges[1])

    def _name_text(self, name: str, token_range: tuple[int, int], offset: int = 0) -> None:
        """Name a message's text, as far as it is there. offset: added to the range."""
        start, end = token_range
        start, end = offset + start, min(offset + end, len(self._session.tokens))
        if start < end:
            self._session.name(name, start, end)


def turn_numbers(span_names: Iterable[str]) -> list[int]:
    """Return the numbers of the turns among span names, ascending."""
    suffixes = [name.removeprefix("turn ") for name in span_names if name.startswith("turn ")]
    return sorted(int(suffix) for suffix in suffixes if suffix.isdecimal())
