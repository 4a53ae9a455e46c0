"""Measurement of the basis in which the codecs small and smaller store cells."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.cache import Block, Cells, Layout
from kvkeep.compression.methods.attention import group_by_kv_head
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.calibrate import Progress
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Full
from kvkeep.session.evaluation import evaluate
from kvkeep.session.memory import Memory
from kvkeep.storage.lossy.basis import CellBasis, GroupBasis, layer_groups
from kvkeep.storage.lossy.cells import decode_cells, encode_cells, rotate

MAX_GROUP_LAYERS, MAX_WIDTH = 5, 2048  # of a group: layers that are coded together, and numbers
PASSAGE_TOKENS, FOLLOWING_TOKENS = 1024, 256  # of a passage; predicted after one
MIN_PASSAGES, MAX_PASSAGES = 5, 24  # to which components are fitted
PROBES = 2  # passages on which loss is measured, which components are not fitted to
TARGETS = {"small": 1.1e-3, "smaller": 4.6e-3}  # KL divergence of a codec, in nats
_SINKS = 4  # the first cells of a passage are not measured: they are stored exactly
_STEP_TOKENS = 256  # evaluated at once: the newest queries of each step are measured
_NOISE = 0.3  # of a layer, relative to its cells, when the loss is measured that it causes
_MIN_WEIGHT, _MIN_SENSITIVITY = 1e-3, 0.03  # relative to the mean, and to the median
_MIN_SPREAD = 0.4  # steps: components of a smaller standard deviation are left out
_MAX_DISTANCE, _DISTANCES = 1000, 41  # from a query to the keys that it attends to
_SEARCH_STEPS = 4  # in which the step of a codec is found
_LOSS_EXPONENT = 0.55  # of the ratio of losses by which the step changes: about a square root


@torch.inference_mode()
def measure_basis(
    model: LoadedModel, ids: Sequence[int], progress: Progress | None = None
) -> CellBasis:
    """Evaluate text and return the components of its cells, and the step of each codec.

    ids: some ten thousand tokens, of the kind of text that the model will be used with. Raises
    InvalidArgument for too few tokens.
    """
    ids = validation.token_ids("ids", ids, model.spec.vocab_size)
    progress = validation.progress(progress) or (lambda tokens: None)
    if len(ids) < min_basis_tokens():
        raise InvalidArgument(
            f"a basis needs {min_basis_tokens()} tokens or more; found {len(ids)}"
        )
    frequencies, probes, sums = _frequencies(model), list[_LossProbe](), _CellSums(model)
    for start in _probe_starts(ids):
        part = ids[start : start + PASSAGE_TOKENS + FOLLOWING_TOKENS]
        probes.append(_LossProbe.evaluate(model, part, PASSAGE_TOKENS, frequencies, progress))
    for start in _passage_starts(ids):
        sums.add(ids[start : start + PASSAGE_TOKENS], frequencies, progress)
    # A shorter one: it is evaluated once for each layer, with other keys and with other values.
    shorter = [*probes[0].ids[: PASSAGE_TOKENS * 5 // 8 + FOLLOWING_TOKENS // 2]]
    probe = _LossProbe.evaluate(model, shorter, PASSAGE_TOKENS * 5 // 8, frequencies, progress)
    key_weights = sums.key_weights(frequencies)
    sensitivities = _sensitivities(probe, key_weights)
    return _fit(model, sums, key_weights, sensitivities, probes)


def count_basis_tokens(model: LoadedModel, token_count: int) -> int:
    """Return how many tokens `measure_basis` evaluates for a text of `token_count`."""
    ids, layers = range(token_count), model.decoder.new_cache().layout.layers
    probes = PROBES * (PASSAGE_TOKENS + 2 * _SEARCH_STEPS * FOLLOWING_TOKENS)
    passages = PASSAGE_TOKENS * len(_passage_starts(ids))
    return probes + passages + PASSAGE_TOKENS * 5 // 8 + layers * FOLLOWING_TOKENS


def min_basis_tokens() -> int:
    """Return how many tokens a basis needs."""
    return (MIN_PASSAGES + PROBES) * (PASSAGE_TOKENS + FOLLOWING_TOKENS)


def _probe_starts(ids: Sequence[int]) -> list[int]:
    """Return the starts of probes: near the middle of a text, and at its end."""
    room = len(ids) - PASSAGE_TOKENS - FOLLOWING_TOKENS
    return [room * (index + 1) // PROBES for index in range(PROBES)]


def _passage_starts(ids: Sequence[int]) -> list[int]:
    """Return the starts of passages that the components are fitted to, apart from the probes."""
    length, probes = PASSAGE_TOKENS + FOLLOWING_TOKENS, _probe_starts(ids)
    starts, at = list[int](), 0
    while at + PASSAGE_TOKENS <= len(ids):
        probe = next((p for p in probes if p - PASSAGE_TOKENS < at < p + length), None)
        if probe is not None:
            at = probe + length
        else:
            starts.append(at)
            at += PASSAGE_TOKENS
    stride = max(1, math.ceil(len(starts) / MAX_PASSAGES))
    return starts[::stride]


def _frequencies(model: LoadedModel) -> Tensor:
    """Return the rotation of each layer of the cache, see `CellBasis.frequencies`."""
    cache = model.decoder.new_cache()
    rope, layers = cache.rope, cache.layout.layers
    frequencies = rope.inverse_frequencies.expand(layers, -1).clone()
    frequencies[list(rope.unrotated_layers)] = 0
    return frequencies


def _group_layers(layout: Layout) -> int:
    """Return how many layers are coded together."""
    fitting = max(1, MAX_WIDTH // (layout.kv_heads * layout.head_dim))
    return min(MAX_GROUP_LAYERS, fitting, layout.layers)


def _layer_groups(layout: Layout) -> list[slice]:
    return layer_groups(layout.layers, _group_layers(layout))


def _rows(cells: Tensor) -> Tensor:
    """Return `[layers, kv_heads, n, head_dim]` as `[n, width]`."""
    return cells.permute(2, 0, 1, 3).flatten(1)


@dataclass
class _LossProbe:
    """A passage, and what the model predicts after it.

    memory: of the passage. keys: before rotation, and values: `[layers, kv_heads, n, head_dim]`.
    log_probs: `[FOLLOWING_TOKENS, vocab]`.
    """

    memory: Memory
    ids: Sequence[int]
    following: Sequence[int]
    frequencies: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    log_probs: Tensor
    progress: Progress

    @classmethod
    def evaluate(
        cls,
        model: LoadedModel,
        ids: Sequence[int],
        length: int,
        frequencies: Tensor,
        progress: Progress,
    ) -> "_LossProbe":
        """ids: the passage of so many tokens, and those that follow."""
        memory, following = Memory(model.decoder, Full(len(ids))), ids[length:]
        for result in evaluate(memory, ids[:length], _STEP_TOKENS):
            progress(result.hidden.shape[0])
        cells = Cells.concatenate([part for _, part in memory.cache.read(0, memory.cache.cells)])
        keys = rotate(cells.keys.cpu().float(), frequencies, -cells.positions)
        values, positions = cells.values.cpu().float(), cells.positions
        log_probs = _predict(memory.fork(), following)
        return cls(
            *(memory, ids, following, frequencies, keys, values, positions, log_probs, progress)
        )

    def loss(self, keys: Tensor | None = None, values: Tensor | None = None) -> float:
        """Return the KL divergence of predictions with other keys or values, before rotation."""
        state = self.memory.state()
        segment = copy.copy(state.cache.segments[0])
        cells = segment.block.slots
        count, dtype, device = segment.length, cells.keys.dtype, cells.keys.device
        new_keys, new_values = cells.keys[:, :, :count].clone(), cells.values[:, :, :count].clone()
        if keys is not None:
            rotated = rotate(keys, self.frequencies, self.positions).to(device, dtype)
            new_keys[:, :, _SINKS:] = rotated[:, :, _SINKS:]
        if values is not None:
            new_values[:, :, _SINKS:] = values[:, :, _SINKS:].to(device, dtype)
        part = cells.part(slice(0, count))
        segment.block = Block(replace(part, stored_keys=new_keys, stored_values=new_values))
        cache = replace(state.cache, segments=(segment,))
        memory = Memory.from_state(
            self.memory.decoder, self.memory.policy, self.memory.bits, replace(state, cache=cache)
        )
        log_probs = _predict(memory, self.following)
        self.progress(len(self.following))
        return float((self.log_probs.exp() * (self.log_probs - log_probs)).sum(-1).mean())


def _predict(memory: Memory, following: Sequence[int]) -> Tensor:
    """Return the log-probabilities of the tokens that follow, `[n, vocab]`."""
    assert memory.hidden is not None
    hidden = [memory.hidden]
    hidden += [result.hidden for result in evaluate(memory, following, _STEP_TOKENS)]
    logits: Tensor = memory.decoder.logits(torch.cat(hidden)[:-1])
    return logits.log_softmax(-1)


class _CellSums:
    """Sums over the cells of passages, and over the queries that attend to them."""

    def __init__(self, model: LoadedModel):
        self.model = model
        layout = self.layout = model.decoder.new_cache().layout
        self.count = 0
        heads = layout.layers, layout.kv_heads
        self.query_outer = torch.zeros(
            *heads, layout.head_dim, layout.head_dim, dtype=torch.float32, device="cpu"
        )
        self.query_count = 0
        width = layout.kv_heads * layout.head_dim
        sizes = [(g.stop - g.start) * width for g in _layer_groups(layout)]
        self.sums = {
            name: [torch.zeros(size, dtype=torch.float32, device="cpu") for size in sizes]
            for name in ("keys", "values")
        }
        self.outers = {
            name: [torch.zeros(size, size, dtype=torch.float32, device="cpu") for size in sizes]
            for name in ("keys", "values")
        }

    def add(self, ids: Sequence[int], frequencies: Tensor, progress: Progress) -> None:
        """Evaluate a passage, and add its cells and queries."""
        memory = Memory(self.model.decoder, Full(len(ids)))
        memory.cache.observe()
        for result in evaluate(memory, ids, _STEP_TOKENS):
            assert memory.cache.observer is not None
            queries = memory.cache.observer.queries()
            assert queries is not None
            samples = group_by_kv_head(queries.vectors, self.layout.kv_heads).float().cpu()
            self.query_outer += samples.transpose(-1, -2) @ samples
            self.query_count += samples.shape[2]
            progress(result.hidden.shape[0])
        cells = Cells.concatenate([part for _, part in memory.cache.read(0, memory.cache.cells)])
        keys = rotate(cells.keys.cpu().float(), frequencies, -cells.positions)
        for name, vectors in (("keys", keys), ("values", cells.values.cpu().float())):
            for index, layers in enumerate(_layer_groups(self.layout)):
                rows = _rows(vectors[layers, :, _SINKS:])
                self.sums[name][index] += rows.sum(0)
                self.outers[name][index] += rows.T @ rows
        self.count += len(ids) - _SINKS

    def key_weights(self, frequencies: Tensor) -> Tensor:
        """Return symmetric matrices `[layers, kv_heads, head_dim, head_dim]` that weight keys.

        The root of the second moment of queries, so that an error in a key weighs what it changes
        in logits, times the spread of the head's values, which a changed attention weight moves.
        """
        moments = _turned(self.query_outer / self.query_count, frequencies)
        eigenvalues, eigenvectors = torch.linalg.eigh(moments.double())
        floor = _MIN_WEIGHT * eigenvalues.mean(-1, keepdim=True)
        roots = eigenvalues.clamp(min=floor).sqrt().unsqueeze(-2)
        weights = (eigenvectors * roots) @ eigenvectors.transpose(-1, -2)
        heads, head_dim = self.layout.kv_heads, self.layout.head_dim
        variances = [
            (outer.diagonal() / self.count - (total / self.count).square())
            for outer, total in zip(self.outers["values"], self.sums["values"], strict=True)
        ]
        spread = torch.cat(variances).view(-1, heads, head_dim).sum(-1).sqrt()
        weighted: Tensor = weights * spread[..., None, None]
        return weighted.float()

    def covariance(self, name: str, index: int) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of keys or values of a group of layers, float64."""
        mean = self.sums[name][index].double() / self.count
        return mean, self.outers[name][index].double() / self.count - mean.outer(mean)


def _turned(moments: Tensor, frequencies: Tensor) -> Tensor:
    """Return the mean of second moments of queries, as unrotated keys see them from distances."""
    steps = torch.arange(_DISTANCES, dtype=torch.int64, device="cpu")
    distances = steps * _MAX_DISTANCE // (_DISTANCES - 1)
    turned = torch.zeros_like(moments)
    for distance in distances:
        positions = distance.expand(moments.shape[-1])
        rows = rotate(moments, frequencies, positions)
        turned += rotate(rows.transpose(-1, -2), frequencies, positions)
    return turned / len(distances)


def _sensitivities(probe: _LossProbe, key_weights: Tensor) -> Tensor:
    """Return the loss for a unit of squared error in keys and in values of a layer, `[2, layers]`.

    Errors in keys are measured after weighting. Noise is added to one layer at a time.
    """
    layers, inverse = len(key_weights), torch.linalg.inv(key_weights)
    result = torch.zeros(2, layers, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for layer in range(layers):
        for row, cells in enumerate((probe.keys, probe.values)):
            noise = torch.empty_like(cells[layer]).normal_(generator=generator)
            spread = cells[layer] - cells[layer].mean(1, keepdim=True)
            if row == 0:
                spread = spread @ key_weights[layer]
            noise *= _NOISE * spread[:, _SINKS:].square().mean().sqrt()
            energy = noise[:, _SINKS:].square().sum((0, 2)).mean()  # of a cell
            changed = cells.clone()
            changed[layer] += noise @ inverse[layer] if row == 0 else noise
            loss = probe.loss(changed) if row == 0 else probe.loss(None, changed)
            result[row, layer] = loss / energy
    return result.clamp(min=_MIN_SENSITIVITY * result.median(1, keepdim=True).values)


def _fit(
    model: LoadedModel,
    sums: _CellSums,
    key_weights: Tensor,
    sensitivities: Tensor,
    probes: Sequence[_LossProbe],
) -> CellBasis:
    """Return the basis of principal components, and of each codec the step with its target loss."""
    head_dim = sums.layout.head_dim
    identity = torch.eye(head_dim, dtype=torch.float32, device="cpu").expand_as(key_weights)
    roots = sensitivities.sqrt()[..., None, None, None]
    weights = {"keys": key_weights * roots[0], "values": identity * roots[1]}
    groups = {
        name: [
            _Components.of(*sums.covariance(name, index), weights[name][layers])
            for index, layers in enumerate(_layer_groups(sums.layout))
        ]
        for name in weights
    }

    def basis(step: float, steps: Mapping[str, float]) -> CellBasis:
        keys, values = (tuple(g.basis(step) for g in groups[name]) for name in ("keys", "values"))
        fingerprint, layout = model.fingerprint.to_dict(), sums.layout.plain
        return CellBasis(
            *(
                fingerprint,
                model.name,
                layout,
                _group_layers(layout),
                steps,
                probes[0].frequencies,
                keys,
                values,
            )
        )

    found = list[float]()
    for target in TARGETS.values():
        variances = torch.cat([group.variances for parts in groups.values() for group in parts])
        step = _step_of_error(variances, target)
        for _ in range(_SEARCH_STEPS):
            loss = mean(_coding_loss(probe, basis(step, {}), 1.0) for probe in probes)
            step *= min(2.0, max(0.5, (target / loss) ** _LOSS_EXPONENT))
        found.append(step)
    names = zip(TARGETS, found, strict=True)
    return basis(found[0], {name: step / found[0] for name, step in names})


def _coding_loss(probe: _LossProbe, basis: CellBasis, step: float) -> float:
    """Return the loss of a passage whose cells are coded and decoded."""
    rotated = rotate(probe.keys, probe.frequencies, probe.positions).to(basis.layout.dtype)
    values = probe.values.to(basis.layout.dtype)
    decoded = [
        decode_cells(
            encode_cells(cells, probe.positions, basis, step, is_key),
            *(probe.positions, basis, step, is_key),
        ).float()
        for cells, is_key in ((rotated, True), (values, False))
    ]
    decoded[0] = rotate(decoded[0], probe.frequencies, -probe.positions)
    return probe.loss(*decoded)


def _step_of_error(variances: Tensor, error: float) -> float:
    """Return the step with which the squared errors of components of these variances add up."""
    low, high = 1e-9, 1e9
    for _ in range(100):
        step = math.sqrt(low * high)
        sum_of_errors = float(variances.clamp(max=step**2 / 12).sum())
        low, high = (step, high) if sum_of_errors < error else (low, step)
    return step


def _block_diagonal(blocks: Tensor) -> Tensor:
    """Return a matrix with `[layers, kv_heads, head_dim, head_dim]` blocks along its diagonal."""
    blocks = blocks.flatten(0, 1)
    count, size, _ = blocks.shape
    matrix = torch.zeros(count, size, count, size, dtype=blocks.dtype, device="cpu")
    for index, block in enumerate(blocks):
        matrix[index, :, index] = block
    return matrix.view(count * size, count * size)


@dataclass(frozen=True)
class _Components:
    """The principal components of a group of layers, after weighting. float64.

    variances: `[width]`, the largest first. encode, decode: `[width, width]`.
    """

    mean: Tensor
    variances: Tensor
    encode: Tensor
    decode: Tensor

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, weights: Tensor) -> "_Components":
        """weights: `[layers, kv_heads, head_dim, head_dim]`, symmetric."""
        blocks = _block_diagonal(weights.double())
        variances, vectors = torch.linalg.eigh(blocks @ covariance @ blocks)
        variances, vectors = variances.flip(0).clamp(min=0), vectors.flip(1)
        inverse = _block_diagonal(torch.linalg.inv(weights.double()))
        return cls(mean, variances, blocks @ vectors, vectors.T @ inverse)

    def basis(self, step: float) -> GroupBasis:
        """Return those that vary by more than a part of a step, in multiples of the step."""
        count = int((self.variances.sqrt() > _MIN_SPREAD * step).sum())
        decode = (self.decode[:count] * step).half()
        encode = (self.encode[:, :count] / step).half()
        return GroupBasis(self.mean.float(), decode.contiguous(), encode.contiguous())
