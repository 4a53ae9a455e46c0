"""Whether a model makes with kvkeep's memory what it makes with its own: tried before its use."""

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
# How far hidden states may be off, as a part of their length: in float32, and where each of them is
# rounded on its way. Something else than rounding is off by about all of it.
_IN_FLOAT32, _ROUNDED = 1e-3, 0.15


@torch.inference_mode()
def require_agreement(model: PreTrainedModel, decoder: Decoder) -> None:
    """Reads a few tokens both ways. Raises UnsupportedModel where they do not come out alike."""
    ids = [(7_919 * index + 3) % decoder.spec.vocab_size for index in range(_TOKENS)]
    taken = torch.tensor([ids], dtype=torch.int64, device=model.device)
    cache = DynamicCache(config=model.config)
    own = model(input_ids=taken, past_key_values=cache, use_cache=True)
    body = body_of(model)(
        input_ids=taken, past_key_values=DynamicCache(config=model.config), use_cache=True
    )
    wanted = body.last_hidden_state[0]
    memory, done = Memory(decoder, Full(2 * _TOKENS)), 0
    for count in _STEPS:
        (step,) = evaluate(memory, ids[done : done + count], count)
        off = _off(step.hidden, wanted[done : done + count])
        what = f"its layers, given {count} tokens after {done}, make"
        _require(off, wanted.dtype, what)
        done += count
    _require(_off(decoder.logits(wanted), own.logits[0].float()), wanted.dtype, "its head makes")


def _off(found: Tensor, wanted: Tensor) -> float:
    """The median over tokens: a mixture of experts may choose others for one by rounding."""
    found, wanted = found.float(), wanted.float()
    off = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-9)
    return float(off.median())


def _require(off: float, dtype: torch.dtype, what: str) -> None:
    most = _IN_FLOAT32 if dtype is torch.float32 else _ROUNDED
    if not off <= most:
        raise UnsupportedModel(
            f"{what} something else with kvkeep's memory than with the model's own cache: they "
            f"differ by {off:.1%}; use a cache of transformers with it"
        )
