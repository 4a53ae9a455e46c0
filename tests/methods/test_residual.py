"""Residual cells: clusters of what a KV head evicts, fitted to queries where these are known."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.candidates import GROUPS, HEAD_INDICES, HEADS, ROPE, SCALE, random_candidates
from torch import Tensor

from kvkeep.cache import AttentionConfig, Cells, RaggedCells
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.clusters import Clusters
from kvkeep.compression.methods.residual import FitContext, residual_cells

WIDTH = 16


def masks_of(candidates: Candidates, share: float, seed: int = 0) -> Tensor:
    """Return random cells that stay, a different number in each KV head."""
    return torch.rand(candidates.shape, generator=torch.Generator().manual_seed(seed)) < share


@settings(max_examples=30)
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
    keys = points[labels][None, None]
    cells = Cells(
        keys,
        keys.clone(),
        torch.arange(40)[None, None],
        torch.full((40,), -1),
        torch.zeros(1, 1, 40),
    )
    clusters = Clusters.of(cells, 8, torch.ones(WIDTH))
    means = clusters.mean_cells(clusters.masses, torch.float32)
    distances = torch.cdist(means.keys[0, 0], points).min(1).values
    assert clusters.count <= 8
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
        for name, residual in (("none", None), ("means", means), ("fitted", fitted)):
            output, total = kept
            if residual is not None:
                cells = residual.head(layer, head)
                assert cells.bias is not None
                added = attention(cells.keys[0, 0], cells.values[0, 0], cells.bias[0, 0], rows)
                output, total = output + added[0], total + added[1]
                if name == "fitted":  # they get the share that the evicted cells had
                    evicted_share = float(((all_total - kept[1]) / all_total).mean())
                    assert (added[1] / all_total).mean() == pytest.approx(evicted_share, rel=1e-3)
            errors[name] += float((output / total - all_output / all_total).square().sum())
    assert errors["fitted"] < 0.8 * errors["means"] < 0.64 * errors["none"]


def test_ragged_cells_are_marked_through_selection_joining_and_copies() -> None:
    candidates = random_candidates(30, 5)
    mask = masks_of(candidates, 0.3)
    exact = RaggedCells.select_from(candidates.cells, mask)
    (residual,) = residual_cells([candidates], [mask], [3])
    joined = Cells.concatenate([exact, residual])
    assert isinstance(joined, RaggedCells)
    assert joined.residual is not None
    assert int(joined.residual.sum()) == residual.total
    assert not exact.residual_mask.any()
    for layer, head, cells in joined.heads():
        marks = joined.residual[joined.head_slice(layer, head)]
        assert marks.tolist() == [False] * (len(cells) - int(marks.sum())) + [True] * int(
            marks.sum()
        )
    only = RaggedCells.select_from(joined, joined.residual)
    assert only.same_bits(residual)
    copy = joined.clone()
    assert copy.same_bits(joined)
    assert not copy.same_bits(replace(joined, residual=~joined.residual))
