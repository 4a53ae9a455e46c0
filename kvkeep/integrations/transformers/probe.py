"""A forward of one token, in which kvkeep looks at how a model's layers attend."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.interface import Asked, MaskFunction, attended_by
from kvkeep.integrations.transformers.step_cache import StepCache, layers_of

_FAR = 1 << 17  # the place of a token whose mask is looked at: further than models look


@dataclass(frozen=True)
class Seen:
    """One call of attention.

    layer: the index under which its keys were given to the cache. own: whether it is the first to
    attend to them. q: `[heads, head_dim]`; k: `[kv_heads, head_dim]`. window: of its mask.
    """

    module: nn.Module
    layer: int
    own: bool
    q: Tensor
    k: Tensor
    asked: Asked
    window: int | None
    sinks: Tensor | None


class Looking:
    """Attends by handing each token its own value, which is all that one token alone sees."""

    def __init__(self, position: int):
        self.position = position
        self.seen: list[Seen] = []
        self._keys: list[tuple[int, Tensor, Tensor]] = []
        self._masks: list[MaskFunction] = []

    def take(self, keys: Tensor, values: Tensor, layer: int) -> None:
        """As `Stepping.take`."""
        self._keys.append((layer, keys, values))

    def mask(self, function: MaskFunction, like: Tensor) -> Tensor | None:
        """A tensor of one number, by which the mask is known again."""
        self._masks.append(function)
        number = len(self._masks) - 1.0
        return torch.full((1, 1, 1, 1), number, dtype=torch.float32, device=like.device)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        asked: Asked,
        sinks: Tensor | None,
    ) -> Tensor:
        layer = next((each for each, keys, _ in self._keys if keys is k), None)
        given = any(values is v for _, _, values in self._keys)
        if layer is None or not given or k.dim() != 4 or k.shape[2] != 1:
            raise UnsupportedModel(
                f"{type(module).__name__} attends to something else than the keys and values that "
                "it gives to its cache; kvkeep can keep no cells for it"
            )
        if q.shape[1] % k.shape[1] or v.shape[:3] != k.shape[:3]:
            raise UnsupportedModel(
                f"{type(module).__name__} has {q.shape[1]} heads, {k.shape[1]} of keys and "
                f"{v.shape[1]} of values; kvkeep knows as many heads for each KV head"
            )
        if q.shape[-1] != v.shape[-1]:
            raise UnsupportedModel(
                f"{type(module).__name__} has keys of {q.shape[-1]} numbers and values of "
                f"{v.shape[-1]}, as latent attention (MLA) has; kvkeep keeps cells in which they "
                "are alike"
            )
        own = all(each.layer != layer for each in self.seen)
        window = self._window(module, mask)
        alone = [x[0, :, 0].clone() for x in (q, k)]
        self.seen.append(Seen(module, layer, own, alone[0], alone[1], asked, window, sinks))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)

    def _window(self, module: nn.Module, mask: Tensor | None) -> int | None:
        if mask is None:
            return None
        number = int(mask.flatten()[0]) if mask.numel() == 1 else -1
        if not 0 <= number < len(self._masks) or mask.flatten()[0] != number:
            raise UnsupportedModel(
                f"{type(module).__name__} is handed a mask that transformers did not make; kvkeep "
                "cannot know what it hides"
            )
        return window_of(self._masks[number], mask.device)


def look(
    model: nn.Module,
    configs: Sequence[PreTrainedConfig],
    token: int,
    rotated: int = 0,
    position: int = 0,
) -> Looking:
    """What the layers of a model do with one token.

    model: the one below the head. rotated: where its rotary embeddings think that the token is;
    position: where all else does, whether it is told so or counts what its cache has seen.
    """
    looking = Looking(rotated)
    device = next(model.parameters()).device
    cache = StepCache(layers_of(configs[0]), looking.take, position)
    with torch.inference_mode(), attended_by(looking, configs):
        model(
            input_ids=torch.full((1, 1), token, dtype=torch.int64, device=device),
            position_ids=torch.full((1, 1), position, dtype=torch.int64, device=device),
            past_key_values=cache,
            use_cache=True,
        )
    return looking


def window_of(function: MaskFunction, device: torch.device) -> int | None:
    """How many of the newest tokens each query sees, itself included; None for all before it.

    Raises UnsupportedModel for a mask that is neither.
    """
    try:
        widths = {_width(function, query, device) for query in (_FAR, _FAR + 12_345)}
    except IndexError as error:
        raise UnsupportedModel(
            "which cells its layers see depends on what the tokens are (blocks that see each other "
            "in both directions), and not on where alone"
        ) from error
    if len(widths) != 1:
        raise UnsupportedModel(
            "some of its layers attend in chunks, or by another mask than that of a window; kvkeep "
            "knows layers that see everything before them, or a window of it"
        )
    return widths.pop()


def _width(function: MaskFunction, query: int, device: torch.device) -> int | None:
    cells = torch.arange(query + 100, dtype=torch.int64, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    seen = function(zero, zero, torch.full_like(cells, query), cells).expand(cells.shape)
    count = int(seen.sum())
    inside = torch.arange(query + 1 - count, query + 1, dtype=torch.int64, device=device)
    if not count or not bool(seen[inside].all()):
        return -query  # no window: another number for each query
    return None if count == query + 1 else count


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Of the part of a model that writes."""
    return model.config.get_text_config(decoder=True)
