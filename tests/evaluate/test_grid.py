"""A grid measures what it lacks, joins others made alike, and is shown as it is."""

from pathlib import Path

import pytest
from small_models import small_model

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.facts import Sample
from kvkeep.evaluate.grid import UNCOMPRESSED, Grid, GridPlan, Reading, Setting, read_sample
from kvkeep.evaluate.grid_plot import draw_grid
from kvkeep.evaluate.grid_table import filled, grid_markdown
from kvkeep.evaluate.passkey import Passkey

ABOUT = {"model": "small", "junk": 6}
PLAN = GridPlan({"several": Passkey(6, task="several")}, ("random", "keydiff"), (2.0, 4.0))


def _reading(task: str, method: str, ratio: float, sample: int, found: bool) -> Reading:
    return Reading(Setting(task, 0, sample, method, ratio), found, -0.5, 100, int(50e6 / ratio))


def _grid() -> Grid:
    """Two tasks; keydiff finds all, random half, the whole memory all."""
    grid = Grid(ABOUT)
    for task in ("several", "needle"):
        for sample in range(4):
            grid.add(_reading(task, UNCOMPRESSED, 1.0, sample, True))
            for ratio in (2.0, 4.0):
                grid.add(_reading(task, "keydiff", ratio, sample, True))
                grid.add(_reading(task, "random", ratio, sample, sample % 2 == 0))
    return grid


def test_each_method_and_ratio_is_measured_once_on_one_reading_of_the_text() -> None:
    model, grid = small_model(), Grid(ABOUT)
    missing = PLAN.missing(grid, "several", 0)
    assert len(missing) == 5
    for reading in read_sample(model, PLAN.tasks["several"].sample(0), missing):
        grid.add(reading)
    whole = grid.of("several", UNCOMPRESSED, 1)[0]
    for method in PLAN.methods:
        for ratio in PLAN.ratios:
            [reading] = grid.of("several", method, ratio)
            assert reading.cells <= -(-whole.cells // ratio)
            assert reading.nbytes < whole.nbytes
    assert PLAN.missing(grid, "several", 0) == []
    assert len(PLAN.missing(grid, "several", 1)) == 5


def test_a_text_is_foretold_from_what_is_left_of_the_memory() -> None:
    model = small_model()
    ids, foretold = [(7 * i * i + i) % 250 for i in range(400)], 150
    sample = Sample(model.text.tokenizer.decode(ids), (), 0, 1, foretold)
    ids = model.text.encode(sample.text)
    settings = [
        Setting("perplexity", 0, 0, UNCOMPRESSED, 1.0),
        Setting("perplexity", 0, 0, "knorm", 3.0),
    ]
    whole, compressed = read_sample(model, sample, settings)
    session = model.session(policy="full")
    session.feed(ids[:-foretold])
    fork = session.fork()
    assert (whole.found, whole.cells) == (None, len(ids) - foretold)
    assert whole.log_probability == pytest.approx(float(fork.score(ids[-foretold:]).mean()))
    session.compress(3.0, "knorm")
    assert compressed.cells == session.cache.cells
    assert compressed.log_probability == pytest.approx(float(session.score(ids[-foretold:]).mean()))


def test_a_text_of_which_nothing_is_left_to_read_is_refused() -> None:
    sample = Sample("So short.", (), 0, 1, 512)
    with pytest.raises(InvalidArgument, match="ask for more tokens"):
        list(read_sample(small_model(), sample, PLAN.missing(Grid(ABOUT), "several", 0)))


def test_what_a_grid_has_already_is_not_missing() -> None:
    grid = Grid(ABOUT)
    grid.add(_reading("several", "keydiff", 2.0, 0, True))
    missing = PLAN.missing(grid, "several", 0)
    assert [(each.method, each.ratio) for each in missing] == [
        (UNCOMPRESSED, 1.0),
        ("random", 2.0),
        ("random", 4.0),
        ("keydiff", 4.0),
    ]


def test_a_grid_comes_back_from_its_file() -> None:
    grid = _grid()
    again = Grid.from_json(grid.as_json())
    assert again == grid
    assert again.methods == ["keydiff", "random"]
    assert again.ratios == [2.0, 4.0]
    assert again.tasks == ["several", "needle"]


def test_grids_made_alike_are_joined() -> None:
    grid, other = Grid(ABOUT), Grid(ABOUT)
    grid.add(_reading("several", "keydiff", 2.0, 0, True))
    other.add(_reading("several", "keydiff", 2.0, 0, False))
    other.add(_reading("several", "keydiff", 2.0, 1, False))
    grid.join(other)
    assert len(grid.of("several", "keydiff", 2.0)) == 2
    assert grid.readings[Setting("several", 0, 0, "keydiff", 2.0)].found
    with pytest.raises(InvalidArgument, match="junk is 6 in one and 7 in the other"):
        grid.join(Grid({**ABOUT, "junk": 7}))


def test_the_table_states_what_was_found_and_on_how_many_bytes() -> None:
    text = grid_markdown(_grid())
    assert "| several | 2×, 25.0 MB | 4×, 12.5 MB |" in text
    assert "| keydiff | 100% / 100% (−0.50) | 100% / 100% (−0.50) |" in text
    assert "| random | 50% / 50% (−0.50) | 50% / 50% (−0.50) |" in text
    assert "Uncompressed: 100% (−0.50), 50.0 MB. Samples: 4." in text


def test_what_the_uncompressed_model_finds_is_counted_apart() -> None:
    grid = Grid(ABOUT)
    for sample, whole, compressed in ((0, True, True), (1, False, True), (2, True, False)):
        grid.add(_reading("several", UNCOMPRESSED, 1.0, sample, whole))
        grid.add(_reading("several", "keydiff", 2.0, sample, compressed))
    assert "| keydiff | 67% / 50% (−0.50) |" in grid_markdown(grid)


def test_a_perplexity_stands_beside_that_of_the_whole_memory() -> None:
    grid = Grid(ABOUT)
    for sample, whole, fewer in ((0, -2.0, -2.1), (1, -2.4, -2.3), (2, -9.0, None)):
        for method, ratio, likely in ((UNCOMPRESSED, 1.0, whole), ("keydiff", 2.0, fewer)):
            of = Setting("perplexity", 0, sample, method, ratio)
            if likely is not None:
                grid.add(Reading(of, None, likely, 100, 50_000_000))
    text = grid_markdown(grid)
    assert "| keydiff | 9.03 (+0.0%) |" in text
    assert "Uncompressed: 87.07, 50.0 MB. Samples: 3." in text


def test_methods_that_take_unequal_bytes_are_told() -> None:
    grid = _grid()
    of = Setting("several", 0, 0, "average", 2.0)
    grid.add(Reading(of, True, -0.5, 100, 30_000_000))
    assert "| several | 2×, 25.0–30.0 MB | 4×, 12.5 MB |" in grid_markdown(grid)


def test_a_page_is_filled_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- grid -->\nold\n<!-- /grid -->\nafter\n")
    filled_once = filled(page, _grid())
    page.write_bytes(filled_once)
    assert filled(page, _grid()) == filled_once
    text = filled_once.decode()
    assert text.startswith("Before\n<!-- grid -->\n\n| several |")
    assert text.endswith("Samples: 4.\n\n<!-- /grid -->\nafter\n")
    assert "old" not in text
    page.write_text("<!-- /grid --> the wrong way round <!-- grid -->")
    with pytest.raises(InvalidArgument, match="has no lines <!-- grid -->"):
        filled(page, None)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_a_plot_is_a_picture(suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    grid = _grid()
    grid.add(Reading(Setting("perplexity", 0, 0, "keydiff", 2.0), None, -2.1, 100, 25_000_000))
    assert draw_grid(grid, suffix).startswith(magic)
