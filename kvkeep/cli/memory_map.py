"""A text picture of a session's memory: its tokens by status."""

import itertools
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvkeep.cli.output import megabytes, plural

if TYPE_CHECKING:
    from kvkeep import Session
    from kvkeep.session.spans import TokenStatus

_SHORT_BAR = 24  # characters of the bar in a status line
_CHARACTERS: dict["TokenStatus", tuple[str, str]] = {  # in UTF-8, and in ASCII
    "kept": ("█", "#"),
    "pinned": ("▓", "P"),
    "grouped": ("▒", "="),
    "window": ("░", "-"),
    "compressed": ("▚", ":"),
    "forgotten": ("·", "."),
}


def memory_map(session: "Session", width: int | None = None, ascii_only: bool | None = None) -> str:
    """Return a bar from the first token to the newest, and the count and size of each status.

    width: characters of the bar. ascii_only, width: None to fit the terminal.
    """
    statuses = session.token_status
    sizes = _sizes(session, Counter(statuses))
    labels: dict[TokenStatus, str] = {"window": "held"} if session.policy == "full" else {}
    cache = session.cache
    summary = (
        f"{cache.cells} of {session.max_kv_size} cells, {megabytes(sum(sizes.values()))} "
        f"({megabytes(cache.nbytes)} allocated); policy {session.policy}"
    )
    return "\n".join([*draw_map(statuses, sizes, labels, width, ascii_only), summary])


def memory_line(session: "Session") -> str:
    """Return the memory map as a status line."""
    statuses = session.token_status
    size = megabytes(sum(_sizes(session, Counter(statuses)).values()))
    return status_line(
        statuses, f"{session.cache.cells:,} of {session.max_kv_size:,} cells, {size}"
    )


def status_line(statuses: "Sequence[TokenStatus]", description: str) -> str:
    """Return a short bar, followed by a description."""
    return f"{bar(statuses, _SHORT_BAR, _needs_ascii())} {description}".strip()


def draw_map(
    statuses: "Sequence[TokenStatus]",
    sizes: "Mapping[TokenStatus, int] | None" = None,
    labels: "Mapping[TokenStatus, str] | None" = None,
    width: int | None = None,
    ascii_only: bool | None = None,
) -> list[str]:
    """Return the bar and a line for each status. sizes: in bytes. labels: in place of names."""
    use_ascii, counts = _needs_ascii() if ascii_only is None else ascii_only, Counter(statuses)
    lines = [bar(statuses, width or min(100, shutil.get_terminal_size().columns - 1), use_ascii)]
    for status, characters in _CHARACTERS.items():
        if counts[status]:
            has_size = sizes is not None and status != "forgotten"
            size = f"  {megabytes(sizes[status]):>9}" if has_size and sizes is not None else ""
            tokens, label = plural(counts[status], "token"), (labels or {}).get(status, status)
            lines.append(f"{characters[use_ascii]} {label:<10}  {tokens:>13}{size}")
    return [line for line in lines if line]


def bar(statuses: Sequence["TokenStatus"], width: int, ascii_only: bool) -> str:
    """Draw tokens from left to right, equally many in each character.

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
    """Return the bytes of each status. counts: tokens; compressed ones have fewer cells."""
    cache = session.cache
    window_cell_bytes, far_cell_bytes = cache.layout.cell_bytes, cache.far_layout.cell_bytes
    compressed = sum(segment.length for segment in cache.segments if segment.compressed)
    cells: dict[TokenStatus, int] = {**counts, "compressed": compressed, "forgotten": 0}
    return {
        status: count * (window_cell_bytes if status == "window" else far_cell_bytes)
        for status, count in cells.items()
    }


def _needs_ascii() -> bool:
    """Whether standard error, to which the map is printed, is no UTF-8 terminal."""
    encoding = (sys.stderr.encoding or "").lower().replace("-", "")
    return not (sys.stderr.isatty() and encoding == "utf8")
