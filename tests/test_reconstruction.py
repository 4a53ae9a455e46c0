"""KVzip's reconstruction scores, against a naive float64 reference; scoring changes nothing."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from session_state import differences, whole_state
from small_models import small_model, state_specs
from topics import topic_ids
from torch import Tensor

from kvkeep import Bits
from kvkeep.cache import Cells, PositionMap, Segment
from kvkeep.compression.methods.base import ReconstructionScore
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.models.layers.network import DecoderLayer, Network
from kvkeep.models.layers.states import StepStates
from kvkeep.session.reconstruction import MAX_SAMPLE, QuerySample, reconstruction_scores
from kvkeep.session.session import Session

MODEL = small_model(sharpness=0.5)
STATE_MODELS = {kind: small_model(spec=spec) for kind, spec in state_specs().items()}
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(900)]
TOLERANCES = {"rtol": 1e-3, "atol": 1e-3}


class DenseAttention:
    """Dense attention over a whole text in float64 that records the weights of each layer."""

    def __init__(self, model: Model):
        self.spec, self.tensors = model.spec, model.decoder.tensors
        self.network = Network(self.spec, self.tensors)
        self.frequencies = torch.tensor(self.spec.rope.inverse_frequencies, dtype=torch.float64)
        self.shares: list[Tensor] = []  # per layer [heads, n, n]
        self.values: list[Tensor] = []  # per layer [n, heads, head_dim]
        self.streams: list[Tensor] = []  # the input of each layer, [n, hidden_size]
        self.recurrent_states: dict[str, Tensor] = {}

    def read(self, ids: list[int]) -> None:
        layers: Any = [self.recording_layer(layer) for layer in self.network.layers]
        self.network.layers = layers
        with torch.inference_mode():
            states = None if self.spec.states is None else StepStates(self.spec.states, self)
            self.network.forward(torch.tensor(ids), self, None, states)

    def recording_layer(self, layer: DecoderLayer) -> Callable[..., Tensor]:
        """Return the layer, wrapped to record its input in `streams`."""

        def recorded(x: Tensor, *others: Any) -> Tensor:
            self.streams.append(x)
            return layer(x, *others)

        return recorded

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        query, key = self.rotated(q), self.rotated(k).repeat_interleave(groups, 1)
        scores = torch.einsum("nhd,mhd->hnm", query, key) * self.spec.softmax_scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill_(later, -math.inf).softmax(-1)
        self.shares.append(shares)
        values = v.double().repeat_interleave(groups, 1)
        self.values.append(values)
        return torch.einsum("hnm,mhd->nhd", shares, values).flatten(1).to(v.dtype)

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
        angles = torch.arange(len(x)).double()[:, None] * self.frequencies
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)


def contributions(dense: DenseAttention, index: int, layer: int) -> Tensor:
    """Return attention weights times the norm of each projected value, divided by the norm of each
    token's residual stream, `[heads, n, n]`.
    """
    width, weights = dense.spec.head_dim, dense.shares[index].clone()
    weight = dense.tensors[f"model.layers.{layer}.self_attn.o_proj.weight"].double()
    for head in range(dense.spec.heads):
        head_weight = weight[:, head * width : (head + 1) * width]
        weights[head] *= (head_weight @ dense.values[index][:, head].T).norm(dim=0)
    return weights / dense.streams[layer].double().norm(dim=-1)[:, None]


def reference_scores(model: Model, ids: list[int], by: str = "attention") -> Tensor:
    """Return scores `[layers, kv_heads, n]`: each chunk is repeated after the text up to its end.

    A chunk begins with the last 24 tokens of the one before; the higher of their two scores counts.
    """
    layers = model.spec.layers_with_cells(model.spec.groups[0])
    shape = (len(layers), model.spec.kv_heads, len(ids))
    encode, scores, done = model.text.encode, torch.full(shape, -math.inf), 0
    while done < len(ids):
        prompt, first = encode("\n\nRepeat the previous context exactly.\n\n"), max(0, done - 24)
        if first:
            prompt = encode("\n\nRepeat the part of the previous context exactly, starting with")
            prompt += ids[first - 8 : first] + encode("\n\n")
        part = ids[first : first + 512 - len(prompt)]
        cells = slice(first, first + len(part))
        before = ids if model.spec.states else ids[: cells.stop]  # states have read all of it
        dense, start = DenseAttention(model), len(before) + len(prompt)
        dense.read(before + prompt + part)
        if by == "contribution":
            dense.shares = [contributions(dense, i, layer) for i, layer in enumerate(layers)]
        attention_given = torch.stack([s[:, start - 1 :, cells] for s in dense.shares])
        highest = attention_given.amax(2).unflatten(1, (model.spec.kv_heads, -1)).amax(2)
        scores[..., cells] = torch.maximum(scores[..., cells], highest.log().float())
        done = cells.stop
    return scores


def fed(ids: list[int], model: Model = MODEL, bits: Bits | None = None) -> Session:
    session = model.session(policy="full", bits=bits or Bits())
    session.feed(ids)
    return session


def scores_of(session: Session) -> Tensor:
    return reconstruction_scores(session.core.memory, MODEL.text)


@pytest.mark.parametrize("count", [1, 5, 430, 900])
def test_scores_are_the_highest_attention_of_the_repeated_text(count: int) -> None:
    scores = scores_of(fed(TEXT[:count]))
    assert (scores.shape, scores.dtype) == ((2, 2, count), torch.float32)
    torch.testing.assert_close(scores, reference_scores(MODEL, TEXT[:count]), **TOLERANCES)


@pytest.mark.parametrize("count", [5, 900])
def test_contribution_scores_are_weighted_by_projected_values(count: int) -> None:
    scores = reconstruction_scores(fed(TEXT[:count]).core.memory, MODEL.text, kind="contribution")
    torch.testing.assert_close(
        scores, reference_scores(MODEL, TEXT[:count], "contribution"), **TOLERANCES
    )


@pytest.mark.parametrize("by", ["attention", "contribution"])
@pytest.mark.parametrize("kind", STATE_MODELS)
def test_a_model_with_states_repeats_after_the_whole_text(
    kind: str, by: ReconstructionScore
) -> None:
    model, ids = STATE_MODELS[kind], TEXT[:600]
    session = fed(ids, model)
    before = whole_state(session)
    scores = reconstruction_scores(session.core.memory, model.text, kind=by)
    torch.testing.assert_close(scores, reference_scores(model, ids, by), rtol=1e-3, atol=5e-3)
    assert not list(differences(before, whole_state(session)))


@pytest.mark.parametrize("by", ["attention", "contribution"])
def test_scores_of_the_default_model_are_close_to_float32(
    smollm2: Model, smollm2_fp32: Model, by: ReconstructionScore
) -> None:
    ids = topic_ids(smollm2)[:120]
    expected = reference_scores(smollm2_fp32, ids, by)
    exact = reconstruction_scores(fed(ids, smollm2_fp32).core.memory, smollm2.text, kind=by)
    torch.testing.assert_close(exact, expected, rtol=0.01, atol=0.02)
    scores = reconstruction_scores(fed(ids, smollm2).core.memory, smollm2.text, kind=by)
    assert (
        scores - expected
    ).abs().mean() < 0.1  # log of an attention weight, in bfloat16 and by the kernels
    kept_indices = [x.flatten().topk(x.numel() // 4).indices.tolist() for x in (scores, expected)]
    assert len(set(kept_indices[0]) & set(kept_indices[1])) > 0.97 * len(kept_indices[0])


def merge_into_one_segment(session: Session) -> None:
    """Merge a session's cells into one segment, dequantised and at their edited positions."""
    cache, layout = session.cache, session.cache.layout.plain
    parts = [
        segment.read(0, segment.length)
        .dequantise(layout.dtype)
        .shift(cache.rope, torch.tensor([-segment.position_map.offset]))
        for segment in cache.segments
    ]
    cache.segments = [Segment.from_cells(layout, Cells.concatenate(parts), PositionMap(), False)]


def test_cells_of_an_edited_session_are_scored_at_their_edited_positions() -> None:
    session = fed(TEXT[:500])
    session.replace(300, 305, TEXT[700:712])
    session.delete(100, 140)
    assert {segment.position_map.offset for segment in session.cache.segments} == {0, 7, -33}
    scores = scores_of(session)
    merge_into_one_segment(session)
    torch.testing.assert_close(scores, scores_of(session), **TOLERANCES)


def test_edited_text_is_repeated_in_its_current_form() -> None:
    session = fed(TEXT[:500])
    session.replace(300, 305, TEXT[700:712], recompute="suffix")
    ids = [*TEXT[:300], *TEXT[700:712], *TEXT[305:500]]
    torch.testing.assert_close(scores_of(session), reference_scores(MODEL, ids), **TOLERANCES)


@pytest.mark.parametrize("kv_bits", ["8", "4"])
def test_quantised_cells_are_scored_by_their_dequantised_values(kv_bits: str) -> None:
    session = fed(TEXT[:300], bits=Bits(kv=kv_bits))
    assert session.cache.segments[0].layout.quantised
    scores = scores_of(session)
    merge_into_one_segment(session)
    assert not session.cache.segments[0].layout.quantised
    torch.testing.assert_close(scores, scores_of(session), **TOLERANCES)


def test_a_full_session_is_scored() -> None:
    session = MODEL.session(300, policy="full")
    session.feed(TEXT[:300])
    assert session.room == 0
    torch.testing.assert_close(scores_of(session), scores_of(fed(TEXT[:300])), **TOLERANCES)


def test_scoring_does_not_change_the_session() -> None:
    session = fed(TEXT)
    session.delete(100, 140)
    before = whole_state(session)
    scores_of(session)
    assert list(differences(before, whole_state(session))) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_scoring_can_be_interrupted_between_chunks(error: type[BaseException]) -> None:
    session, chunks = fed(TEXT), list[int]()
    before = whole_state(session)

    def stop(cells: int) -> None:
        chunks.append(cells)
        raise error

    with pytest.raises(error):
        reconstruction_scores(session.core.memory, MODEL.text, stop)
    assert len(chunks) == 1
    assert list(differences(before, whole_state(session))) == []


@pytest.mark.parametrize("oldest", [1, 100, 503, 520, len(TEXT)])
def test_the_oldest_cells_are_scored_without_the_others(oldest: int) -> None:
    """Whole chunks are bit-exact, except the tokens that the next chunk repeats again."""
    session = fed(TEXT)
    part = reconstruction_scores(session.core.memory, MODEL.text, max_cells=oldest)
    assert part.shape[-1] == oldest
    chunks = list[int]()
    whole = reconstruction_scores(session.core.memory, MODEL.text, chunks.append)
    shared = chunks[0] - 24 if oldest >= chunks[0] else 0
    assert torch.equal(part[..., :shared], whole[..., :shared])


@pytest.mark.parametrize("oldest", [1, 30, 100, 520, len(TEXT)])
def test_queries_are_of_tokens_all_over_the_part_that_is_repeated(oldest: int) -> None:
    sample = QuerySample()
    reconstruction_scores(fed(TEXT).core.memory, MODEL.text, max_cells=oldest, sample=sample)
    queries = sample.queries(7)
    assert queries is not None
    stride = -(-oldest // MAX_SAMPLE)
    assert queries.times.tolist() == list(range(7, 7 + len(range(0, oldest, stride))))
    assert queries.vectors.shape[2] == len(queries.times)
    assert QuerySample().queries(7) is None


def test_progress_counts_every_cell() -> None:
    chunks: list[int] = []
    reconstruction_scores(fed(TEXT).core.memory, MODEL.text, chunks.append)
    assert sum(chunks) == len(TEXT)
    assert len(chunks) == 3
    assert max(chunks) < 512


def test_compressed_cells_are_refused() -> None:
    session = fed(TEXT[:300])
    session.compress(2.0, "knorm")
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="compressed of 150"):
        scores_of(session)
    assert list(differences(before, whole_state(session))) == []


def test_an_empty_session_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a text"):
        scores_of(MODEL.session(policy="full"))
