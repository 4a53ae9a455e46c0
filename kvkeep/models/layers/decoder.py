"""A model's weights and the executor that computes with them."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kvkeep.cache import Bits, KVCache
from kvkeep.models.layers.executor import AnyStep, Executor, TorchExecutor
from kvkeep.models.layers.network import Network, tensor_shapes
from kvkeep.models.spec.cells import new_cache
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.packing import Matrix


class Decoder:
    """A model's weights and the executor that computes with them.

    Args:
        tensors: weights by Hugging Face name, all of one dtype and on one device.
        packed: quantised matrices by name, which compiled kernels read; may be empty. If the
            executor reads a matrix packed, `tensors` need not hold it.
        executor: chosen when the model is loaded (`kvkeep.executors`); torch by default.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        packed: Mapping[str, Matrix] | None = None,
        executor: Executor | None = None,
    ):
        self.spec = spec
        self.tensors = tensors
        self.packed = packed or {}
        self.executor = executor or TorchExecutor(Network(spec, tensors))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """All weights as tensors; a matrix that is stored packed only is unpacked on access."""
        return _UnpackedWeights(self)

    def forward(self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None) -> Tensor:
        """Evaluate `tokens: [n]` into a cache's step; see `Executor.forward`."""
        return self.executor.forward(tokens, step, input_norms)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to `[n, vocab]`, float32. Raises NonFiniteLogits."""
        return self.executor.logits(hidden)

    def value_norms(self, values: Tensor) -> Tensor:
        """Return the norm of each value after the output projection, `[layers, heads, n]` float32.

        values: `[layers, kv_heads, n, head_dim]` of the global layers; each query head projects the
            values of its KV head by its own part of the output projection.
        """
        spec, weights, norms = self.spec, self.weights, []
        heads_per_kv_head = spec.heads // spec.kv_heads
        for layer, layer_values in zip(spec.layers_with_cells(spec.groups[0]), values, strict=True):
            weight = weights[f"model.layers.{layer}.self_attn.o_proj.weight"]
            weight_per_head = weight.view(-1, spec.heads, spec.head_dim).permute(1, 2, 0)
            repeated_values = layer_values.to(weight.dtype).repeat_interleave(heads_per_kv_head, 0)
            norm = (repeated_values @ weight_per_head).float().norm(dim=-1)
            norms.append(norm.clamp_min(torch.finfo(torch.float32).tiny))  # above 0 for logarithms
        return torch.stack(norms)

    def new_cache(
        self,
        bits: Bits = Bits(),  # noqa: B008
        max_kv_size: int | None = None,
    ) -> KVCache:
        """Return an empty cache. bits: of stored cells. max_kv_size: the policy's budget."""
        return new_cache(self.spec, self.tensors, bits, max_kv_size)


class _UnpackedWeights(Mapping[str, Tensor]):
    """A decoder's weights by name, unpacked on access."""

    def __init__(self, decoder: Decoder):
        self._decoder = decoder
        tensors, packed = decoder.tensors, decoder.packed
        self._names = dict.fromkeys([*tensors, *(set(tensor_shapes(decoder.spec)) & set(packed))])

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._decoder.tensors.get(name)
        return self._decoder.executor.unpack_matrix(name) if tensor is None else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
