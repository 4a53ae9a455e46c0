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

_SHORT = 24  # characters of the bar in a status line
# The character of each status: in UTF-8, and in ASCII.
KINDS: dict["TokenStatus", tuple[str, str]] = {
    "kept": ("█", "#"),
    "pinned": ("▓", "P"),
    "grouped": ("▒", "="),
    "window": ("░", "-"),
    "compressed": ("▚", ":"),
    "forgotten": ("·", "."),
}


def memory_map(session: "Session", width: int | None = None, plain: bool | None = None) -> str:
    """Return a bar from the first token to the newest, and the size of each kind of token.

    width: characters of the bar; None for the terminal's width. plain: whether to use ASCII only;
    None to decide by the terminal.
    """
    standing = session.token_status
    sizes = _sizes(session, Counter(standing))
    names: dict[TokenStatus, str] = {"window": "held"} if session.policy == "full" else {}
    cache = session.cache
    last = (
        f"{cache.cells} of {session.max_kv_size} cells, {megabytes(sum(sizes.values()))} "
        f"({megabytes(cache.nbytes)} set aside); policy {session.policy}"
    )
    return "\n".join([*draw_map(standing, sizes, names, width, plain), last])


def memory_line(session: "Session") -> str:
    """Return the memory map in one line, for the foot of a screen."""
    standing = session.token_status
    size = megabytes(sum(_sizes(session, Counter(standing)).values()))
    held = f"{session.cache.cells:,} of {session.max_kv_size:,} cells, {size}"
    return status_line(standing, held)


def status_line(standing: "Sequence[TokenStatus]", held: str) -> str:
    """Return a short bar, followed by a description."""
    return f"{bar(standing, _SHORT, int(_needs_ascii()))} {held}".strip()


def draw_map(
    standing: "Sequence[TokenStatus]",
    sizes: "Mapping[TokenStatus, int] | None" = None,
    names: "Mapping[TokenStatus, str] | None" = None,
    width: int | None = None,
    plain: bool | None = None,
) -> list[str]:
    """Return the bar, and a line for each kind of token.

    sizes: bytes of each kind. names: labels that replace the names of kinds. width, plain: as in
    `memory_map`.
    """
    style, counts = int(_needs_ascii() if plain is None else plain), Counter(standing)
    lines = [bar(standing, width or min(100, shutil.get_terminal_size().columns - 1), style)]
    for kind, characters in KINDS.items():
        if counts[kind]:
            known = sizes is not None and kind != "forgotten"
            size = f"  {megabytes(sizes[kind]):>9}" if known and sizes is not None else ""
            tokens, name = counted(counts[kind], "token"), (names or {}).get(kind, kind)
            lines.append(f"{characters[style]} {name:<10}  {tokens:>13}{size}")
    return [line for line in lines if line]


def bar(standing: Sequence["TokenStatus"], width: int, style: int) -> str:
    """Draw tokens from left to right; each character stands for the same number of tokens.

    A character shows the most frequent kind among its tokens. Every kind gets at least one
    character, however few tokens it has.
    """
    width = min(width, len(standing))
    edges = [len(standing) * n // width for n in range(width + 1)] if width else [0]
    parts = [Counter(standing[a:b]) for a, b in itertools.pairwise(edges)]
    chosen = [max(KINDS, key=part.__getitem__) for part in parts]
    for kind in set(standing) - set(chosen):
        chosen[max(range(width), key=lambda n: parts[n][kind])] = kind
    return "".join(KINDS[kind][style] for kind in chosen)


def _sizes(session: "Session", counts: Counter["TokenStatus"]) -> dict["TokenStatus", int]:
    """Return the bytes held of each kind. There are fewer compressed cells than tokens."""
    cache = session.cache
    near, far = cache.layout.cell_bytes, cache.far_layout.cell_bytes
    compressed = sum(segment.length for segment in cache.segments if segment.compressed)
    cells: dict[TokenStatus, int] = {**counts, "compressed": compressed, "forgotten": 0}
    return {kind: n * (near if kind == "window" else far) for kind, n in cells.items()}


def _needs_ascii() -> bool:
    """Whether standard error, where the map is printed, is not a UTF-8 terminal."""
    encoding = (sys.stderr.encoding or "").lower().replace("-", "")
    return not (sys.stderr.isatty() and encoding == "utf8")
