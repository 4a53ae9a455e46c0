"""What kvkeep must know of a model of transformers, found by looking at it; or why it cannot be.

A model is taken only if what its layers do was seen to be what kvkeep does with their cells. One
token is put at several positions: alone, it attends to itself, so that nothing of what layers read
depends on where it is, and its keys and queries are to be rotations of what they are at 0. With the
rotary embeddings held at 0, nothing at all may depend on it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.hooks import body_of
from kvkeep.integrations.transformers.layers import Adapted, Attends
from kvkeep.integrations.transformers.probe import Seen, look
from kvkeep.integrations.transformers.rotation import PLACES, Rotation, find_rotation
from kvkeep.integrations.transformers.states import keeps_states
from kvkeep.integrations.transformers.step_cache import layers_of
from kvkeep.models.spec.model_spec import ModelSpec, RopeSpec

_ANYWHERE = 100_003  # a position beyond those for which models change what they do


def adapted(model: PreTrainedModel, configs: Sequence[PreTrainedConfig]) -> Adapted:
    """What there is to know of a model. configs: its own first, that of its text.

    Raises UnsupportedModel, naming the reason.
    """
    body, config, token = body_of(model), configs[0], 1
    _require(
        not getattr(config, "kv_lora_rank", None),
        "its attention is latent (MLA): what layers keep of a token are no keys and values, but "
        "what they make these of",
    )
    _require(
        "dynamic" not in rope_kinds(config),
        "its RoPE is dynamic: frequencies change with the length of the text, which keys that "
        "are written once cannot follow",
    )
    seen = [look(body, configs, token, rotated=place).seen for place in PLACES]
    first = seen[0]
    _require(bool(first), "none of its layers attends by way of transformers' attention interface")
    _require_still(body, configs, token, first)
    rotations = [_rotation(body, [run[i] for run in seen]) for i in range(len(first))]
    return _Description(model, config, first, rotations).adapted()


def rope_kinds(config: PreTrainedConfig) -> list[str]:
    """The kinds of RoPE that its layers have."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters.get("rope_type")]
    kinds += [each.get("rope_type") for each in parameters.values() if isinstance(each, dict)]
    return sorted({kind for kind in kinds if kind})


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise UnsupportedModel(why)


def _require_still(
    body: nn.Module, configs: Sequence[PreTrainedConfig], token: int, first: Sequence[Seen]
) -> None:
    """That nothing but rotary embeddings knows of positions."""
    why = (
        "positions enter it in another way than by rotary embeddings (a table that is added to "
        "embeddings, or queries that are scaled by their position); its cells mean something at "
        "one place alone"
    )
    for position in (1, _ANYWHERE):  # a table has a second row, and seldom the other one
        away = look(body, configs, token, position=position).seen
        for one, other in zip(first, away, strict=True):
            _require(torch.equal(one.q, other.q) and torch.equal(one.k, other.k), why)


def _rotation(body: nn.Module, runs: Sequence[Seen]) -> Rotation:
    """Of one layer, which was seen at each of PLACES."""
    found = find_rotation([(run.q, run.k) for run in runs], list(_tables(body)))
    if found is None:
        raise UnsupportedModel(
            f"the keys of layer {runs[0].layer} at another position are no rotation of what they "
            "are at 0 by any frequencies that the model has (they may be normed after they are "
            "rotated); kvkeep could not see them from elsewhere"
        )
    return found


def _tables(body: nn.Module) -> Iterator[Tensor]:
    """All frequencies that the model holds."""
    for module in body.modules():
        for name, found in {**vars(module), **module._buffers}.items():
            frequencies = name.endswith("inv_freq") and not name.startswith("original")
            if frequencies and isinstance(found, Tensor) and found.dim() == 1:
                yield found.detach().float().cpu()


_Each = TypeVar("_Each")


class _Description:
    """Puts together what was seen of a model's layers, and refuses what does not go together."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: PreTrainedConfig,
        seen: Sequence[Seen],
        rotations: Sequence[Rotation],
    ):
        self.model = model
        self.config = config
        self.seen = seen
        self.rotations = rotations
        windows = {each.window for each in seen}
        self.only_local = None not in windows
        _require(len(windows - {None}) <= 1, f"its layers see windows of {windows - {None}} tokens")
        self.window = next(iter(windows - {None}), 0) or 0
        every = range(len(seen))
        local = () if self.only_local else tuple(i for i in every if seen[i].window is not None)
        self.groups = [tuple(i for i in every if i not in local), local]

    def adapted(self) -> Adapted:
        spec = self._spec()
        calls = tuple(self._call(spec, index) for index in range(len(self.seen)))
        sinks = [each.sinks.detach().float() for each in self.seen if each.sinks is not None]
        _require(len(sinks) in (0, len(calls)), "some of its layers have sinks, and others none")
        dtype = self._one("dtypes of keys", [each.k.dtype for each in self.seen])
        device = self._one("devices", [each.k.device for each in self.seen])
        return Adapted(spec, calls, sinks, dtype, device, layers_of(self.config))

    def _spec(self) -> ModelSpec:
        seen, (whole, local) = self.seen, self.groups
        heads = self._one("heads", [each.q.shape[0] for each in seen])
        rope, local_rope = self._rope(whole), self._rope(local) if local else None
        turns = [self.rotations[i].rotates for i in range(len(seen))]
        rotates = {i for group in self.groups for i in group if any(turns[j] for j in group)}
        kv_heads, head_dim = self._shape(whole)
        local_heads, local_dim = self._shape(local) if local else (kv_heads, head_dim)
        sizes = self._sizes()
        spec = ModelSpec(
            architecture=type(self.model).__name__,
            layers=len(seen),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            tied_head=False,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            norm_eps=0.0,
            attention_multiplier=seen[0].asked.scale,
            attention_softcap=self._one("softcaps", [each.asked.softcap for each in seen]),
            local_layers=local,
            window=self.window if local else 0,
            local_rope=None if local_rope in (None, rope) else local_rope,
            local_kv_heads=0 if local_heads == kv_heads else local_heads,
            local_head_dim=0 if local_dim == head_dim else local_dim,
            unrotated_layers=tuple(i for i in rotates if not turns[i]),
            shared_kv_layers=sum(not each.own for each in seen),
            sinks=seen[0].sinks is not None,
            recurrent=keeps_states(self.config),
            **sizes,
        )
        for index, each in enumerate(seen):
            source = spec.kv_source(index)
            holds = (source == index) == each.own and seen[source].layer == each.layer
            _require(holds, "its layers share keys in another way than the last ones do")
        return spec

    def _sizes(self) -> dict[str, Any]:
        config, model = self.config, self.model
        trained = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        parameters = getattr(config, "rope_parameters", None) or {}
        if self._kind() == "longrope":
            trained = int(parameters.get("original_max_position_embeddings", trained))
        ends = model.generation_config.eos_token_id if model.can_generate() else config.eos_token_id
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        wide = getattr(config, "intermediate_size", None)
        return {
            "vocab_size": int(config.vocab_size),
            "hidden_size": int(config.hidden_size),
            "intermediate_size": max(wide if isinstance(wide, list) else [wide or 0]),
            "max_positions": min(trained, self.window) if self.only_local else trained,
            "bos_token_id": getattr(config, "bos_token_id", None),
            "eos_token_ids": tuple(int(end) for end in ends),
        }

    def _kind(self) -> str:
        return next((kind for kind in rope_kinds(self.config) if kind != "default"), "default")

    def _rope(self, group: Sequence[int]) -> RopeSpec:
        found = {self.rotations[i].frequencies for i in group if self.rotations[i].rotates}
        _require(len(found) <= 1, "its layers rotate keys by several tables of frequencies")
        none = (0.0,) * (self.seen[group[0]].q.shape[-1] // 2)
        return RopeSpec(self._kind(), next(iter(found), none))

    def _shape(self, group: Sequence[int]) -> tuple[int, int]:
        of = [(self.seen[i].k.shape[0], self.seen[i].k.shape[1]) for i in group]
        return self._one("KV heads and widths", of)

    def _one(self, what: str, of: Sequence[_Each]) -> _Each:
        _require(len(set(of)) == 1, f"its layers have different {what}: {list(dict.fromkeys(of))}")
        return of[0]

    def _call(self, spec: ModelSpec, index: int) -> Attends:
        each, group = self.seen[index], spec.group_of(index)
        orders = Counter(self.rotations[i].order for i in group.layers if self.rotations[i].rotates)
        _require(len(orders) <= 1, "its layers pair the numbers of a head in several ways")
        order = next(iter(orders), ())
        moved = order != tuple(sorted(order))
        keepers = spec.layers_with_cells(group)
        return Attends(
            module=each.module,
            layer=each.layer,
            asked=each.asked,
            index=keepers.index(spec.kv_source(index)),
            own=each.own,
            order=_indices(order, each.q.device) if moved else None,
            factor=each.asked.scale / self.seen[0].asked.scale,
        )


def _indices(order: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(order, dtype=torch.int64, device=device)
