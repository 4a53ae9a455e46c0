"""Probe forwards of one token, from which kvkeep infers how each layer of a model attends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.interface import (
    AttentionInputs,
    AttentionOptions,
    MaskFunction,
    use_backend,
)
from kvkeep.integrations.transformers.step_cache import StepCache, new_cache_layers

PROBED_POSITIONS = (0, 1, 977)  # the token is evaluated at each of them to compare its keys
_TOLERANCES = {torch.float32: 5e-4, torch.float64: 5e-4}
_REDUCED_PRECISION_TOLERANCE = 3e-2  # for all other dtypes: their cosines are rounded
# Query positions at which masks are evaluated, beyond all windows; two, since to one query a chunk
# of tokens looks like a window.
_FAR_QUERIES = (1 << 17, (1 << 17) + 12_345)


@dataclass(frozen=True)
class ProbedCall:
    """One call of attention in a probe forward, for one token.

    module: the layer's attention module. layer_idx: the index under which the layer updated
    transformers' cache. owns_keys: whether it is the first call that attends to its keys. q:
    `[heads, head_dim]`; k: `[kv_heads, head_dim]`. window: the width of its mask, in tokens; None
    if it sees all earlier tokens. sinks: `[heads]`.
    """

    module: nn.Module
    layer_idx: int
    owns_keys: bool
    q: Tensor
    k: Tensor
    options: AttentionOptions
    window: int | None
    sinks: Tensor | None


class AttentionProbe:
    """An attention backend for one token, which records each call of attention.

    A single token attends to itself only, so the result of attention is its own value.
    """

    def __init__(self, rotary_position: int, cache: StepCache):
        """cache: the cache that the forward gets, to which layers pass their keys and values."""
        self.rotary_position, self.cache = rotary_position, cache
        self.calls: list[ProbedCall] = []
        self._mask_functions: list[MaskFunction] = []

    def make_mask(self, mask_function: MaskFunction, device: torch.device | None) -> Tensor | None:
        """Return the index of the mask function as a tensor, for `attend` to look it up."""
        self._mask_functions.append(mask_function)
        index = len(self._mask_functions) - 1.0
        return torch.full((1, 1, 1, 1), index, dtype=torch.float32, device=device)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Record a call. Raises UnsupportedModel if kvkeep could not store its keys and values."""
        module, q, k, v = inputs.module, inputs.q, inputs.k, inputs.v
        updates = self.cache.updates
        layer_idx = next((index for index, (keys, _) in updates.items() if keys is k), None)
        has_values = any(values is v for _, values in updates.values())
        if layer_idx is None or not has_values or k.dim() != 4 or k.shape[2] != 1:
            raise UnsupportedModel(
                f"{type(module).__name__} attends to other tensors than the keys and values that "
                "it gives to its cache; kvkeep can hold no cells for it"
            )
        if q.shape[1] % k.shape[1] or v.shape[:3] != k.shape[:3]:
            raise UnsupportedModel(
                f"{type(module).__name__} has {q.shape[1]} heads of queries, {k.shape[1]} of keys "
                f"and {v.shape[1]} of values; kvkeep needs the same number for each KV head"
            )
        if q.shape[-1] != v.shape[-1]:
            raise UnsupportedModel(
                f"{type(module).__name__} has keys of {q.shape[-1]} numbers and values of "
                f"{v.shape[-1]}, as latent attention (MLA) has; kvkeep needs keys and values of "
                "one width"
            )
        self.calls.append(
            ProbedCall(
                module,
                layer_idx,
                owns_keys=all(call.layer_idx != layer_idx for call in self.calls),
                q=q[0, :, 0].clone(),
                k=k[0, :, 0].clone(),
                options=inputs.options,
                window=self._window_of_mask(module, inputs.mask),
                sinks=inputs.sinks,
            )
        )
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)

    def _window_of_mask(self, module: nn.Module, mask: Tensor | None) -> int | None:
        """Return the width of the window of a mask that `make_mask` returned; None without one."""
        if mask is None:
            return None
        index = int(mask.flatten()[0]) if mask.numel() == 1 else -1
        if not 0 <= index < len(self._mask_functions) or mask.flatten()[0] != index:
            raise UnsupportedModel(
                f"{type(module).__name__} gets a mask that transformers did not create, so kvkeep "
                "cannot tell what it masks"
            )
        return _window_width(self._mask_functions[index], mask.device)


def probe_attention(
    body: nn.Module,
    configs: Sequence[PreTrainedConfig],
    token_id: int,
    rotary_position: int = 0,
    position: int = 0,
) -> list[ProbedCall]:
    """Evaluate one token and return all calls of attention, in their order.

    body: the layers below the head. rotary_position: the token's position in rotary embeddings, as
    `hook_rotary_embeddings` sets it; two of them tell how keys are rotated. position: its position
    in `position_ids`, and the length of the cache before it; a distant one tells what else depends
    on the position.
    """
    probe = AttentionProbe(rotary_position, StepCache(new_cache_layers(configs[0]), position))
    device = next(body.parameters()).device
    with torch.inference_mode(), use_backend(probe, configs):
        body(
            input_ids=torch.full((1, 1), token_id, dtype=torch.int64, device=device),
            position_ids=torch.full((1, 1), position, dtype=torch.int64, device=device),
            past_key_values=probe.cache,
            use_cache=True,
        )
    return probe.calls


def _window_width(mask_function: MaskFunction, device: torch.device) -> int | None:
    """Return the width of a mask's window, the query included; None if it sees all earlier tokens.

    Raises UnsupportedModel for any other mask.
    """
    try:
        widths = {_visible_count_at(mask_function, query, device) for query in _FAR_QUERIES}
    except IndexError as error:  # of a tensor that has an entry for each token of the forward
        raise UnsupportedModel(
            "which cells its layers see depends on the tokens (blocks that see each other in both "
            "directions), and not only on their positions"
        ) from error
    if len(widths) != 1 or 0 in widths:
        raise UnsupportedModel(
            "some of its layers attend in chunks, or with another mask that is not a window; "
            "kvkeep supports layers that see all earlier tokens, or a window of them"
        )
    return widths.pop()


def _visible_count_at(mask_function: MaskFunction, query: int, device: torch.device) -> int | None:
    """Return how many of the newest tokens a query sees; None if all, 0 if it sees other ones."""
    cells = torch.arange(query + 100, dtype=torch.int64, device=device)  # also some after the query
    zero = torch.zeros((), dtype=torch.int64, device=device)
    visible = mask_function(zero, zero, torch.full_like(cells, query), cells).expand(cells.shape)
    visible_count = int(visible.sum())
    newest = torch.arange(query + 1 - visible_count, query + 1, dtype=torch.int64, device=device)
    if not bool(visible[newest].all()):
        return 0
    return None if visible_count == query + 1 else visible_count


@dataclass(frozen=True)
class KeyRotation:
    """A rotation of keys and queries by their position.

    frequencies: radians per position of each pair, `[head_dim / 2]`; 0 for unrotated pairs.
    permutation: `permutation[i]` is the index in the model's head of component i of a cell. In a
    cell the two components of a pair lie half a head apart.
    """

    frequencies: tuple[float, ...]
    permutation: tuple[int, ...]

    @property
    def rotates(self) -> bool:
        return any(self.frequencies)


def find_rotation(calls: Sequence[ProbedCall], frequency_tables: Sequence[Tensor]) -> KeyRotation:
    """Return the rotation that maps queries and keys at position 0 to those at other positions.

    calls: of one layer, at each of PROBED_POSITIONS. frequency_tables: `[pairs]` each. Raises
    UnsupportedModel if positions change queries and keys in another way.
    """
    # Queries and keys, `[heads + kv_heads, head_dim]`.
    heads_by_position = [torch.cat([call.q, call.k]).cpu().double() for call in calls]
    head_dim = heads_by_position[0].shape[-1]
    if head_dim % 2 == 0:
        error_of = partial(_rotation_error, heads_by_position)
        rotation = min(_candidate_rotations(head_dim, frequency_tables), key=error_of)
        if error_of(rotation) <= _TOLERANCES.get(calls[0].q.dtype, _REDUCED_PRECISION_TOLERANCE):
            return rotation
    raise UnsupportedModel(
        f"the keys of layer {calls[0].layer_idx} at another position are not a rotation of those "
        "at position 0 by any of the model's frequencies (they may be normalised after rotation); "
        "kvkeep could not attend to them from another distance"
    )


def _rotation_error(heads_by_position: Sequence[Tensor], rotation: KeyRotation) -> float:
    """Return the largest distance of heads, `[heads, head_dim]`, from the rotation of the first."""
    order = list(rotation.permutation)
    unrotated = heads_by_position[0][:, order]
    frequencies = torch.tensor(rotation.frequencies, dtype=torch.float64, device="cpu")
    first, second = torch.chunk(unrotated, 2, -1)  # of each pair
    max_error = 0.0
    for position, heads in zip(PROBED_POSITIONS, heads_by_position, strict=True):
        angles = position * frequencies
        cos, sin = angles.cos(), angles.sin()
        expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        max_error = max(max_error, ((heads[:, order] - expected).norm() / unrotated.norm()).item())
    return max_error


def _candidate_rotations(
    head_dim: int, frequency_tables: Sequence[Tensor]
) -> Iterator[KeyRotation]:
    """Yield no rotation, then every way to apply each frequency table to a head.

    A table may rotate the first or the last components of a head (partial RoPE), pair halves or
    neighbours, and turn in either direction. Example: a table of 2 pairs rotates components 0 to 3
    of 8. As halves the pairs are (0, 2), (1, 3) and the order is (0, 1, 4, 5, 2, 3, 6, 7); as
    neighbours they are (0, 1), (2, 3) and the order is (0, 2, 4, 5, 1, 3, 6, 7).
    """
    yield KeyRotation((0.0,) * (head_dim // 2), tuple(range(head_dim)))
    for table in frequency_tables:
        pairs = len(table)
        if not 0 < 2 * pairs <= head_dim:
            continue
        for begin in sorted({0, head_dim - 2 * pairs}):
            rotated = range(begin, begin + 2 * pairs)
            unrotated = [index for index in range(head_dim) if index not in rotated]
            half = len(unrotated) // 2
            for firsts, seconds in (
                (rotated[:pairs], rotated[pairs:]),
                (rotated[::2], rotated[1::2]),
            ):
                order = (*firsts, *unrotated[:half], *seconds, *unrotated[half:])
                for sign in (1, -1):
                    frequencies = [sign * value for value in table.double().tolist()]
                    yield KeyRotation((*frequencies, *(0.0,) * half), order)
