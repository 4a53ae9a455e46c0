"""A check that a model computes the same with kvkeep's cache as with its own, before its use."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.hooks import body_of
from kvkeep.models.layers.decoder import Decoder
from kvkeep.policies import Full
from kvkeep.session.evaluation import evaluate
from kvkeep.session.memory import Memory

_TOKENS, _STEPS = 12, (7, 1, 4)
# The largest difference of hidden states relative to their norm: in float32, and in dtypes in which
# each of them is rounded on its way. Any difference but rounding is about as large as the norm.
_FLOAT32_TOLERANCE, _ROUNDED_TOLERANCE = 1e-3, 0.15


@torch.inference_mode()
def require_agreement(model: PreTrainedModel, decoder: Decoder) -> None:
    """Evaluate a few tokens both ways. Raises UnsupportedModel if the results differ."""
    ids = [(7_919 * index + 3) % decoder.spec.vocab_size for index in range(_TOKENS)]
    input_ids = torch.tensor([ids], dtype=torch.int64, device=model.device)
    cache = DynamicCache(config=model.config)
    output = model(input_ids=input_ids, past_key_values=cache, use_cache=True)
    body_output = body_of(model)(
        input_ids=input_ids, past_key_values=DynamicCache(config=model.config), use_cache=True
    )
    expected = body_output.last_hidden_state[0]
    memory, done = Memory(decoder, Full(2 * _TOKENS)), 0
    for count in _STEPS:
        (step,) = evaluate(memory, ids[done : done + count], count)
        difference = _difference(step.hidden, expected[done : done + count])
        what = f"its layers, given {count} tokens after {done}, make"
        _require_small(difference, expected.dtype, what)
        done += count
    logits_difference = _difference(decoder.logits(expected), output.logits[0].float())
    _require_small(logits_difference, expected.dtype, "its head makes")


def _difference(rows: Tensor, expected: Tensor) -> float:
    """Return the relative difference of two `[tokens, width]`, the median over tokens.

    The median, since rounding may make a mixture of experts choose other experts for one token.
    """
    rows, expected = rows.float(), expected.float()
    relative = (rows - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    return float(relative.median())


def _require_small(difference: float, dtype: torch.dtype, what: str) -> None:
    tolerance = _FLOAT32_TOLERANCE if dtype is torch.float32 else _ROUNDED_TOLERANCE
    if not difference <= tolerance:  # true for NaN as well
        raise UnsupportedModel(
            f"{what} something else with kvkeep's memory than with the model's own cache: they "
            f"differ by {difference:.1%}; use a cache of transformers with it"
        )
