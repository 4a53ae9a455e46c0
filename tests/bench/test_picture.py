"""The README's plot, at small sizes."""

import dataclasses

import pytest
from small_models import small_model

from benchmarks.picture import Curve, measure_curves
from benchmarks.picture_plot import draw_picture

MODEL = small_model(max_positions=1280)


@pytest.fixture(scope="module")
def curves() -> list[Curve]:
    ids = [1 + i % 255 for i in range(1536)]
    return list(measure_curves(MODEL, ids, 32, lambda count: None))


def test_full_attention_is_refused_at_the_trained_length_and_windows_are_not(
    curves: list[Curve],
) -> None:
    full, window, sinks = curves
    assert full.refusal is not None
    assert "at most 1280 tokens" in full.refusal
    assert full.points[-1].tokens == full.points[-1].kv_cells == 1280
    assert window.refusal is sinks.refusal is None
    assert (window.keep, sinks.keep) == (0, 4)
    assert {curve.points[-1].kv_cells for curve in (window, sinks)} == {32}


def test_the_picture_can_be_drawn(curves: list[Curve]) -> None:
    drawn = draw_picture([dataclasses.asdict(curve) for curve in curves], ".png")
    assert drawn.startswith(b"\x89PNG")
