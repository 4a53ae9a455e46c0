"""Embeddings: one vector for a text, pooled from the last layer's hidden states."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvkeep.errors import InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.models.spec.pooling import Pooling
from kvkeep.policies.full import Full
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.evaluation import evaluate_step, step_end
from kvkeep.session.memory import Memory

_MIN_CELLS = 16


def embed(
    model: LoadedModel,
    ids: Sequence[int],
    pooling: Pooling,
    prefill_step: int = 512,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the vector of a text, `[hidden_size]` float32 on the CPU.

    The tokens are evaluated in a memory of their own, which is dropped. progress: called after each
    step with the number of tokens in it. Raises InvalidArgument for a text that is empty or longer
    than the model was trained for, and NonFiniteLogits.
    """
    longest = model.spec.max_positions
    if not 0 < len(ids) <= longest:
        raise InvalidArgument(f"a text must have 1 to {longest} tokens; found {len(ids)}")
    memory, done = embedding_memory(model, len(ids)), 0
    total = torch.zeros(model.spec.hidden_size, dtype=torch.float32, device="cpu")
    while done < len(ids):
        hidden = _evaluate(memory, ids, done, prefill_step)
        total = total + hidden.sum(0) if pooling.mode == "mean" else hidden[-1]
        done += len(hidden)
        if progress:
            progress(len(hidden))
    vector = total / len(ids) if pooling.mode == "mean" else total
    return normalized(vector) if pooling.normalized else vector


def embedding_memory(model: LoadedModel, num_tokens: int) -> Memory:
    """Return an empty memory in which a text of so many tokens is evaluated, once."""
    longest = model.spec.max_positions
    policy = Full(min(longest, max(num_tokens, _MIN_CELLS))).for_model(longest)
    memory = Memory(model.decoder, policy)
    memory.checkpoints = memory.checkpoints.limited(0)
    return memory


def normalized(vector: Tensor) -> Tensor:
    """Return a vector of length 1; of zeros, zeros."""
    return torch.nn.functional.normalize(vector, dim=0)


@computes_in_worker
def _evaluate(memory: Memory, ids: Sequence[int], done: int, prefill_step: int) -> Tensor:
    """Evaluate one step; return its hidden states after the final norm, `[n, hidden_size]`."""
    end = step_end(done, prefill_step)
    return evaluate_step(memory, ids, done, end).hidden.float().cpu()
