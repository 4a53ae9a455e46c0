"""What is made of readings: medians, the best variant, ratios within a round, tables, pictures."""

import json
from pathlib import Path

import pytest

from benchmarks.compare.plots import draw_plots
from benchmarks.compare.results import Measure, Reading, Result, Trace
from benchmarks.compare.summary import best, peers_of, ratio, summary_json
from benchmarks.compare.tables import (
    BEGIN,
    BEGIN_SHORT,
    END,
    END_SHORT,
    fill_page,
    markdown,
    text_table,
)
from benchmarks.machine import describe_machine
from benchmarks.prefill import Spread
from kvkeep.errors import InvalidArgument

SPEED = Measure("decode/128", "decode after 128 tokens", "tokens/s", more=True)
TIME = Measure("memory/fork", "fork", "ms", more=False)


def made(measure: Measure, values: dict[str, list[float]]) -> list[Reading]:
    return [
        Reading(measure.key, variant, index, value)
        for variant, each in values.items()
        for index, value in enumerate(each)
    ]


@pytest.fixture
def result() -> Result:
    machine = vars(describe_machine())
    readings = made(
        SPEED,
        {
            "kvkeep": [20.0, 30.0, 40.0],
            "llama.cpp Q4_0": [10.0, 20.0, 10.0],
            "llama.cpp Q8_0": [11.0, 5.0, 5.0],
            "transformers": [40.0, 15.0],
        },
    )
    readings += made(TIME, {"kvkeep": [2.0, 4.0], "llama.cpp Q4_0": [1.0, 1.0]})
    found = Result(machine, {"budget": 128}, [SPEED, TIME], ended="whole", readings=readings)
    found.about = {"kvkeep": {"version": "kvkeep 1", "how": "so"}}
    found.skipped = ["mlx-lm: not installed"]
    found.traces = [
        Trace("kvkeep", [50, 100, 150], [2.0, 2.1, 2.0], [4.0, 3.0, 9.0], [10**7] * 3),
        Trace("transformers", [50], [7.0], [900.0], [2 * 10**7]),
    ]
    return found


def test_a_peer_is_measured_by_its_best_variant(result: Result) -> None:
    found = best(result, SPEED, "llama.cpp")
    assert found is not None
    assert (found.variant, found.rounds) == ("llama.cpp Q4_0", 3)
    assert found.spread == Spread(10.0, 10.0, 20.0)
    assert best(result, TIME, "transformers") is None
    assert peers_of(result) == ["kvkeep", "llama.cpp", "transformers"]


def test_ratios_are_of_the_same_round_and_above_1_where_kvkeep_is_better(result: Result) -> None:
    speed = ratio(result, SPEED, "llama.cpp")
    assert speed is not None
    assert speed.spread == Spread(2.0, 1.5, 4.0)
    time = ratio(result, TIME, "llama.cpp")
    assert time is not None
    assert time.spread == Spread(0.375, 0.25, 0.5)
    partly = ratio(result, SPEED, "transformers")
    assert partly is not None
    assert (partly.rounds, partly.spread.median) == (2, 1.25)
    assert ratio(result, TIME, "transformers") is None


def test_a_result_comes_back_from_its_file(result: Result) -> None:
    text = json.dumps(result.as_json())
    written = json.loads(text) | json.loads(json.dumps(summary_json(result)))
    assert json.dumps(Result.from_json(written).as_json()) == text
    assert len(written["figures"]) == 6
    assert [each["variant"] for each in written["ratios"]] == [
        "llama.cpp Q4_0",
        "transformers",
        "llama.cpp Q4_0",
    ]


def test_tables_say_what_was_measured_and_what_was_not(result: Result) -> None:
    shown = text_table(result)
    assert "30.0 (20.0–40.0)  10.0 (10.0–20.0) Q4_0" in shown
    assert "2.00 (1.50–4.00)×" in shown
    assert "- mlx-lm: not installed" in shown
    assert "first look" not in shown
    assert "Not all" not in shown
    page = markdown(result)
    assert "| fork, ms | 3.00 (2.00–4.00) | 1.00 (1.00–1.00) Q4_0 | 0.375 (0.250–0.500)× |" in page
    assert "- kvkeep: kvkeep 1; so" in page


def test_a_quick_or_unfinished_result_is_marked(result: Result) -> None:
    result.quick, result.ended = True, "interrupted"
    for page in (text_table(result), markdown(result)):
        assert "first look" in page
        assert "Incomplete: interrupted." in page


@pytest.mark.parametrize(
    ("begin", "end", "there", "not_there"),
    [(BEGIN, END, "| fork, ms |", "nothing"), (BEGIN_SHORT, END_SHORT, "| against", "fork")],
)
def test_a_page_is_written_between_its_markers_only(
    tmp_path: Path, result: Result, begin: str, end: str, there: str, not_there: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    page.write_bytes(fill_page(page, result))
    content = page.read_text()
    assert content.startswith(f"before\n{begin}\n\n")
    assert content.endswith(f"\n\n{end}\nafter\n")
    assert there in content
    assert not_there not in content
    assert "old" not in content
    assert fill_page(page, result) == content.encode()
    page.write_text("no markers")
    for which in (result, None):
        with pytest.raises(InvalidArgument, match="has no lines"):
            fill_page(page, which)


def test_pictures_are_drawn_of_what_there_is(result: Result) -> None:
    drawn = draw_plots(result)
    assert sorted(drawn) == ["decode.png", "endless-memory.png", "endless-time.png"]
    assert all(content.startswith(b"\x89PNG") for content in drawn.values())
    result.traces, result.readings = [], []
    assert draw_plots(result) == {}
