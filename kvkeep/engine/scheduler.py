"""Whose turn it is: one token for all that write, then one step of one prompt."""

from collections.abc import Callable, Sequence

import torch

from kvkeep.engine.events import TokenLogprob
from kvkeep.engine.generation import Generation
from kvkeep.session.group import SessionGroup

ROWS = 64  # of one forward: more of them make a token later, and none cheaper
_AGEING = 0.5  # tokens by which a waiting prompt gains for each that was read for another
_URGENCY = 2048  # tokens that a step of priority is worth


class Scheduler:
    """The answers that an engine works at, each in a session of its own.

    ends: token ids that end a text. over: is called with each answer that has come to its end.
    read: with each whose prompt has been read.

    An answer that fails, fails alone. Which answers work beside it changes no bit of one: a
    prompt's steps are always the same, and the rows of a forward know nothing of each other.
    """

    def __init__(
        self,
        ends: Sequence[int],
        over: Callable[[Generation], None],
        read: Callable[[Generation], None],
    ):
        self._ends, self._over, self._has_read = ends, over, read
        self._answers: list[Generation] = []

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def answers(self) -> Sequence[Generation]:
        return tuple(self._answers)

    def add(self, answer: Generation) -> None:
        self._answers.append(answer)

    def turn(self) -> None:
        """Writes a token of each answer that writes, and reads a step of one that reads."""
        self.end_cancelled()
        try:
            self._work()
        except Exception as error:  # nobody may wait for ever, whatever it was
            for answer in self._answers:
                answer.fail(error)
        self._leave()

    def _work(self) -> None:
        writing = [answer for answer in self._answers if answer.writes]
        for first in range(0, len(writing), ROWS):
            self._write(writing[first : first + ROWS])
        self._read()

    def cancel_all(self) -> None:
        for answer in self._answers:
            answer.cancel()

    # Writing

    def _write(self, answers: Sequence[Generation]) -> None:
        ready = [answer for answer in answers if self._may_write(answer)]
        known = [self._likely(answer) for answer in ready]
        try:
            tokens: Sequence[int | BaseException] = _next_tokens(ready)
        except Exception:  # whichever failed, none has changed: each by itself, then
            tokens = [_next_or_error(answer) for answer in ready]
        for answer, token, likely in zip(ready, tokens, known, strict=True):
            if isinstance(token, BaseException):
                answer.fail(token)
            else:
                answer.wrote(token, self._ends, *likely)

    def _may_write(self, answer: Generation) -> bool:
        if answer.ask.max_tokens == len(answer.written):
            answer.finish("length")
        elif answer.kept.live.room == 0:
            answer.finish("full")
        return not answer.over

    @staticmethod
    def _likely(answer: Generation) -> tuple[torch.Tensor | None, Sequence[TokenLogprob]]:
        if answer.ask.logprobs is None:
            return None, ()
        logits = answer.kept.live.logits
        return (None, ()) if logits is None else answer.likely_of(logits)

    # Reading

    def _read(self) -> None:
        waiting = [
            answer for answer in self._answers if answer.prefill_remaining and not answer.over
        ]
        if not waiting:
            return
        answer = min(waiting, key=_claim)
        before = answer.prefill_remaining
        try:
            answer.read()
        except Exception as error:
            answer.fail(error)
            return
        for other in waiting:
            other.aged += 0 if other is answer else before - answer.prefill_remaining
        if answer.writes:
            self._has_read(answer)

    # Ending

    def end_cancelled(self) -> None:
        """Between two turns."""
        for answer in self._answers:
            if answer.cancelled and not answer.over:
                answer.dismiss()
        self._leave()

    def _leave(self) -> None:
        over = [answer for answer in self._answers if answer.over]
        self._answers = [answer for answer in self._answers if not answer.over]
        for answer in over:
            self._over(answer)


def _claim(answer: Generation) -> tuple[float, int]:
    """Who has the least goes first: of tokens left to read, less what it has waited."""
    prefill_remaining = (
        answer.prefill_remaining - _AGEING * answer.aged - _URGENCY * answer.ask.priority
    )
    return prefill_remaining, answer.number


def _next_tokens(answers: Sequence[Generation]) -> list[int]:
    if not answers:
        return []
    if len(answers) == 1:
        return [answers[0].kept.live.next_token(answers[0].ask.sampling)]
    group = SessionGroup([answer.kept.live for answer in answers])
    return group.next_tokens([answer.ask.sampling for answer in answers])


def _next_or_error(answer: Generation) -> int | BaseException:
    try:
        return answer.kept.live.next_token(answer.ask.sampling)
    except Exception as error:
        return error
