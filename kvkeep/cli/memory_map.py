"""A picture of a session's memory in characters: what stays, what may go, what is gone."""

import itertools
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvkeep.cli.output import counted, megabytes

if TYPE_CHECKING:
    from kvkeep import Session
    from kvkeep.session.spans import Standing

_SHORT = 24  # characters of a bar that has other things beside it
# Each with its two characters: for terminals that can, and for all.
KINDS: dict["Standing", tuple[str, str]] = {
    "kept": ("█", "#"),
    "pinned": ("▓", "P"),
    "grouped": ("▒", "="),
    "window": ("░", "-"),
    "compressed": ("▚", ":"),
    "forgotten": ("·", "."),
}


def memory_map(session: "Session", width: int | None = None, plain: bool | None = None) -> str:
    """The bar, from the first token to the newest, and under it what each kind takes.

    width: of the bar; the terminal's if None. plain: ASCII only; where None, as the terminal needs.
    """
    standing = session.standing
    sizes = _sizes(session, Counter(standing))
    names: dict[Standing, str] = {"window": "held"} if session.policy == "full" else {}
    cache = session.cache
    last = (
        f"{cache.cells} of {session.max_kv_size} cells, {megabytes(sum(sizes.values()))} "
        f"({megabytes(cache.nbytes)} set aside); policy {session.policy}"
    )
    return "\n".join([*drawn(standing, sizes, names, width, plain), last])


def memory_line(session: "Session") -> str:
    """The same in a line, for the foot of a screen."""
    standing = session.standing
    size = megabytes(sum(_sizes(session, Counter(standing)).values()))
    held = f"{session.cache.cells:,} of {session.max_kv_size:,} cells, {size}"
    return line_of(standing, held)


def line_of(standing: "Sequence[Standing]", held: str) -> str:
    """A short bar, and what is said of it."""
    return f"{bar(standing, _SHORT, int(_needs_ascii()))} {held}".strip()


def drawn(
    standing: "Sequence[Standing]",
    sizes: "Mapping[Standing, int] | None" = None,
    names: "Mapping[Standing, str] | None" = None,
    width: int | None = None,
    plain: bool | None = None,
) -> list[str]:
    """The bar, and a line for each kind. sizes: bytes; names: of kinds, in the place of their own.

    width, plain: as of `memory_map`.
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


def bar(standing: Sequence["Standing"], width: int, style: int) -> str:
    """Tokens from left to right, each character for as many; no kind is too few to be seen."""
    width = min(width, len(standing))
    edges = [len(standing) * n // width for n in range(width + 1)] if width else [0]
    parts = [Counter(standing[a:b]) for a, b in itertools.pairwise(edges)]
    chosen = [max(KINDS, key=part.__getitem__) for part in parts]
    for kind in set(standing) - set(chosen):
        chosen[max(range(width), key=lambda n: parts[n][kind])] = kind
    return "".join(KINDS[kind][style] for kind in chosen)


def _sizes(session: "Session", counts: Counter["Standing"]) -> dict["Standing", int]:
    """The bytes of what is held of each kind. Compressed cells are fewer than their tokens."""
    cache = session.cache
    near, far = cache.layout.cell_bytes, cache.far_layout.cell_bytes
    compressed = sum(each.length for each in cache.segments if each.compressed)
    cells: dict[Standing, int] = {**counts, "compressed": compressed, "forgotten": 0}
    return {kind: n * (near if kind == "window" else far) for kind, n in cells.items()}


def _needs_ascii() -> bool:
    """Whether standard error, where the answers to commands go, is no terminal with UTF-8."""
    encoding = (sys.stderr.encoding or "").lower().replace("-", "")
    return not (sys.stderr.isatty() and encoding == "utf8")
