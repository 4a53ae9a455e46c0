"""Probe forwards of one token, from which kvkeep infers how each layer of a model attends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.interface import AttentionOptions, MaskFunction, use_backend
from kvkeep.integrations.transformers.step_cache import StepCache, new_cache_layers

PROBED_POSITIONS = (0, 1, 977)  # the token is evaluated at each of them to compare its keys
_TOLERANCE = {torch.float32: 5e-4, torch.float64: 5e-4}
_ROUNDED_TOLERANCE = 3e-2  # for all other dtypes: their cosines are rounded
# A query position at which masks are evaluated: larger than any window that models have.
_FAR_QUERY = 1 << 17


@dataclass(frozen=True)
class ProbedCall:
    """One call of attention in a probe forward.

    layer: the index under which its keys were given to the cache. owns_keys: whether it is the
    first call that attends to them. q: `[heads, head_dim]`; k: `[kv_heads, head_dim]`. window: of
    its mask, in tokens; None if it sees all tokens before it.
    """

    module: nn.Module
    layer: int
    owns_keys: bool
    q: Tensor
    k: Tensor
    options: AttentionOptions
    window: int | None
    sinks: Tensor | None


class AttentionProbe:
    """An attention backend for one token, which records all calls in `calls`.

    A single token attends to itself only, so the result of attention is its own value. cache: the
    cache of the probe's forward.
    """

    def __init__(self, position: int, cache: StepCache):
        self.position, self.cache = position, cache
        self.calls: list[ProbedCall] = []
        self._masks: list[MaskFunction] = []

    def mask(self, function: MaskFunction, device: torch.device | None) -> Tensor | None:
        """Return the index of the mask function as a tensor, by which `attend` finds it again."""
        self._masks.append(function)
        index = len(self._masks) - 1.0
        return torch.full((1, 1, 1, 1), index, dtype=torch.float32, device=device)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        updates = self.cache.updates
        layer = next((index for index, (keys, _) in updates.items() if keys is k), None)
        has_values = any(values is v for _, values in updates.values())
        if layer is None or not has_values or k.dim() != 4 or k.shape[2] != 1:
            raise UnsupportedModel(
                f"{type(module).__name__} attends to something else than the keys and values that "
                "it gives to its cache; kvkeep can keep no cells for it"
            )
        if q.shape[1] % k.shape[1] or v.shape[:3] != k.shape[:3]:
            raise UnsupportedModel(
                f"{type(module).__name__} has {q.shape[1]} heads, {k.shape[1]} of keys and "
                f"{v.shape[1]} of values; kvkeep needs as many heads for each KV head"
            )
        if q.shape[-1] != v.shape[-1]:
            raise UnsupportedModel(
                f"{type(module).__name__} has keys of {q.shape[-1]} numbers and values of "
                f"{v.shape[-1]}, as latent attention (MLA) has; kvkeep keeps cells in which they "
                "are alike"
            )
        owns_keys = all(call.layer != layer for call in self.calls)
        window = self._window_of_mask(module, mask)
        query, key = (x[0, :, 0].clone() for x in (q, k))
        self.calls.append(ProbedCall(module, layer, owns_keys, query, key, options, window, sinks))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)

    def _window_of_mask(self, module: nn.Module, mask: Tensor | None) -> int | None:
        if mask is None:
            return None
        index = int(mask.flatten()[0]) if mask.numel() == 1 else -1
        if not 0 <= index < len(self._masks) or mask.flatten()[0] != index:
            raise UnsupportedModel(
                f"{type(module).__name__} gets a mask that transformers did not make; kvkeep "
                "cannot tell what it hides"
            )
        return mask_window(self._masks[index], mask.device)


def probe_calls(
    body: nn.Module,
    configs: Sequence[PreTrainedConfig],
    token: int,
    rotary_position: int = 0,
    position: int = 0,
) -> list[ProbedCall]:
    """Evaluate one token and return all calls of attention, in their order.

    body: the model below its head. rotary_position: the token's position in rotary embeddings.
    position: its position everywhere else, both in `position_ids` and in the cache's length.
    """
    probe = AttentionProbe(rotary_position, StepCache(new_cache_layers(configs[0]), position))
    device = next(body.parameters()).device
    with torch.inference_mode(), use_backend(probe, configs):
        body(
            input_ids=torch.full((1, 1), token, dtype=torch.int64, device=device),
            position_ids=torch.full((1, 1), position, dtype=torch.int64, device=device),
            past_key_values=probe.cache,
            use_cache=True,
        )
    return probe.calls


def mask_window(function: MaskFunction, device: torch.device) -> int | None:
    """Return how many of the newest tokens a query sees, itself included; None for all before it.

    Raises UnsupportedModel for a mask that is neither.
    """
    try:
        widths = {
            _window_at(function, query, device) for query in (_FAR_QUERY, _FAR_QUERY + 12_345)
        }
    except IndexError as error:
        raise UnsupportedModel(
            "which cells its layers see depends on what the tokens are (blocks that see each other "
            "in both directions), and not only on their positions"
        ) from error
    if len(widths) != 1:
        raise UnsupportedModel(
            "some of its layers attend in chunks, or by another mask than that of a window; kvkeep "
            "supports layers that see everything before them, or a window of it"
        )
    return widths.pop()


def _window_at(function: MaskFunction, query: int, device: torch.device) -> int | None:
    """Return the width of the window at position `query`; None for all tokens before it.

    A mask that is no window gives `-query`, which differs from one query to the next.
    """
    cells = torch.arange(query + 100, dtype=torch.int64, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    visible = function(zero, zero, torch.full_like(cells, query), cells).expand(cells.shape)
    count = int(visible.sum())
    newest = torch.arange(query + 1 - count, query + 1, dtype=torch.int64, device=device)
    if not count or not bool(visible[newest].all()):
        return -query
    return None if count == query + 1 else count


@dataclass(frozen=True)
class KeyRotation:
    """A rotation of keys and queries by their position.

    frequencies: radians per position of each pair, `[head_dim / 2]`; 0 for pairs that are not
    rotated. order: `order[i]` is the index, in the model's head, of component i of a cell; in the
    cell's order the two components of a pair lie half a head apart.
    """

    frequencies: tuple[float, ...]
    order: tuple[int, ...]

    @property
    def rotates(self) -> bool:
        return any(self.frequencies)


def find_rotation(
    probed: Sequence[Sequence[Tensor]], tables: Sequence[Tensor]
) -> KeyRotation | None:
    """Return the rotation that maps rows at position 0 to the rows at the other probed positions.

    probed: for each of PROBED_POSITIONS the same tensors, `[rows, head_dim]`. tables: the frequency
    tables of the model, `[pairs]` each. Returns None if no candidate fits: then positions change
    more than a rotation does.
    """
    rows_at = [torch.cat(list(tensors)).cpu().double() for tensors in probed]
    width = rows_at[0].shape[-1]
    if width % 2:
        return None
    error, rotation = min(
        (
            (_rotation_error(rows_at, candidate), candidate)
            for candidate in _candidate_rotations(width, tables)
        ),
        key=lambda pair: pair[0],
    )
    return rotation if error <= _TOLERANCE.get(probed[0][0].dtype, _ROUNDED_TOLERANCE) else None


def _rotation_error(rows_at: Sequence[Tensor], rotation: KeyRotation) -> float:
    """Return the largest distance of rows from their expected rotation, relative to their norm."""
    order = list(rotation.order)
    first, width = rows_at[0][:, order], rows_at[0].shape[-1]
    frequencies = torch.tensor(rotation.frequencies, dtype=torch.float64, device="cpu")
    a, b = torch.split(first, width // 2, -1)
    worst = 0.0
    for position, rows in zip(PROBED_POSITIONS, rows_at, strict=True):
        angles = position * frequencies
        expected = torch.cat(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1
        )
        worst = max(worst, ((rows[:, order] - expected).norm() / first.norm()).item())
    return worst


def _candidate_rotations(width: int, tables: Sequence[Tensor]) -> Iterator[KeyRotation]:
    """Yield no rotation, then every way to apply each table to a head of `width` components.

    A table may rotate the first or the last components of a head (partial RoPE), pair halves or
    neighbours, and turn in either direction. Example, width 8 and a table of 2 pairs at the
    beginning: components 0 to 3 are rotated. As halves the pairs are (0, 2), (1, 3) and the order
    is (0, 1, 4, 5, 2, 3, 6, 7); as neighbours they are (0, 1), (2, 3): (0, 2, 4, 5, 1, 3, 6, 7).
    """
    yield KeyRotation((0.0,) * (width // 2), tuple(range(width)))
    for table in tables:
        pairs = len(table)
        if not 0 < 2 * pairs <= width:
            continue
        for begin in sorted({0, width - 2 * pairs}):
            rotated = range(begin, begin + 2 * pairs)
            unrotated = [index for index in range(width) if index not in rotated]
            half = len(unrotated) // 2
            for firsts, seconds in (
                (rotated[:pairs], rotated[pairs:]),
                (rotated[::2], rotated[1::2]),
            ):
                order = (*firsts, *unrotated[:half], *seconds, *unrotated[half:])
                for sign in (1, -1):
                    frequencies = [sign * value for value in table.double().tolist()]
                    yield KeyRotation((*frequencies, *(0.0,) * half), order)
