"""Sampling tokens from a session, and streaming their text."""

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import TypeVar

from torch import Tensor

from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.answer_end import keep_answer_end
from kvkeep.session.core import SessionCore, SessionState, session_transaction
from kvkeep.session.drafts import DraftCounts, DraftPlanner
from kvkeep.session.evaluation import append_sampled
from kvkeep.session.sampling import Sampling
from kvkeep.session.speculation import Speculation, end_check, sample_runs
from kvkeep.session.streaming import TextStream

_Item = TypeVar("_Item")


@computes_in_worker
def next_token(core: SessionCore, sampling: Sampling) -> int:
    """Sample a token, evaluate it and append it to the session; return its id."""
    logits = core.memory.logits()
    if logits is None:
        raise InvalidArgument("nothing to continue: feed a prompt first")
    core.memory.require_room(1)
    return decode_step([core], [logits], [sampling])[0]


def decode_step(
    cores: Sequence[SessionCore],
    logits: Sequence[Tensor],
    samplings: Sequence[Sampling],
    grouped: bool = False,
) -> list[int]:
    """Sample a token for each session, and append all of them by one forward: all or none.

    logits: `[vocab]` float32 of each session's last token. grouped: whether the forward may be of
    several sessions (a `GroupStep`).
    """
    with session_transaction(cores) as states:
        suppressed = [core.model.suppressed_tokens for core in cores]
        tokens = list(map(SessionState.sample, states, logits, samplings, suppressed))
        for core, state, token, sampling in zip(cores, states, tokens, samplings, strict=True):
            end_ids = core.model.end_token_ids
            keep_answer_end(state.memory, core.model.text, token, end_ids, sampling.stop)
        append_sampled([state.memory for state in states], tokens, grouped)
    for token, sampling in zip(tokens, samplings, strict=True):
        if sampling.constraint is not None:
            sampling.constraint.accept(token)
    return tokens


def stream_text(
    core: SessionCore,
    max_tokens: int | None,
    sampling: Sampling,
    end_ids: tuple[int, ...],
    speculate: bool = False,
) -> Iterator[str]:
    """Sample tokens and yield their text until one of `end_ids`; see `Session.stream`.

    An error is raised once the text of all tokens in the session was yielded.
    """
    pieces = _stream_pieces(core, max_tokens, sampling, end_ids, speculate)
    return _complete_stream(core, sampling, pieces, _text_of)


def stream_pieces(
    core: SessionCore,
    max_tokens: int | None,
    sampling: Sampling,
    end_ids: tuple[int, ...],
    speculate: bool = False,
) -> Generator[list[str | int], None, None]:
    """Sample tokens as `stream_text`; yield their text with the ids of control tokens in it."""
    pieces = _stream_pieces(core, max_tokens, sampling, end_ids, speculate)
    return _complete_stream(core, sampling, pieces, list[str | int])


def _complete_stream(
    core: SessionCore,
    sampling: Sampling,
    stream: Generator[list[str | int], None, None],
    converted: Callable[[list[str | int]], _Item | None],
) -> Generator[_Item, None, None]:
    """Yield converted pieces; before an error is raised, also those of all tokens in the session.

    The last generator before the caller: an interrupt in another one after it would lose the text
    on its way. There is no call between counting pieces and yielding them, so Ctrl-C, which Python
    handles at calls and jumps, cannot come between the two. converted: None for no item.
    """
    context_ids, core.finish_reason, yielded_length = core.memory.tokens, None, 0
    try:
        with closing(stream):
            for pieces in stream:
                length, item = _length(pieces), converted(pieces)
                yielded_length += length
                if item is not None:
                    yield item
    except GeneratorExit:
        raise
    except BaseException as error:
        core.finish_reason = _failure_reason(error)
        text_stream = TextStream(core.model.text, sampling.stop, context_ids, sampling.reasoning)
        ids = core.memory.tokens[len(context_ids) :]
        all_pieces = [piece for token in ids for piece in text_stream.push_pieces(token)]
        all_pieces.append(text_stream.flush())
        rest = _without_first(all_pieces, yielded_length)
        if rest and (item := converted(rest)) is not None:
            try:
                yield item
            except GeneratorExit:
                if isinstance(error, Exception):
                    raise  # the stream is closed; only an interrupt must not get lost
        raise


def _text_of(pieces: Sequence[str | int]) -> str | None:
    """Return the text of pieces, or None for no text."""
    return "".join(piece for piece in pieces if isinstance(piece, str)) or None


def _stream_pieces(
    core: SessionCore,
    max_tokens: int | None,
    sampling: Sampling,
    end_ids: tuple[int, ...],
    speculate: bool,
) -> Generator[list[str | int], None, None]:
    """Yield pieces that are certain, and set the core's `finish_reason` at the end."""
    text_stream = TextStream(core.model.text, sampling.stop, core.memory.tokens, sampling.reasoning)
    for tokens in _sampled_runs(core, max_tokens, sampling, end_ids, speculate):
        pieces = list[str | int]()
        for token in tokens:  # only the last one can end the generation
            if token in end_ids:
                core.finish_reason = "eos"
                break
            pieces += text_stream.push_pieces(token)
        if pieces or not core.finish_reason:
            yield pieces
        if text_stream.stopped:
            core.finish_reason = "stop"
            return
        if core.finish_reason:
            break
        if sampling.complete:
            core.finish_reason = "eos"
            break
    core.finish_reason = core.finish_reason or "length"
    yield [text_stream.flush()]


def _sampled_runs(
    core: SessionCore,
    max_tokens: int | None,
    sampling: Sampling,
    end_ids: tuple[int, ...],
    speculate: bool,
) -> Iterator[Sequence[int]]:
    """Sample tokens and yield those of each forward. speculate: whether these may be several."""
    core.drafts = DraftCounts()
    left = sys.maxsize if max_tokens is None else max_tokens
    if not speculate:
        for _ in range(left):
            yield [next_token(core, sampling)]
        return
    ends_after = end_check(core, sampling.stop, end_ids, sampling.reasoning)
    speculation = Speculation(core, sampling, ends_after)
    planner = DraftPlanner(cost=core.model.row_cost)
    while left > 0:
        (run,) = sample_runs([speculation], [left], planner)
        run.require_followed()
        tokens = run.tokens
        del run  # frees its logits before the next forward
        left -= len(tokens)
        yield tokens


def _length(pieces: Sequence[str | int]) -> int:
    """Return the number of characters and control tokens."""
    return sum(len(piece) if isinstance(piece, str) else 1 for piece in pieces)


def _without_first(pieces: Sequence[str | int], count: int) -> list[str | int]:
    """Return the pieces without their first `count` characters and control tokens."""
    rest = list[str | int]()
    for piece in pieces:
        length = _length([piece])
        if count >= length:
            count -= length
        else:
            rest.append(piece[count:] if isinstance(piece, str) else piece)
            count = 0
    return rest


def _failure_reason(error: BaseException) -> str:
    if isinstance(error, ContextFull):
        return "full"
    return "interrupt" if isinstance(error, KeyboardInterrupt) else "error"
