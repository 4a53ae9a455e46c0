"""Sampling tokens from a session, streaming their text, and scoring given tokens."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.core import SessionCore, SessionState, session_transaction
from kvkeep.session.evaluation import StepTransaction, evaluate_step
from kvkeep.session.memory import Memory
from kvkeep.session.sampling import Sampling
from kvkeep.session.streaming import TextStream

_MAX_LOGITS_ROWS = 64  # rows of logits computed at a time: those of a whole prompt would not fit


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
        tokens = list(map(SessionState.sample, states, logits, samplings))
        _append_sampled([state.memory for state in states], tokens, grouped)
    for token, sampling in zip(tokens, samplings, strict=True):
        if sampling.constraint is not None:
            sampling.constraint.accept(token)
    return tokens


@torch.inference_mode()
def _append_sampled(memories: Sequence[Memory], tokens: Sequence[int], grouped: bool) -> None:
    """Evaluate a sampled token for each memory, all in one forward, and append it."""
    for memory in memories:
        memory.policy.open(memory.cache, 1)  # makes room for one cell
    decoder, chunks = memories[0].decoder, [[token] for token in tokens]
    with StepTransaction(memories, chunks, sampled=True, grouped=grouped) as transaction:
        hidden = decoder.forward(transaction.tokens, transaction.step)
        logits = decoder.logits(hidden)
    transaction.append(hidden, logits)


def stream_text(
    core: SessionCore, max_tokens: int | None, sampling: Sampling, end_ids: tuple[int, ...]
) -> Iterator[str]:
    """Sample tokens and yield their text until one of `end_ids`; see `Session.stream`.

    An error is raised once the text of all tokens in the session was yielded.
    """
    context_ids, core.finish_reason, yielded_length = core.memory.tokens, None, 0
    try:
        for piece in _stream_pieces(core, max_tokens, sampling, end_ids):
            yielded_length += len(piece)
            if piece:
                yield piece
    except GeneratorExit:
        raise
    except BaseException as error:
        core.finish_reason = _failure_reason(error)
        text_stream = TextStream(core.model.text, sampling.stop, context_ids)
        text = text_stream.push_and_flush(core.memory.tokens[len(context_ids) :])
        if not_yielded := text[yielded_length:]:
            try:
                yield not_yielded
            except GeneratorExit:
                if isinstance(error, Exception):
                    raise  # the stream is closed; only an interrupt must not get lost
        raise


def _stream_pieces(
    core: SessionCore, max_tokens: int | None, sampling: Sampling, end_ids: tuple[int, ...]
) -> Iterator[str]:
    """Yield pieces of text that are certain, and set the core's `finish_reason` at the end."""
    text_stream = TextStream(core.model.text, sampling.stop, core.memory.tokens)
    for _ in itertools.count() if max_tokens is None else range(max_tokens):
        token = next_token(core, sampling)
        if token in end_ids:
            core.finish_reason = "eos"
            break
        yield text_stream.push(token)
        if text_stream.stopped:
            core.finish_reason = "stop"
            return
        if sampling.complete:
            core.finish_reason = "eos"
            break
    core.finish_reason = core.finish_reason or "length"
    yield text_stream.flush()


def _failure_reason(error: BaseException) -> str:
    if isinstance(error, ContextFull):
        return "full"
    return "interrupt" if isinstance(error, KeyboardInterrupt) else "error"


@computes_in_worker
def score_step(core: SessionCore, ids: list[int], done: int, sampled: bool) -> Tensor:
    """Evaluate one step of a prompt; return the log probabilities of its tokens, `[n]` float64.

    The first token of a session has NaN. done: how many of the ids are evaluated. sampled: whether
    to evaluate one token only, as if the model had chosen it: by a decode step.
    """
    with session_transaction([core]) as (state,):
        last_hidden = state.memory.hidden
        state.keep_first_prompt(len(ids))
        size = 1 if sampled else core.prefill_step
        hidden = evaluate_step(state.memory, ids, done, size, sampled).hidden
        targets = ids[done : done + len(hidden)]
        if last_hidden is not None:
            preceding_hidden = torch.cat((last_hidden, hidden[:-1]))
            return _log_probabilities(state.memory, preceding_hidden, targets)
        first_nan = torch.full((1,), math.nan, dtype=torch.float64, device="cpu")
        return torch.cat((first_nan, _log_probabilities(state.memory, hidden[:-1], targets[1:])))


@torch.inference_mode()
def _log_probabilities(memory: Memory, hidden: Tensor, targets: Sequence[int]) -> Tensor:
    """Return log probabilities, `[n]` float64, of targets after `hidden: [n, hidden_size]`."""
    target_ids = torch.tensor(targets, dtype=torch.int64, device=hidden.device)
    log_probabilities = [torch.empty(0, dtype=torch.float64, device="cpu")]
    for first in range(0, len(targets), _MAX_LOGITS_ROWS):
        rows = slice(first, first + _MAX_LOGITS_ROWS)
        logits = memory.decoder.logits(hidden[rows])
        target_logits = logits.gather(1, target_ids[rows, None])[:, 0]
        # Converted on the CPU: not every device has float64.
        log_probabilities.append(target_logits.cpu().double() - logits.logsumexp(-1).cpu().double())
    return torch.cat(log_probabilities)
