"""A grid as Markdown tables, and their insertion into a page."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.text import decode_text

if TYPE_CHECKING:
    from kvkeep.evaluate.grid import Grid, GridResult

BEGIN = "<!-- grid -->"
END = "<!-- /grid -->"
NO_RESULT = "–"


def grid_markdown(grid: "Grid") -> str:
    """Return a Markdown table for each task: a row for each method, a column for each ratio.

    Questions: the share of all samples answered / of those that the uncompressed model answers, and
    in brackets the mean log-probability of an answer's token. Continuations: the perplexity, and
    its increase over the uncompressed cache. The head has the size of keys and values.
    """
    return "\n\n".join(_task_section(grid, task) for task in grid.tasks)


def page_with_grid(path: Path, grid: "Grid | None") -> bytes:
    """Return a page with the tables between its markers; as it is for grid None.

    The ends of its lines stay as they are. Raises InvalidArgument if there are no markers, or if it
    is not UTF-8.
    """
    content = path.read_bytes()
    decode_text(content, str(path))
    page = content.decode()  # with a byte order mark, if it has one
    if not has_section(page, BEGIN, END):
        raise InvalidArgument(f"{path} must have the lines {BEGIN} and {END}")
    if grid is not None:
        line_end = "\r\n" if "\r\n" in page else "\n"
        page = replace_section(page, BEGIN, END, grid_markdown(grid), line_end)
    return page.encode()


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the head first, then rows whose first column is text."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, f"|---|{'---:|' * (len(rows[0]) - 1)}", *body])


def has_section(page: str, begin: str, end: str) -> bool:
    """Whether a page has both markers, in this order."""
    return end in page.partition(begin)[2]


def replace_section(page: str, begin: str, end: str, content: str, line_end: str = "\n") -> str:
    """Return the page with `content` between its two markers. line_end: of the new lines."""
    text_before, _, rest = page.partition(begin)
    section = f"{begin}\n\n{content}\n\n{end}".replace("\n", line_end)
    return f"{text_before}{section}{rest.partition(end)[2]}"


def _task_section(grid: "Grid", task: str) -> str:
    baseline = grid.baseline(task)
    rows = [[task]] + [[method] for method in grid.methods]
    for ratio in grid.ratios:
        results_by_method = [grid.select(task, method, ratio) for method in grid.methods]
        size = _mean_size([result for results in results_by_method for result in results])
        rows[0].append(f"{ratio:g}×, {size}")
        for row, results in zip(rows[1:], results_by_method, strict=True):
            row.append(_entry(results, baseline))
    footer = f"Uncompressed: {_entry(baseline)}, {_mean_size(baseline)}. Samples: {len(baseline)}."
    return f"{markdown_table(rows)}\n\n{footer}"


def _mean_size(results: Sequence["GridResult"]) -> str:
    """Return the mean size of keys and values, a range if methods differ by more than 1%."""
    if not results:
        return NO_RESULT
    sizes_by_method: dict[str, list[int]] = {}
    for result in results:
        sizes_by_method.setdefault(result.setting.method, []).append(result.nbytes)
    means = sorted(fmean(sizes) / 1e6 for sizes in sizes_by_method.values())
    if means[-1] > means[0] * 1.01:
        return f"{means[0]:.1f}–{means[-1]:.1f} MB"
    return f"{fmean(means):.1f} MB"


def _entry(results: Sequence["GridResult"], baseline: Sequence["GridResult"] = ()) -> str:
    """Return what a table's cell shows. baseline: the uncompressed results of the task."""
    if not results:
        return NO_RESULT
    if results[0].found is None:
        return _perplexity_entry(results, baseline)
    solvable_ids = {_sample_id(result) for result in baseline if result.found}
    found_share = fmean(bool(result.found) for result in results)
    log_probability = fmean(result.log_probability for result in results)
    solved = [bool(result.found) for result in results if _sample_id(result) in solvable_ids]
    solved_share = f" / {fmean(solved):.0%}" if solved else ""
    count = _count_of_fewer(results, baseline)
    return f"{found_share:.0%}{solved_share} ({log_probability:.2f}){count}".replace("-", "−")


def _count_of_fewer(results: Sequence["GridResult"], baseline: Sequence["GridResult"]) -> str:
    """Return the number of samples, if some were too short for a ratio."""
    return f", {len(results)} of {len(baseline)}" if len(results) < len(baseline) else ""


def _perplexity_entry(results: Sequence["GridResult"], baseline: Sequence["GridResult"]) -> str:
    log_probability = fmean(result.log_probability for result in results)
    sample_ids = {_sample_id(result) for result in results}
    baseline_logprobs = [r.log_probability for r in baseline if _sample_id(r) in sample_ids]
    increase = ""
    if baseline_logprobs:
        increase = f" ({math.exp(fmean(baseline_logprobs) - log_probability) - 1:+.1%})"
    count = _count_of_fewer(results, baseline)
    return f"{math.exp(-log_probability):.2f}{increase}{count}".replace("-", "−")


def _sample_id(result: "GridResult") -> tuple[int, int]:
    return result.setting.seed, result.setting.sample
