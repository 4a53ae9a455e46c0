"""The description of a transformers model as a `ModelSpec`, by probe forwards.

A probe evaluates one token at several positions. A single token attends only to itself, so the
input of each layer does not depend on the position. The model is accepted if keys and queries are
rotations of those at position 0, and if with rotary embeddings fixed at position 0 nothing depends
on the position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.interface import AttentionOptions, body_of
from kvkeep.integrations.transformers.probe import (
    PROBED_POSITIONS,
    KeyRotation,
    ProbedCall,
    find_rotation,
    probe_attention,
)
from kvkeep.integrations.transformers.step_cache import has_recurrent_states, new_cache_layers
from kvkeep.models.spec.model_spec import ModelSpec, RopeSpec

_T = TypeVar("_T")
_PROBE_TOKEN_ID = 1
_FAR_POSITION = 100_003  # beyond the positions at which models change their computation


@dataclass(frozen=True)
class AttentionCall:
    """The call of attention by layer i of the spec, in every forward.

    module: the attention module. layer_idx: the index under which the layer updates transformers'
    cache. cell_layer: the index of its cells among the layers of its group. owns_keys: False if it
    attends to an earlier layer's keys. permutation: of a head's components in a cell; None if
    it is the model's. query_factor: multiplies queries to bring the layer's scale to the model's.
    """

    module: nn.Module
    layer_idx: int
    options: AttentionOptions
    cell_layer: int
    owns_keys: bool
    permutation: Tensor | None
    query_factor: float


@dataclass(frozen=True)
class AttentionFacts:
    """The facts about a transformers model that kvkeep's steps need.

    spec: the layers that attend. calls: one for each of these layers. sinks: `[heads]` of each
    layer; empty without attention sinks. dtype, device: of keys and values. cache_layers: never
    written to; the model reads their types.
    """

    spec: ModelSpec
    calls: Sequence[AttentionCall]
    sinks: Sequence[Tensor]
    dtype: torch.dtype
    device: torch.device
    cache_layers: Sequence[Any]


def attention_facts(model: PreTrainedModel, configs: Sequence[PreTrainedConfig]) -> AttentionFacts:
    """Probe a model for the facts that kvkeep's steps need.

    configs: of its parts, the text's first. Raises UnsupportedModel, naming the reason.
    """
    body, config = body_of(model), configs[0]
    _require(
        not getattr(config, "kv_lora_rank", None),
        "it has latent attention (MLA): its layers do not cache keys and values",
    )
    _require(
        "dynamic" not in rope_types(config),
        "its RoPE is dynamic: frequencies change with the length of the text, and cells hold keys "
        "that are rotated once",
    )
    calls_by_position = [
        probe_attention(body, configs, _PROBE_TOKEN_ID, rotary_position=position)
        for position in PROBED_POSITIONS
    ]
    calls = calls_by_position[0]
    _require(bool(calls), "none of its layers uses transformers' attention interface")
    _require_only_rotary_positions(body, configs, calls)
    tables = list(_frequency_tables(body))
    rotations = [
        find_rotation(layer_calls, tables) for layer_calls in zip(*calls_by_position, strict=True)
    ]
    return _AttentionFactsBuilder(model, config, calls, rotations).build()


def rope_types(config: PreTrainedConfig) -> list[str]:
    """Return the types of RoPE in a config: one for all layers, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    types = [parameters.get("rope_type")]
    types += [nested.get("rope_type") for nested in parameters.values() if isinstance(nested, dict)]
    return sorted({rope_type for rope_type in types if rope_type})


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise UnsupportedModel(reason)


def _require_only_rotary_positions(
    body: nn.Module, configs: Sequence[PreTrainedConfig], calls: Sequence[ProbedCall]
) -> None:
    """Raise UnsupportedModel if other position ids change queries or keys. calls: at position 0."""
    reason = (
        "its positions are not only those of rotary embeddings (a table is added to embeddings, or "
        "queries are scaled by their position); its cells are valid at one position only"
    )
    # A table of positions has a second row, but rarely one for the far position.
    for position in (1, _FAR_POSITION):
        moved_calls = probe_attention(body, configs, _PROBE_TOKEN_ID, position=position)
        for call, moved in zip(calls, moved_calls, strict=True):
            _require(torch.equal(call.q, moved.q) and torch.equal(call.k, moved.k), reason)


def _frequency_tables(body: nn.Module) -> Iterator[Tensor]:
    """Yield the RoPE frequencies of each rotary embedding, `[pairs]`."""
    for module in body.modules():
        for name, value in {**vars(module), **module._buffers}.items():
            is_table = name.endswith("inv_freq") and not name.startswith("original")
            if is_table and isinstance(value, Tensor) and value.dim() == 1:
                yield value.detach().float().cpu()


@dataclass
class _AttentionFactsBuilder:
    """Builds the facts about a model from its calls of attention, and the rotation of each.

    Raises UnsupportedModel if layers differ in a way that a `ModelSpec` cannot express.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    calls: Sequence[ProbedCall]
    rotations: Sequence[KeyRotation]

    def __post_init__(self) -> None:
        windows = {call.window for call in self.calls if call.window}
        _require(len(windows) <= 1, f"its layers have different windows: {windows} tokens")
        self.window = max(windows, default=0)
        # If all layers have the window, they are global ones of a model of that trained length.
        self.all_local = all(call.window for call in self.calls)
        local = [i for i, call in enumerate(self.calls) if not self.all_local and call.window]
        self.local_layers = tuple(local)
        self.global_layers = tuple(i for i in range(len(self.calls)) if i not in local)

    def build(self) -> AttentionFacts:
        spec = self._model_spec()
        count = len(self.calls)
        attention_calls = [self._attention_call(spec, index) for index in range(count)]
        sinks = [call.sinks.detach().float() for call in self.calls if call.sinks is not None]
        _require(len(sinks) in (0, count), "some layers have attention sinks, others none")
        dtype = _common_value("dtypes of keys", [call.k.dtype for call in self.calls])
        device = _common_value("devices", [call.k.device for call in self.calls])
        cache_layers = new_cache_layers(self.config)
        return AttentionFacts(spec, attention_calls, sinks, dtype, device, cache_layers)

    def _model_spec(self) -> ModelSpec:
        calls, local = self.calls, self.local_layers
        rope, (kv_heads, head_dim) = self._rope_and_shape(self.global_layers)
        local_rope, (local_kv_heads, local_dim) = self._rope_and_shape(local or self.global_layers)
        spec = ModelSpec(
            architecture=type(self.model).__name__,
            layers=len(calls),
            heads=_common_value("heads", [call.q.shape[0] for call in calls]),
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            tied_head=False,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            norm_eps=0.0,
            attention_multiplier=calls[0].options.scale,
            attention_softcap=_common_value("softcaps", [c.options.softcap for c in calls]),
            local_layers=local,
            window=self.window if local else 0,
            local_rope=None if local_rope == rope else local_rope,
            local_kv_heads=0 if local_kv_heads == kv_heads else local_kv_heads,
            local_head_dim=0 if local_dim == head_dim else local_dim,
            unrotated_layers=self._unrotated_layers(),
            shared_kv_layers=sum(not call.owns_keys for call in calls),
            sinks=calls[0].sinks is not None,
            recurrent=has_recurrent_states(self.config),
            **self._config_fields(),
        )
        for index, call in enumerate(calls):
            kv_source = spec.kv_source(index)
            shares_keys = calls[kv_source].layer_idx == call.layer_idx
            is_consistent = (kv_source == index) == call.owns_keys and shares_keys
            _require(is_consistent, "its layers share keys, but not in the last layers only")
        return spec

    def _unrotated_layers(self) -> tuple[int, ...]:
        """Return the layers without RoPE of each group of which other layers have RoPE."""
        has_rope = [rotation.rotates for rotation in self.rotations]
        groups = [group for group in (self.global_layers, self.local_layers) if group]
        mixed_layers = {i for group in groups if any(has_rope[j] for j in group) for i in group}
        return tuple(i for i in sorted(mixed_layers) if not has_rope[i])

    def _config_fields(self) -> dict[str, Any]:
        """Return the fields of the spec that the config determines."""
        config, model = self.config, self.model
        # Models without a limit get a million positions.
        max_positions = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        parameters = getattr(config, "rope_parameters", None) or {}
        if self._rope_type() == "longrope":
            max_positions = int(parameters.get("original_max_position_embeddings", max_positions))
        eos = model.generation_config.eos_token_id if model.can_generate() else config.eos_token_id
        eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        width = getattr(config, "intermediate_size", None)
        widths = width if isinstance(width, list) else [width or 0]
        return {
            "vocab_size": int(config.vocab_size),
            "hidden_size": int(config.hidden_size),
            "intermediate_size": max(widths),
            "max_positions": min(max_positions, self.window) if self.all_local else max_positions,
            "bos_token_id": getattr(config, "bos_token_id", None),
            "eos_token_ids": tuple(map(int, eos_ids)),
        }

    def _rope_type(self) -> str:
        """Return the config's type of RoPE that is not "default", if there is one."""
        types = rope_types(self.config)
        return next((rope_type for rope_type in types if rope_type != "default"), "default")

    def _rope_and_shape(self, layers: Sequence[int]) -> tuple[RopeSpec, tuple[int, int]]:
        """Return RoPE and `(kv_heads, head_dim)`, which all of these layers must share."""
        rotations = [self.rotations[i] for i in layers]
        tables = {rotation.frequencies for rotation in rotations if rotation.rotates}
        _require(len(tables) <= 1, "its layers rotate keys with different frequency tables")
        no_rotation = (0.0,) * (self.calls[layers[0]].q.shape[-1] // 2)
        shapes = [(self.calls[i].k.shape[0], self.calls[i].k.shape[1]) for i in layers]
        rope = RopeSpec(self._rope_type(), next(iter(tables), no_rotation))
        return rope, _common_value("KV heads and widths", shapes)

    def _attention_call(self, spec: ModelSpec, index: int) -> AttentionCall:
        call, group = self.calls[index], spec.group_of(index)
        orders = {self.rotations[i].permutation for i in group.layers if self.rotations[i].rotates}
        _require(len(orders) <= 1, "its layers pair the dimensions of a head in different orders")
        order = next(iter(orders), ())
        permutation = torch.tensor(order, dtype=torch.int64, device=call.q.device)
        return AttentionCall(
            module=call.module,
            layer_idx=call.layer_idx,
            options=call.options,
            cell_layer=spec.layers_with_cells(group).index(spec.kv_source(index)),
            owns_keys=call.owns_keys,
            permutation=None if order == tuple(sorted(order)) else permutation,
            query_factor=call.options.scale / self.calls[0].options.scale,
        )


def _common_value(name: str, values: Sequence[_T]) -> _T:
    """Return the value of all layers. Raises UnsupportedModel if they differ."""
    distinct = list(dict.fromkeys(values))
    _require(len(distinct) == 1, f"its layers have different {name}: {distinct}")
    return values[0]
