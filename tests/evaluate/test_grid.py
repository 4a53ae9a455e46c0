"""Grids: missing results, merging, tables and plots."""

from pathlib import Path

import pytest
from small_models import small_model

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.datasets import PasskeyDataset
from kvkeep.evaluate.grid import (
    UNCOMPRESSED,
    Grid,
    GridResult,
    GridSetting,
    measure_sample,
)
from kvkeep.evaluate.grid_table import grid_markdown, page_with_grid
from kvkeep.evaluate.plots import draw_grid
from kvkeep.evaluate.samples import Sample

METADATA = {"model": "small", "junk": 6}
DATASET = PasskeyDataset(6, task="several")
METHODS, RATIOS = ("random", "keydiff"), (2.0, 4.0)


def _result(task: str, method: str, ratio: float, sample: int, found: bool) -> GridResult:
    return GridResult(
        GridSetting(task, 0, sample, method, ratio), found, -0.5, 100, int(50e6 / ratio)
    )


def _missing(grid: Grid, sample: int) -> list[GridSetting]:
    return grid.missing_settings("several", 0, sample, METHODS, RATIOS)


def _grid() -> Grid:
    """Return results of two tasks: keydiff and the baseline find all, random half."""
    grid = Grid(METADATA)
    for task in ("several", "needle"):
        for sample in range(4):
            grid.add(_result(task, UNCOMPRESSED, 1.0, sample, True))
            for ratio in (2.0, 4.0):
                grid.add(_result(task, "keydiff", ratio, sample, True))
                grid.add(_result(task, "random", ratio, sample, sample % 2 == 0))
    return grid


def test_each_method_and_ratio_is_measured_once_per_sample() -> None:
    model, grid = small_model(), Grid(METADATA)
    missing = _missing(grid, 0)
    assert len(missing) == 5
    for result in measure_sample(model, DATASET.sample(0), missing):
        grid.add(result)
    full = grid.select("several", UNCOMPRESSED, 1)[0]
    for method in METHODS:
        for ratio in RATIOS:
            [result] = grid.select("several", method, ratio)
            assert result.cells <= -(-full.cells // ratio)
            assert result.nbytes < full.nbytes
    assert _missing(grid, 0) == []
    assert len(_missing(grid, 1)) == 5


def test_a_continuation_is_scored_by_the_compressed_session() -> None:
    model = small_model()
    ids, scored = [(7 * i * i + i) % 250 for i in range(400)], 150
    sample = Sample(model.text.tokenizer.decode(ids), (), 0, 1, scored)
    ids = model.text.encode(sample.text)
    settings = [
        GridSetting("perplexity", 0, 0, UNCOMPRESSED, 1.0),
        GridSetting("perplexity", 0, 0, "knorm", 3.0),
    ]
    full, compressed = measure_sample(model, sample, settings)
    session = model.session(policy="full")
    session.feed(ids[:-scored])
    fork = session.fork()
    assert (full.found, full.cells) == (None, len(ids) - scored)
    assert full.log_probability == pytest.approx(float(fork.score(ids[-scored:]).mean()))
    session.compress(3.0, "knorm")
    assert compressed.cells == session.cache.cells
    assert compressed.log_probability == pytest.approx(float(session.score(ids[-scored:]).mean()))


def test_a_text_shorter_than_its_continuation_is_refused() -> None:
    sample = Sample("So short.", (), 0, 1, 512)
    with pytest.raises(InvalidArgument, match="ask for more"):
        list(measure_sample(small_model(), sample, _missing(Grid(METADATA), 0)))


def test_existing_results_are_not_missing() -> None:
    grid = Grid(METADATA)
    grid.add(_result("several", "keydiff", 2.0, 0, True))
    missing = _missing(grid, 0)
    assert [(setting.method, setting.ratio) for setting in missing] == [
        (UNCOMPRESSED, 1.0),
        ("random", 2.0),
        ("random", 4.0),
        ("keydiff", 4.0),
    ]


def test_json_round_trip_preserves_the_grid() -> None:
    grid = _grid()
    loaded = Grid.from_json(grid.as_json())
    assert loaded == grid
    assert loaded.methods == ["keydiff", "random"]
    assert loaded.ratios == [2.0, 4.0]
    assert loaded.tasks == ["several", "needle"]


def test_grids_with_equal_metadata_are_merged() -> None:
    grid, other = Grid(METADATA), Grid(METADATA)
    grid.add(_result("several", "keydiff", 2.0, 0, True))
    other.add(_result("several", "keydiff", 2.0, 0, False))
    other.add(_result("several", "keydiff", 2.0, 1, False))
    grid.merge(other)
    assert len(grid.select("several", "keydiff", 2.0)) == 2
    assert grid.results[GridSetting("several", 0, 0, "keydiff", 2.0)].found
    with pytest.raises(InvalidArgument, match="junk is 6 in one and 7 in the other"):
        grid.merge(Grid({**METADATA, "junk": 7}))


def test_the_table_shows_recall_and_cache_size() -> None:
    text = grid_markdown(_grid())
    assert "| several | 2×, 25.0 MB | 4×, 12.5 MB |" in text
    assert "| keydiff | 100% / 100% (−0.50) | 100% / 100% (−0.50) |" in text
    assert "| random | 50% / 50% (−0.50) | 50% / 50% (−0.50) |" in text
    assert "Uncompressed: 100% (−0.50), 50.0 MB. Samples: 4." in text


def test_the_table_shows_recall_of_samples_the_baseline_solves() -> None:
    grid = Grid(METADATA)
    for sample, full, compressed in ((0, True, True), (1, False, True), (2, True, False)):
        grid.add(_result("several", UNCOMPRESSED, 1.0, sample, full))
        grid.add(_result("several", "keydiff", 2.0, sample, compressed))
    assert "| keydiff | 67% / 50% (−0.50) |" in grid_markdown(grid)


def test_the_table_shows_perplexity_and_its_increase_over_the_baseline() -> None:
    grid = Grid(METADATA)
    for sample, full, fewer in ((0, -2.0, -2.1), (1, -2.4, -2.3), (2, -9.0, None)):
        for method, ratio, log_probability in ((UNCOMPRESSED, 1.0, full), ("keydiff", 2.0, fewer)):
            setting = GridSetting("perplexity", 0, sample, method, ratio)
            if log_probability is not None:
                grid.add(GridResult(setting, None, log_probability, 100, 50_000_000))
    text = grid_markdown(grid)
    assert "| keydiff | 9.03 (+0.0%), 2 of 3 |" in text
    assert "Uncompressed: 87.07, 50.0 MB. Samples: 3." in text


def test_the_table_shows_a_size_range_if_methods_differ() -> None:
    grid = _grid()
    setting = GridSetting("several", 0, 0, "average", 2.0)
    grid.add(GridResult(setting, True, -0.5, 100, 30_000_000))
    assert "| several | 2×, 25.0–30.0 MB | 4×, 12.5 MB |" in grid_markdown(grid)


def test_tables_replace_the_section_between_the_markers_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- grid -->\nold\n<!-- /grid -->\nafter\n")
    page_once = page_with_grid(page, _grid())
    page.write_bytes(page_once)
    assert page_with_grid(page, _grid()) == page_once
    text = page_once.decode()
    assert text.startswith("Before\n<!-- grid -->\n\n| several |")
    assert text.endswith("Samples: 4.\n\n<!-- /grid -->\nafter\n")
    assert "old" not in text
    page.write_text("<!-- /grid --> the wrong way round <!-- grid -->")
    with pytest.raises(InvalidArgument, match="must have the lines <!-- grid -->"):
        page_with_grid(page, None)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_plots_have_the_requested_file_format(suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    grid = _grid()
    grid.add(
        GridResult(GridSetting("perplexity", 0, 0, "keydiff", 2.0), None, -2.1, 100, 25_000_000)
    )
    assert draw_grid(grid, suffix).startswith(magic)


def test_a_page_keeps_the_ends_of_its_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    before, after = "\ufeffBefore\r\n".encode(), b"\r\nafter\r\n"
    page.write_bytes(before + b"<!-- grid -->\r\nold\r\n<!-- /grid -->" + after)
    assert page_with_grid(page, None) == page.read_bytes()
    written = page_with_grid(page, _grid())
    assert written.startswith(before)
    assert written.endswith(after)
    assert written.count(b"\n") == written.count(b"\r\n") > 5


def test_a_page_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(b"caf\xe9 <!-- grid --> <!-- /grid -->")
    with pytest.raises(InvalidArgument, match="is not UTF-8 text"):
        page_with_grid(page, None)
