"""Perplexity: each token is scored given the cells held before it."""

import math

import pytest
from small_models import VOCABULARY, small_model

from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.evaluate.perplexity import RECENT_TOKENS, perplexity_points
from kvkeep.evaluate.plots import check_plottable, draw_perplexity

IDS = [(7 * i * i + 3 * i) % VOCABULARY for i in range(700)]


def _one_by_one(session, ids: list[int]) -> list[float]:
    """The natural log of each token's probability, from logits taken before it is fed."""
    scores = [math.nan]
    session.feed(ids[:1])
    for token in ids[1:]:
        scores.append(float(session.logits.double().log_softmax(-1)[token]))
        session.feed([token])
    return scores


@pytest.mark.parametrize("first", [1, 5, 64, 100])
def test_perplexity_is_the_exponential_mean_over_scored_tokens(first: int) -> None:
    model = small_model()
    ids = IDS[:150]
    scores = _one_by_one(model.session(max_kv_size=40), ids)
    session = model.session(max_kv_size=40, prefill_step=32)
    [*_, last] = perplexity_points(session, ids, first)
    expected = math.exp(-sum(scores[first:]) / (len(ids) - first))
    assert last.perplexity == pytest.approx(expected, rel=1e-4)
    assert (last.tokens, last.scored) == (150, 150 - first)


def test_the_trace_has_a_point_after_each_step() -> None:
    model = small_model()
    scores = _one_by_one(model.session(max_kv_size=100), IDS)
    session = model.session(max_kv_size=100, prefill_step=64)
    trace = list(perplexity_points(session, IDS, 70))
    assert [point.tokens for point in trace] == [*range(64, 700, 64), 700]
    assert [point.scored for point in trace[:3]] == [0, 58, 122]
    assert math.isnan(trace[0].perplexity)
    assert [point.kv_cells for point in trace[:3]] == [64, 100, 100]
    assert trace[-1].kv_bytes == session.cache.nbytes
    assert trace[-1].recent == pytest.approx(
        math.exp(-sum(scores[-RECENT_TOKENS:]) / RECENT_TOKENS), rel=1e-4
    )
    assert trace[2].perplexity == pytest.approx(math.exp(-sum(scores[70:192]) / 122), rel=1e-4)
    assert trace[2].rss_bytes > 0


def test_the_prefill_step_does_not_change_perplexity() -> None:
    model = small_model()
    figures = []
    for step in (1, 17, 512):
        session = model.session(max_kv_size=50, prefill_step=step)
        figures.append(list(perplexity_points(session, IDS, 30))[-1].perplexity)
    assert figures == pytest.approx([figures[0]] * 3, rel=1e-4)


@pytest.mark.parametrize("first", [0, -1, 700, 701])
def test_the_first_scored_token_must_lie_in_the_text(first: int) -> None:
    session = small_model().session()
    with pytest.raises(InvalidArgument, match=f"found {first}"):
        perplexity_points(session, IDS, first)
    assert session.cache.time == 0


def test_a_text_too_long_for_the_policy_is_refused_before_prefill() -> None:
    session = small_model().session(max_kv_size=64, policy="full")
    with pytest.raises(ContextFull):
        perplexity_points(session, IDS)
    assert session.cache.time == 0


def test_a_session_that_holds_tokens_is_refused() -> None:
    session = small_model().session()
    session.feed([1, 2])
    with pytest.raises(InvalidArgument, match="new session"):
        perplexity_points(session, IDS)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_plots_have_the_requested_file_format(suffix: str, magic: bytes, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    trace = list(perplexity_points(small_model().session(prefill_step=64), IDS, 100))
    check_plottable(tmp_path / f"plot{suffix}")
    content = draw_perplexity(trace, "a title", suffix)
    assert content.startswith(magic)
    assert len(content) > 5000


def test_the_former_name_of_token_by_token_is_a_deprecated_alias() -> None:
    model = small_model()
    by_tokens = list(perplexity_points(model.session(), IDS[:20], token_by_token=True))
    with pytest.warns(DeprecationWarning, match="use token_by_token"):
        former = list(perplexity_points(model.session(), IDS[:20], one_by_one=True))
    assert [point.perplexity for point in former] == [point.perplexity for point in by_tokens]
