"""A picture of a session's memory in text: a bar whose characters show the status of tokens."""

import itertools
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvkeep.cli.output import format_mb, plural

if TYPE_CHECKING:
    from kvkeep import Session
    from kvkeep.session.memory_use import MemoryUse
    from kvkeep.session.spans import TokenStatus

_STATUS_BAR_WIDTH = 24  # characters of the bar in a status line
_CHARACTERS: dict["TokenStatus", tuple[str, str]] = {  # in a UTF-8 and in an ASCII terminal
    "kept": ("█", "#"),
    "pinned": ("▓", "P"),
    "grouped": ("▒", "="),
    "window": ("░", "-"),
    "compressed": ("▚", ":"),
    "forgotten": ("·", "."),
}


def memory_map(session: "Session", width: int | None = None, ascii_only: bool | None = None) -> str:
    """Return a bar from the first token to the newest, and the count and size of each status.

    width: characters of the bar. Of width and ascii_only, None fits the terminal.
    """
    statuses = session.token_status
    sizes = _sizes(session, Counter(statuses))
    labels: dict[TokenStatus, str] = {"window": "held"} if session.policy == "full" else {}
    summary = (
        f"{session.cache.cells} of {session.max_kv_size} cells, {format_mb(sum(sizes.values()))} "
        f"({format_mb(session.nbytes)} allocated); policy {session.policy}"
    )
    lines = [
        *draw_map(statuses, sizes, labels, width, ascii_only),
        *_overwritten_lines(session.memory_use),
    ]
    return "\n".join([*lines, summary])


def _overwritten_lines(use: "MemoryUse") -> list[str]:
    parts = {"windows": use.windows, "states": use.states, "checkpoints": use.checkpoints}
    lines = overwritten_lines(parts, use.checkpoint_ends, use.rewind_evaluates)
    return [*residual_lines(use.residual_cells), *lines]


def residual_lines(count: int) -> list[str]:
    """Return a line about residual cells, if there are any. count: of all layers and KV heads."""
    if not count:
        return []
    return [f"  {plural(count, 'residual cell')} over all heads, each the mean of evicted ones"]


def overwritten_lines(
    bytes_by_part: Mapping[str, int],
    checkpoint_ends: Sequence[int],
    rewind_evaluates: int | None,
) -> list[str]:
    """Return lines about local windows, states and checkpoints; none for models without them.

    bytes_by_part: of "windows", "states" and "checkpoints". checkpoint_ends, rewind_evaluates: see
    `MemoryUse`.
    """
    parts = {"windows": "local windows", "states": "states", "checkpoints": "checkpoints"}
    sizes = [(label, bytes_by_part.get(part, 0)) for part, label in parts.items()]
    lines = [f"  {label:<25}  {format_mb(size):>9}" for label, size in sizes if size]
    if checkpoint_ends:
        lines.append(f"  checkpoints after tokens {', '.join(f'{n:,}' for n in checkpoint_ends)}")
    if lines and rewind_evaluates:
        tokens = plural(rewind_evaluates, "token")
        lines.append(f"  a rewind of one token evaluates {tokens} again")
    return lines


def memory_line(session: "Session") -> str:
    """Return a session's status line: a short bar, the number of cells, and their size."""
    statuses = session.token_status
    size = format_mb(sum(_sizes(session, Counter(statuses)).values()))
    cells = f"{session.cache.cells:,} of {session.max_kv_size:,} cells"
    return status_line(statuses, f"{cells}, {size}")


def status_line(statuses: "Sequence[TokenStatus]", description: str) -> str:
    """Return a short bar, followed by a description."""
    return f"{draw_bar(statuses, _STATUS_BAR_WIDTH, _needs_ascii())} {description}".strip()


def draw_map(
    statuses: "Sequence[TokenStatus]",
    sizes: "Mapping[TokenStatus, int] | None" = None,
    labels: "Mapping[TokenStatus, str] | None" = None,
    width: int | None = None,
    ascii_only: bool | None = None,
) -> list[str]:
    """Return the bar and a line for each status. sizes: in bytes. labels: shown for statuses."""
    use_ascii, counts = _needs_ascii() if ascii_only is None else ascii_only, Counter(statuses)
    width = width or max(1, min(100, shutil.get_terminal_size().columns - 1))
    lines = [draw_bar(statuses, width, use_ascii)]
    for status, characters in _CHARACTERS.items():
        if counts[status]:
            size = f"  {format_mb(sizes[status]):>9}" if sizes and status != "forgotten" else ""
            tokens, label = plural(counts[status], "token"), (labels or {}).get(status, status)
            lines.append(f"{characters[use_ascii]} {label:<10}  {tokens:>13}{size}")
    return [line for line in lines if line]  # without tokens, the bar is empty


def draw_bar(statuses: Sequence["TokenStatus"], width: int, ascii_only: bool) -> str:
    """Return one character for equally many tokens each, in order. statuses: of all tokens.

    A character shows the most frequent status of its tokens. Even a rare status gets one character.
    """
    width = min(width, len(statuses))
    bucket_edges = [len(statuses) * n // width for n in range(width + 1)] if width else [0]
    buckets = [Counter(statuses[start:end]) for start, end in itertools.pairwise(bucket_edges)]
    shown_statuses = [max(_CHARACTERS, key=bucket.__getitem__) for bucket in buckets]
    for status in set(statuses) - set(shown_statuses):
        shown_statuses[max(range(width), key=lambda n: buckets[n][status])] = status
    return "".join(_CHARACTERS[status][ascii_only] for status in shown_statuses)


def _sizes(session: "Session", counts: Counter["TokenStatus"]) -> dict["TokenStatus", int]:
    """Return the bytes of the cells of each status. counts: the tokens of each status."""
    cache = session.cache
    window_cell_bytes, far_cell_bytes = cache.layout.cell_bytes, cache.far_layout.cell_bytes
    # Several compressed tokens share a cell; every other token that is held has its own.
    compressed = sum(segment.length for segment in cache.segments if segment.compressed)
    cells: dict[TokenStatus, int] = {**counts, "compressed": compressed, "forgotten": 0}
    return {
        status: count * (window_cell_bytes if status == "window" else far_cell_bytes)
        for status, count in cells.items()
    }


def _needs_ascii() -> bool:
    """Whether standard error, where the map is printed, is not a terminal with UTF-8."""
    encoding = (sys.stderr.encoding or "").lower().replace("-", "")
    return not (sys.stderr.isatty() and encoding == "utf8")
