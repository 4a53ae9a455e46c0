"""A text picture of a session's memory: kept, pinned, window, compressed and forgotten tokens."""

import itertools
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvkeep.cli.output import counted, megabytes

if TYPE_CHECKING:
    from kvkeep import Session
    from kvkeep.session.spans import TokenStatus

_SHORT_BAR = 24  # characters of the bar in a status line
# Of each status: in UTF-8, and in ASCII.
_CHARACTERS: dict["TokenStatus", tuple[str, str]] = {
    "kept": ("█", "#"),
    "pinned": ("▓", "P"),
    "grouped": ("▒", "="),
    "window": ("░", "-"),
    "compressed": ("▚", ":"),
    "forgotten": ("·", "."),
}


def memory_map(session: "Session", width: int | None = None, plain: bool | None = None) -> str:
    """Return a bar from the first token to the newest, and the size of the tokens of each status.

    width: characters of the bar. plain: whether to use ASCII only. None: as the terminal has it.
    """
    statuses = session.token_status
    sizes = _sizes(session, Counter(statuses))
    names: dict[TokenStatus, str] = {"window": "held"} if session.policy == "full" else {}
    cache = session.cache
    last = (
        f"{cache.cells} of {session.max_kv_size} cells, {megabytes(sum(sizes.values()))} "
        f"({megabytes(cache.nbytes)} set aside); policy {session.policy}"
    )
    return "\n".join([*draw_map(statuses, sizes, names, width, plain), last])


def memory_line(session: "Session") -> str:
    """Return the memory map in one line, for the foot of a screen."""
    statuses = session.token_status
    size = megabytes(sum(_sizes(session, Counter(statuses)).values()))
    return status_line(
        statuses, f"{session.cache.cells:,} of {session.max_kv_size:,} cells, {size}"
    )


def status_line(statuses: "Sequence[TokenStatus]", description: str) -> str:
    """Return a short bar, followed by a description."""
    return f"{bar(statuses, _SHORT_BAR, int(_needs_ascii()))} {description}".strip()


def draw_map(
    statuses: "Sequence[TokenStatus]",
    sizes: "Mapping[TokenStatus, int] | None" = None,
    names: "Mapping[TokenStatus, str] | None" = None,
    width: int | None = None,
    plain: bool | None = None,
) -> list[str]:
    """Return the bar and a line for each status. sizes: bytes. names: labels of statuses."""
    style, counts = int(_needs_ascii() if plain is None else plain), Counter(statuses)
    lines = [bar(statuses, width or min(100, shutil.get_terminal_size().columns - 1), style)]
    for status, characters in _CHARACTERS.items():
        if counts[status]:
            has_size = sizes is not None and status != "forgotten"
            size = f"  {megabytes(sizes[status]):>9}" if has_size and sizes is not None else ""
            tokens, name = counted(counts[status], "token"), (names or {}).get(status, status)
            lines.append(f"{characters[style]} {name:<10}  {tokens:>13}{size}")
    return [line for line in lines if line]


def bar(statuses: Sequence["TokenStatus"], width: int, style: int) -> str:
    """Draw tokens from left to right; each character stands for the same number of tokens.

    A character shows the most frequent status among its tokens. Every status gets at least one
    character, however few tokens have it. style: 0 for UTF-8, 1 for ASCII.
    """
    width = min(width, len(statuses))
    edges = [len(statuses) * n // width for n in range(width + 1)] if width else [0]
    parts = [Counter(statuses[start:end]) for start, end in itertools.pairwise(edges)]
    shown = [max(_CHARACTERS, key=part.__getitem__) for part in parts]
    for status in set(statuses) - set(shown):
        shown[max(range(width), key=lambda n: parts[n][status])] = status
    return "".join(_CHARACTERS[status][style] for status in shown)


def _sizes(session: "Session", counts: Counter["TokenStatus"]) -> dict["TokenStatus", int]:
    """Return the bytes held by status. There are fewer compressed cells than tokens."""
    cache = session.cache
    near, far = cache.layout.cell_bytes, cache.far_layout.cell_bytes
    compressed = sum(segment.length for segment in cache.segments if segment.compressed)
    cells: dict[TokenStatus, int] = {**counts, "compressed": compressed, "forgotten": 0}
    return {
        status: count * (near if status == "window" else far) for status, count in cells.items()
    }


def _needs_ascii() -> bool:
    """Whether standard error, where the map is printed, is not a UTF-8 terminal."""
    encoding = (sys.stderr.encoding or "").lower().replace("-", "")
    return not (sys.stderr.isatty() and encoding == "utf8")
