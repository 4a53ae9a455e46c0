"""Measurement of the basis in which the codecs small and smaller store cells."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.calibrate import Progress
from kvkeep.evaluate.cell_sums import CellSums, cell_groups, group_layers
from kvkeep.evaluate.loss_probe import SINKS, LossProbe, coding_loss
from kvkeep.loaded_model import LoadedModel
from kvkeep.storage.lossy.basis import CellBasis, GroupBasis

PASSAGE_TOKENS, FOLLOWING_TOKENS = 1024, 256  # of a passage; predicted after one
MIN_PASSAGES, MAX_PASSAGES = 5, 24  # to which components are fitted
PROBES = 2  # passages on which loss is measured, which components are not fitted to
TARGETS = {"small": 1.1e-3, "smaller": 4.6e-3}  # KL divergence of a codec, in nats
_NOISE = 0.3  # of a layer, relative to its cells, when the loss is measured that it causes
_MIN_SENSITIVITY = 0.03  # relative to the median
_MIN_SPREAD = 0.4  # steps: components of a smaller standard deviation are left out
_SEARCH_STEPS = 4  # in which the step of a codec is found
_LOSS_EXPONENT = 0.55  # of the ratio of losses by which the step changes: about a square root
_TINY = 1e-12  # least loss or energy that counts: below it there is only rounding, of either sign


@torch.inference_mode()
def measure_basis(
    model: LoadedModel, ids: Sequence[int], progress: Progress | None = None
) -> CellBasis:
    """Evaluate text and return the components of its cells, and the step of each codec.

    ids: some ten thousand tokens, of the kind of text that the model will be used with. Raises
    InvalidArgument for too few tokens, and for a model or text whose cells have no basis.
    """
    ids = validation.token_ids("ids", ids, model.spec.vocab_size)
    progress = validation.progress(progress) or (lambda tokens: None)
    if len(ids) < min_basis_tokens():
        raise InvalidArgument(
            f"a basis needs {min_basis_tokens()} tokens or more; found {len(ids)}"
        )
    frequencies, probes, sums = _frequencies(model), list[LossProbe](), CellSums(model)
    for start in _probe_starts(ids):
        part = ids[start : start + PASSAGE_TOKENS + FOLLOWING_TOKENS]
        probes.append(LossProbe.evaluate(model, part, PASSAGE_TOKENS, frequencies, progress))
    for start in _passage_starts(ids):
        sums.add(ids[start : start + PASSAGE_TOKENS], frequencies, progress)
    # A shorter one: it is evaluated once for each layer, with other keys and with other values.
    shorter = [*probes[0].ids[: PASSAGE_TOKENS * 5 // 8 + FOLLOWING_TOKENS // 2]]
    probe = LossProbe.evaluate(model, shorter, PASSAGE_TOKENS * 5 // 8, frequencies, progress)
    key_weights = sums.key_weights(frequencies)
    sensitivities = _sensitivities(probe, key_weights)
    basis = _fit(model, sums, key_weights, sensitivities, probes)
    _require_usable(basis)
    return basis


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


def _sensitivities(probe: LossProbe, key_weights: Tensor) -> Tensor:
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
            noise *= _NOISE * spread[:, SINKS:].square().mean().sqrt()
            energy = noise[:, SINKS:].square().sum((0, 2)).mean()  # of a cell
            changed = cells.clone()
            changed[layer] += noise @ inverse[layer] if row == 0 else noise
            loss = probe.loss(changed) if row == 0 else probe.loss(None, changed)
            result[row, layer] = max(loss, _TINY) / energy.clamp(min=_TINY)
    return result.clamp(min=_MIN_SENSITIVITY * result.median(1, keepdim=True).values)


def _fit(
    model: LoadedModel,
    sums: CellSums,
    key_weights: Tensor,
    sensitivities: Tensor,
    probes: Sequence[LossProbe],
) -> CellBasis:
    """Return the basis of principal components, and of each codec the step with its target loss."""
    head_dim = sums.layout.head_dim
    identity = torch.eye(head_dim, dtype=torch.float32, device="cpu").expand_as(key_weights)
    roots = sensitivities.sqrt()[..., None, None, None]
    weights = {"keys": key_weights * roots[0], "values": identity * roots[1]}
    groups = {
        name: [
            _Components.of(*sums.covariance(name, index), weights[name][layers])
            for index, layers in enumerate(cell_groups(sums.layout))
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
                group_layers(layout),
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
            loss = max(_TINY, mean(coding_loss(probe, basis(step, {}), 1.0) for probe in probes))
            step *= min(2.0, max(0.5, (target / loss) ** _LOSS_EXPONENT))
        found.append(step)
    names = zip(TARGETS, found, strict=True)
    return basis(found[0], {name: step / found[0] for name, step in names})


def _require_usable(basis: CellBasis) -> None:
    """Raise InvalidArgument for a basis that does not code cells."""
    for group in (*basis.keys, *basis.values):
        tensors = group.mean, group.decode, group.encode
        if not group.components or not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise InvalidArgument(
                "this text gives no basis of this model: its cells hardly vary, or hardly change "
                "what the model predicts. Take a varied text and a trained model, or use the "
                "codecs exact or zstd"
            )


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
