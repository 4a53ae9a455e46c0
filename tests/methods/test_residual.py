"""Residual cells: clusters of what a KV head evicts, fitted to queries where these are known."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.candidates import GROUPS, HEAD_INDICES, HEADS, ROPE, SCALE, random_candidates
from torch import Tensor

from kvkeep.cache import AttentionConfig, Cells, RaggedCells
from kvkeep.compression.methods import clusters, residual, residual_fit
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.clusters import Clusters, HeadCells
from kvkeep.compression.methods.residual import FitContext, residual_cells
from tests.examples import examples

WIDTH = 16


def masks_of(candidates: Candidates, share: float, seed: int = 0) -> Tensor:
    """Return random cells that stay, a different number in each KV head."""
    return torch.rand(candidates.shape, generator=torch.Generator().manual_seed(seed)) < share


@settings(max_examples=examples(30))
@given(st.integers(1, 60), st.integers(0, 9), st.floats(0, 1), st.booleans(), st.integers(0, 2**30))
def test_clusters_have_the_mass_the_mean_and_the_range_of_what_is_evicted(
    count: int, clusters: int, share: float, compressed: bool, seed: int
) -> None:
    candidates = random_candidates(count, seed, compressed, statistics=bool(seed % 2))
    mask = masks_of(candidates, share, seed)
    (result,) = residual_cells([candidates], [mask], [clusters])
    assert result.residual is not None
    assert result.residual.all()
    assert len(result.residual) == result.total
    for layer, head, cells in result.heads():
        evicted = ~mask[layer, head]
        assert len(cells) <= min(clusters, int(evicted.sum()))
        if not len(cells):
            assert not (clusters and evicted.any())
            continue
        masses = candidates.bias[layer, head, evicted].exp()
        assert cells.bias is not None
        cluster_masses = cells.bias[0, 0].exp()
        assert cluster_masses.sum() == pytest.approx(float(masses.sum()), rel=1e-4)
        for stored, source in (
            (cells.keys, candidates.cells.keys),
            (cells.values, candidates.cells.values),
        ):
            mean = (masses[:, None] * source[layer, head, evicted]).sum(0)
            assert torch.allclose(cluster_masses @ stored[0, 0], mean, atol=1e-3)
        positions = candidates.positions[layer, head, evicted]
        assert positions.min() <= cells.positions.min()
        assert cells.positions.max() <= positions.max()


def test_cells_that_repeat_become_one_cell_each() -> None:
    """Of four far points that lie interleaved, k-means finds each."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(4, WIDTH, generator=generator)
    labels = torch.arange(40) % 4
    keys = points[labels][None]
    nothing_stays = torch.ones(1, 40, dtype=torch.bool)
    cells = HeadCells(keys, keys.clone(), torch.arange(40)[None], torch.zeros(1, 40), nothing_stays)
    found = Clusters.of(cells, 8, torch.ones(1, WIDTH))
    means = found.mean_cells(torch.ones(1, 40), torch.float32)
    distances = torch.cdist(means.keys[means.used], points).min(1).values
    assert means.used.sum() <= 8
    assert (distances < 1e-4).sum() >= 3


def attention(keys: Tensor, values: Tensor, bias: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return weighted values and the sum of weights of each query, not normalised."""
    weights = (queries @ keys.float().T * SCALE + bias).exp()
    return weights @ values.float(), weights.sum(-1, keepdim=True)


def test_fitted_cells_bring_outputs_closer_than_means_and_both_than_none() -> None:
    candidates = random_candidates(120, 3, queries=80)
    assert candidates.queries is not None
    queries = replace(candidates.queries, times=torch.arange(300, 380))  # after all cells
    candidates = replace(candidates, queries=queries)
    others = replace(random_candidates(9, 4), queries=candidates.queries)
    mask = masks_of(candidates, 0.2)
    context = FitContext(AttentionConfig(HEADS, ROPE, SCALE), [others])
    (fitted,) = residual_cells([candidates], [mask], [6], context)
    (means,) = residual_cells([candidates], [mask], [6])
    rotation = ROPE.rotation_at(queries.times)
    rotated = ROPE.rotate_layers(queries.vectors.unsqueeze(-2), rotation).squeeze(-2)
    errors = dict.fromkeys(("none", "means", "fitted"), 0.0)
    for layer, head in HEAD_INDICES:
        rows = rotated[layer, head * GROUPS : (head + 1) * GROUPS].flatten(0, 1)
        stays = torch.cat((mask[layer, head], torch.ones(len(others), dtype=torch.bool)))
        keys, values = (
            torch.cat([getattr(part.cells, name)[layer, head] for part in (candidates, others)])
            for name in ("keys", "values")
        )
        all_output, all_total = attention(keys, values, torch.zeros(len(keys)), rows)
        kept = attention(keys[stays], values[stays], torch.zeros(int(stays.sum())), rows)
        for name, added_cells in (("none", None), ("means", means), ("fitted", fitted)):
            output, total = kept
            if added_cells is not None:
                cells = added_cells.head(layer, head)
                assert cells.bias is not None
                added = attention(cells.keys[0, 0], cells.values[0, 0], cells.bias[0, 0], rows)
                output, total = output + added[0], total + added[1]
                if name == "fitted":  # they get the share that the evicted cells had
                    evicted_share = float(((all_total - kept[1]) / all_total).mean())
                    assert (added[1] / all_total).mean() == pytest.approx(evicted_share, rel=1e-3)
            errors[name] += float((output / total - all_output / all_total).square().sum())
    assert errors["fitted"] < 0.8 * errors["means"] < 0.64 * errors["none"]


def fitted_head(
    cells: Sequence[tuple[Tensor, ...]], queries: Tensor, stays: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and biases of fitted cells of one head, in float64 and one by one.

    cells: keys and values of the run and of those that are unchanged.
    labels: the cluster of each evicted cell.
    """
    keys, values = (
        torch.cat([part[0, 0] for part in x]).double() for x in zip(*cells, strict=True)
    )
    weights = (queries.double() @ keys.T * SCALE).exp()
    weights /= weights.sum(-1, keepdim=True)
    log_sums = (queries.double() @ keys.T * SCALE).logsumexp(-1)
    evicted = (~stays).nonzero()[:, 0]
    shares = weights[:, evicted].mean(0)
    mean_keys, mean_values, logits, biases = [], [], [], []
    for label in labels.unique().tolist():
        members, member_shares = evicted[labels == label], shares[labels == label]
        member_shares = (member_shares / member_shares.sum()).unsqueeze(-1)
        mean_keys.append((keys[members] * member_shares).sum(0))
        mean_values.append((values[members] * member_shares).sum(0))
        biases.append(math.log(len(members)))
        logits.append(queries.double() @ mean_keys[-1] * SCALE + biases[-1] - log_sums)
    residual_weights, means = torch.stack(logits, -1).exp(), torch.stack(mean_values)
    correction = weights[:, evicted].sum() / residual_weights.sum()
    residual_weights *= correction
    kept = (weights * stays) @ values
    share = (weights * stays).sum(-1, keepdim=True) + residual_weights.sum(-1, keepdim=True)
    inputs, target = residual_weights / share, weights @ values - kept / share
    matrix = inputs.T @ inputs
    matrix += residual_fit.RIDGE * matrix.diagonal().mean() * torch.eye(len(matrix))
    fitted = means + torch.linalg.solve(matrix, inputs.T @ (target - inputs @ means))
    return torch.stack(mean_keys), fitted, torch.tensor(biases).double() + correction.log()


def test_cells_fitted_in_all_heads_at_once_are_those_fitted_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a thousandth, whether heads and cells are taken together or a few at a time."""
    candidates = random_candidates(90, 5, queries=40)
    assert candidates.queries is not None
    candidates = replace(
        candidates, queries=replace(candidates.queries, times=torch.arange(300, 340))
    )
    others = replace(random_candidates(9, 4), queries=candidates.queries)
    mask = masks_of(candidates, 0.2)
    mask[1, 1] = True  # a head that evicts nothing
    context, all_labels = FitContext(AttentionConfig(HEADS, ROPE, SCALE), [others]), []
    of = Clusters.of

    def recording(*args: Any) -> Clusters:
        result = of(*args)
        all_labels.extend(zip(result.labels, result.cells.evicted, strict=True))
        return result

    monkeypatch.setattr(Clusters, "of", recording)
    (together,) = residual_cells([candidates], [mask], [6], context)
    rotation = ROPE.rotation_at(candidates.queries.times)
    rotated = ROPE.rotate_layers(candidates.queries.vectors.unsqueeze(-2), rotation).squeeze(-2)
    for (layer, head), (labels, evicted) in zip(HEAD_INDICES, all_labels[:], strict=True):
        cells = together.head(layer, head)
        if not evicted.any():
            assert not len(cells)
            continue
        queries = rotated[layer, head * GROUPS : (head + 1) * GROUPS].flatten(0, 1)
        parts = [
            tuple(
                x[layer : layer + 1, head : head + 1] for x in (part.cells.keys, part.cells.values)
            )
            for part in (candidates, others)
        ]
        stays = torch.cat((~evicted, torch.ones(len(others), dtype=torch.bool)))
        keys, values, bias = fitted_head(parts, queries, stays, labels[evicted])
        assert cells.bias is not None
        assert torch.allclose(cells.keys[0, 0].double(), keys, atol=1e-4)
        assert torch.allclose(cells.values[0, 0].double(), values, atol=1e-3)
        assert torch.allclose(cells.bias[0, 0].double(), bias, atol=1e-4)
    monkeypatch.setattr(residual, "MAX_WEIGHTS", 1)
    monkeypatch.setattr(clusters, "MAX_PRODUCTS", 20)
    (one_by_one,) = residual_cells([candidates], [mask], [6], context)
    assert torch.equal(one_by_one.counts, together.counts)
    assert torch.allclose(one_by_one.values, together.values, atol=1e-3)


def test_ragged_cells_have_the_residual_cells_of_the_same_cells_with_equal_counts() -> None:
    candidates = random_candidates(70, 6, queries=30)
    assert candidates.queries is not None
    candidates = replace(
        candidates, queries=replace(candidates.queries, times=torch.arange(300, 330))
    )
    mask = masks_of(candidates, 0.3)
    ragged = replace(candidates, cells=RaggedCells.from_cells(candidates.cells))
    context = FitContext(AttentionConfig(HEADS, ROPE, SCALE))
    (expected,) = residual_cells([candidates], [mask], [5], context)
    (result,) = residual_cells([ragged], [mask.flatten()], [5], context)
    assert result.same_bits(expected)


def test_ragged_cells_are_marked_through_selection_joining_and_copies() -> None:
    candidates = random_candidates(30, 5)
    mask = masks_of(candidates, 0.3)
    exact = RaggedCells.select_from(candidates.cells, mask)
    (marked,) = residual_cells([candidates], [mask], [3])
    joined = Cells.concatenate([exact, marked])
    assert isinstance(joined, RaggedCells)
    assert joined.residual is not None
    assert int(joined.residual.sum()) == marked.total
    assert not exact.residual_mask.any()
    for layer, head, cells in joined.heads():
        marks = joined.residual[joined.head_slice(layer, head)]
        assert marks.tolist() == [False] * (len(cells) - int(marks.sum())) + [True] * int(
            marks.sum()
        )
    only = RaggedCells.select_from(joined, joined.residual)
    assert only.same_bits(marked)
    copy = joined.clone()
    assert copy.same_bits(joined)
    assert not copy.same_bits(replace(joined, residual=~joined.residual))
