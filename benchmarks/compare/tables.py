"""A result as text, and as Markdown between the markers of a page."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.compare.plan import PARTS
from benchmarks.compare.results import Measure, Result
from benchmarks.compare.summary import OURS, best, peers_of, ratio
from benchmarks.prefill import Spread
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.grid_table import has_section, markdown_table, replace_section

BEGIN = "<!-- benchmarks: begin -->"
END = "<!-- benchmarks: end -->"
BEGIN_SHORT = "<!-- benchmarks, in short: begin -->"
END_SHORT = "<!-- benchmarks, in short: end -->"
SHORT = ("prefill/4096", "decode/128", "endless/speed", "startup/")  # prefixes of keys
NAMES = {
    "prefill": "Prefill",
    "steps": "Prefill in steps",
    "decode": "Decode",
    "endless": "Endless decode",
    "memory": "Restore, fork, edit",
    "startup": "Start-up",
}
NO_VALUE = "–"


def text_table(result: Result) -> str:
    """Return medians (minimum to maximum) of each peer's best variant."""
    return _page(result, _aligned, heading=lambda words: words)


def markdown(result: Result) -> str:
    """Return `text_table` as Markdown, with the machine and the versions."""
    machine = result.machine
    flags = ", ".join(machine["cpu_flags"])
    description = (
        f"{machine['cpu']} ({flags}), {machine['threads']} threads of {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB; {machine['system']}; Python "
        f"{machine['python']}; {machine['date'][:10]}."
    )
    versions = "\n".join(
        f"- {label}: {about['version']}; {about['how']}" for label, about in result.about.items()
    )
    page = _page(result, markdown_table, heading=lambda words: f"### {words}\n")
    return "\n\n".join(part for part in (description, versions, page) if part)


def short_markdown(result: Result) -> str:
    """Return one table of the most important measures."""
    measures = [m for m in result.measures if m.key.startswith(SHORT)]
    return markdown_table(_rows(result, measures))


def fill_page(path: Path, result: Result | None) -> bytes:
    """Return the page with the tables between its markers.

    result: None only checks the markers. Raises InvalidArgument if there are none.
    """
    page = path.read_text(encoding="utf-8")
    marked = ((BEGIN, END, markdown), (BEGIN_SHORT, END_SHORT, short_markdown))
    present = [entry for entry in marked if has_section(page, entry[0], entry[1])]
    if not present:
        raise InvalidArgument(f"{path} has no lines {BEGIN} and {END} to write between")
    if result is None:
        return page.encode()
    for begin, end, draw in present:
        page = replace_section(page, begin, end, draw(result))
    return page.encode()


def _page(
    result: Result, draw: Callable[[list[list[str]]], str], heading: Callable[[str], str]
) -> str:
    sections = []
    if result.quick:
        sections.append("A first look at small sizes (--quick): not for publication.")
    if result.ended != "whole":
        sections.append(f"Incomplete: {result.ended}.")
    for part in PARTS:
        rows = _rows(result, [m for m in result.measures if m.part == part])
        if len(rows) > 1:
            sections.append(f"{heading(NAMES[part])}\n{draw(rows)}")
    left_out = "\n".join(f"- {line}" for line in result.skipped)
    if left_out:
        sections.append(f"Left out:\n\n{left_out}")
    return "\n\n".join(sections)


def _rows(result: Result, measures: list[Measure]) -> list[list[str]]:
    """Return the header row and the rows: a column per peer, then one per ratio."""
    keys = {m.key for m in measures}
    readings = [reading for reading in result.readings if reading.measure in keys]
    peers = [p for p in peers_of(result) if any(e.variant.partition(" ")[0] == p for e in readings)]
    others = [peer for peer in peers if peer != OURS] if OURS in peers else []
    head = ["", *peers, *(f"against {peer}" for peer in others)]
    rows = [head]
    for measure in measures:
        cells = [_figure(result, measure, peer) for peer in peers]
        if any(cell != NO_VALUE for cell in cells):
            ratios = [_ratio(result, measure, peer) for peer in others]
            rows.append([_title(measure), *cells, *ratios])
    return rows


def _title(measure: Measure) -> str:
    return measure.title if measure.unit == "x" else f"{measure.title}, {measure.unit}"


def _figure(result: Result, measure: Measure, peer: str) -> str:
    figure = best(result, measure, peer)
    if figure is None:
        return NO_VALUE
    weights = figure.variant.partition(" ")[2]
    return f"{_spread(figure.spread, figure.rounds)}{f' {weights}' if weights else ''}"


def _ratio(result: Result, measure: Measure, peer: str) -> str:
    value = ratio(result, measure, peer)
    return NO_VALUE if value is None else f"{_spread(value.spread, value.rounds)}×"


def _spread(spread: Spread, rounds: int) -> str:
    value = _number(spread.median)
    if rounds == 1:
        return value
    return f"{value} ({_number(spread.least)}–{_number(spread.most)})"


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
