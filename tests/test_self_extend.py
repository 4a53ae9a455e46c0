"""Policy `self_extend` equals LongLM, and works beyond the model's trained length."""

import math

import pytest
import torch
from small_models import small_model
from topics import topic_ids
from torch import Tensor

from kvkeep import Snapshot
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.network import Network
from kvkeep.models.spec.model_spec import ModelSpec

MODEL = small_model(sharpness=0.2)
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(150)]


class LongLMReference:
    """LongLM as in its paper, token by token: each pair of tokens is near or grouped."""

    def __init__(self, spec: ModelSpec, group: int, window: int):
        self.spec, self.group, self.window = spec, group, window
        self.keys: list[list[Tensor]] = [[] for _ in range(spec.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(spec.layers)]
        self.frequencies = torch.tensor(spec.rope.inverse_frequencies, dtype=torch.float64)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x: [n, heads, head_dim]` to positions."""
        half = x.shape[-1] // 2
        angles = positions.double()[:, None] * self.frequencies
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1).float()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[layer].append(k[0])
        self.values[layer].append(v[0])
        groups = self.spec.heads // self.spec.kv_heads
        keys = torch.stack(self.keys[layer]).repeat_interleave(groups, 1)
        values = torch.stack(self.values[layer]).repeat_interleave(groups, 1)
        time, positions_held = keys.shape[0] - 1, torch.arange(keys.shape[0])
        near = torch.einsum(
            "hd,nhd->hn", self.rotate(q, torch.tensor([time]))[0], self.rotate(keys, positions_held)
        )
        far_position = time // self.group + self.window - self.window // self.group
        far = torch.einsum(
            "hd,nhd->hn",
            self.rotate(q, torch.tensor([far_position]))[0],
            self.rotate(keys, positions_held // self.group),
        )
        scores = torch.where(time - positions_held < self.window, near, far)
        weights = (scores / math.sqrt(self.spec.head_dim)).softmax(-1)
        return torch.einsum("hn,nhd->hd", weights, values).reshape(1, -1)


@torch.inference_mode()
def expected_logits(decoder: Decoder, tokens: list[int], group: int, window: int) -> Tensor:
    cache = LongLMReference(decoder.spec, group, window)
    network = Network(decoder.spec, decoder.tensors)
    hidden = [network.forward(torch.tensor([t]), cache) for t in tokens]
    return decoder.logits(torch.cat(hidden))


@pytest.mark.parametrize(("group", "window"), [(2, 16), (4, 16), (8, 64), (1, 10), (5, 5)])
@pytest.mark.parametrize("prefill_step", [1, 7, 100])
def test_logits_equal_the_longlm_reference(group: int, window: int, prefill_step: int) -> None:
    expected = expected_logits(MODEL.decoder, TEXT, group, window)
    session = MODEL.session(
        policy="self_extend", group=group, window=window, prefill_step=prefill_step
    )
    session.feed(TEXT[:-30])
    assert (session.logits - expected[-31]).abs().max() <= 1e-3
    for index in range(-30, 0):
        session.feed([TEXT[index]])
        assert (session.logits - expected[index]).abs().max() <= 1e-3
    assert session.cache.cells == len(TEXT)


def test_a_restored_session_and_a_fork_continue_exactly(tmp_path) -> None:
    expected = expected_logits(MODEL.decoder, TEXT, 4, 16)
    session = MODEL.session(policy="self_extend", group=4, window=16)
    session.feed(TEXT[:100])
    session.snapshot().save(tmp_path / "s.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "s.kvkeep"))
    forked = session.fork()
    for each in (session, restored, forked):
        each.feed(TEXT[100:])
        assert (each.logits - expected[-1]).abs().max() <= 1e-3
    assert torch.equal(session.logits, restored.logits)


def test_a_failed_step_copies_no_cell_to_the_far_segment() -> None:
    session, other = (MODEL.session(policy="self_extend", group=4, window=16) for _ in range(2))
    for each in (session, other):
        each.feed(TEXT[:60])
    weight = MODEL.decoder.tensors["model.layers.1.mlp.down_proj.weight"]
    sound = weight.clone()
    for more in ([5], [5, 6, 7]):
        weight[0, 0] = torch.nan
        with pytest.raises(Exception, match="NaN"):
            session.feed(more)
        weight.copy_(sound)
        assert session.cache.cells == 60
        assert session.cache.serials() == other.cache.serials()
    for each in (session, other):
        each.feed(TEXT[60:])
    assert torch.equal(session.logits, other.logits)


def test_the_budget_ends_where_a_distance_would_exceed_the_trained_length() -> None:
    model = small_model(max_positions=64)
    session = model.session(policy="self_extend", group=4, window=16)
    assert session.max_kv_size == 4 * (64 - 16) + 16
    session.feed([1 + i % 200 for i in range(session.max_kv_size)])
    with pytest.raises(ContextFull):
        session.feed([1])
    time = session.cache.time - 1
    for segment in session.cache.segments:
        positions = segment.read(0, segment.length).positions
        assert int((segment.position_map(time) - positions).max()) < 64


def test_rewind_stays_within_the_window() -> None:
    session = MODEL.session(policy="self_extend", group=4, window=16)
    session.feed(TEXT[:60])
    with pytest.raises(InvalidArgument, match="rewind takes 0 to 15"):
        session.rewind(16)
    assert session.rewind(5) == TEXT[55:60]
    assert session.cache.cells == 55


@pytest.mark.parametrize(
    "invalid", [{"group": 3, "window": 16}, {"group": 0}, {"window": -4}, {"group": -1}]
)
def test_invalid_settings_are_refused(invalid: dict) -> None:
    with pytest.raises(InvalidArgument, match="found"):
        MODEL.session(policy="self_extend", **invalid)


def test_group_is_no_setting_of_sliding() -> None:
    with pytest.raises(InvalidArgument, match="no setting 'group'"):
        MODEL.session(policy="sliding", group=4)


JUNK = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there."
)


def pass_key_prompt(junk: int, at: int, key: int) -> str:
    hidden = f" The pass key is {key}. Remember it. {key} is the pass key."
    body = JUNK * at + hidden + JUNK * (junk - at)
    return OPENING + body + " What is the pass key? The pass key is"


@pytest.mark.slow
@pytest.mark.parametrize("junk", [500, 670])
def test_the_pass_key_is_found_beyond_the_trained_length(smollm2: Model, junk: int) -> None:
    prompt = smollm2.text.encode(pass_key_prompt(junk, junk // 3, 48137))
    assert len(prompt) > 12_000
    session = smollm2.session(policy="self_extend")
    session.feed(prompt)
    assert "48137" in "".join(session.stream(max_tokens=8))
    with pytest.raises(ContextFull):
        smollm2.session(policy="full").feed(prompt)


@pytest.mark.slow
def test_perplexity_does_not_rise_beyond_the_trained_length(smollm2: Model) -> None:
    session = smollm2.session(policy="self_extend")
    scores = session.score(topic_ids(smollm2)[:12_000])
    before, beyond = (math.exp(-float(scores[end - 2_000 : end].mean())) for end in (6_000, 12_000))
    assert beyond <= before * 1.1
