"""Log probabilities of the tokens of a prompt, from the hidden states of its prefill steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.models.layers.decoder import Decoder
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.core import SessionCore, session_transaction
from kvkeep.session.evaluation import evaluate_prompt_step, step_end
from kvkeep.session.memory import Memory
from kvkeep.session.reevaluation import reevaluate_last

_MAX_LOGITS_ROWS = 64  # rows of logits computed at a time: those of a whole prompt would not fit


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Log probabilities (natural, float64) of tokens, and of the most likely tokens instead.

    logprobs: `[n]`; NaN for the first token of a session. top_ids, top_logprobs: `[n, k]`, the
    most likely first; nothing in the row of a session's first token counts.
    """

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def __len__(self) -> int:
        return self.logprobs.shape[0]


def score_prompt(
    core: SessionCore,
    ids: list[int],
    token_by_token: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Evaluate a prompt step by step; return the log probabilities of its tokens, `[n]` float64.

    token_by_token: by decode steps of one token. progress: called after each step with the number
    of tokens in it. Raises ContextFull and NonFiniteLogits as `Session.feed`.
    """
    done, scores = 0, list[Tensor]()
    while done < len(ids):
        scores.append(_score_step(core, ids, done, token_by_token))
        count = len(scores[-1])
        done += count
        if progress:
            progress(count)
    return torch.cat(scores)


@computes_in_worker
def _score_step(core: SessionCore, ids: list[int], done: int, sampled: bool) -> Tensor:
    """Evaluate one step of a prompt; return the log probabilities of its tokens, `[n]` float64.

    The first token of a session has NaN. done: how many of the ids are evaluated. sampled: whether
    to evaluate one token only, as if the model had chosen it: by a decode step. Raises ContextFull
    and NonFiniteLogits as `Session.feed`.
    """
    last_hidden = last_hidden_state(core.memory)
    with session_transaction([core]) as (state,):
        state.keep_first_prompt(len(ids))
        end = step_end(done, core.prefill_step)
        hidden = evaluate_prompt_step(state.memory, ids, done, end, sampled).hidden
        targets = ids[done : done + len(hidden)]
        return score_tokens(state.memory.decoder, last_hidden, hidden, targets).logprobs


def last_hidden_state(memory: Memory) -> Tensor | None:
    """Return `[1, hidden_size]` of a memory's last token; None if it has no token.

    It is not held where tokens after it were removed without evaluating it anew: then it is
    evaluated in a fork, so that the memory continues to the bit as before.
    """
    if memory.hidden is not None or not memory.tokens:
        return memory.hidden
    fork = memory.fork()
    reevaluate_last(fork, *fork.pop_last())
    return fork.hidden


@torch.inference_mode()
def score_tokens(
    decoder: Decoder,
    last_hidden: Tensor | None,
    hidden: Tensor,
    targets: Sequence[int],
    top_count: int = 0,
) -> TokenScores:
    """Return the scores of the tokens of one step.

    last_hidden: `[1, hidden_size]` of the token before the step; None if it is a session's first.
    hidden: `[n, hidden_size]` of the step's tokens. targets: their ids. top_count: how many of the
    most likely tokens to return.
    """
    if last_hidden is None:
        scored = _score_rows(decoder, hidden[:-1], targets[1:], top_count)
        first = TokenScores(
            torch.full((1,), math.nan, dtype=torch.float64, device="cpu"),
            torch.zeros(1, scored.top_ids.shape[1], dtype=torch.int64, device="cpu"),
            torch.full((1, scored.top_ids.shape[1]), math.nan, dtype=torch.float64, device="cpu"),
        )
        return _concatenate([first, scored])
    return _score_rows(decoder, torch.cat((last_hidden, hidden[:-1])), targets, top_count)


def _score_rows(
    decoder: Decoder, hidden: Tensor, targets: Sequence[int], top_count: int
) -> TokenScores:
    """Return the scores of tokens that follow `hidden: [n, hidden_size]`, some rows at a time."""
    target_ids = torch.tensor(targets, dtype=torch.int64, device=hidden.device)
    count = min(top_count, decoder.spec.vocab_size)
    parts = [_empty_scores(count)]
    for first in range(0, len(targets), _MAX_LOGITS_ROWS):
        rows = slice(first, first + _MAX_LOGITS_ROWS)
        logits = decoder.logits(hidden[rows])
        # Converted on the CPU: not every device has float64.
        normaliser = logits.logsumexp(-1).cpu().double()
        target_logits = logits.gather(1, target_ids[rows, None])[:, 0].cpu().double()
        top_logits, top_ids = logits.topk(count)
        top_logprobs = top_logits.cpu().double() - normaliser[:, None]
        parts.append(TokenScores(target_logits - normaliser, top_ids.cpu(), top_logprobs))
    return _concatenate(parts)


def _empty_scores(count: int) -> TokenScores:
    numbers = torch.empty(0, count, dtype=torch.float64, device="cpu")
    ids = torch.empty(0, count, dtype=torch.int64, device="cpu")
    return TokenScores(numbers.new_empty(0), ids, numbers)


def _concatenate(parts: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )
