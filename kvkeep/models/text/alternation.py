"""A pattern for any of many texts that is searched for as fast as one for a few."""

import re
from collections.abc import Collection
from itertools import groupby, takewhile

_MAX_DEPTH = 20  # of groups in groups, which the compiler of patterns recurses into


def alternation(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for any of the texts, the longest first, as tokenizers match.

    It is a prefix tree, so that of texts with a common start, such as a thousand `<SPECIAL_n>`
    beside `<unk>`, few are tried where the text has that start. `ab`, `ac` and `a` give
    `a(?:b|c)?`. Without texts the pattern matches nothing.
    """
    return re.compile(_branches(texts, _MAX_DEPTH) or "(?!)")


def _branches(texts: Collection[str], depth: int) -> str:
    """Return the tree of texts, of which one may be empty."""
    if depth == 0:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    branches = []
    for _, group in groupby(sorted(filter(None, texts)), key=lambda text: text[0]):
        members = list(group)
        pairs = zip(members[0], members[-1], strict=False)  # sorted, so these differ first
        prefix = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        rest = _branches([text.removeprefix(prefix) for text in members], depth - 1)
        branches.append(re.escape(prefix) + (f"(?:{rest})" if rest else ""))
    tree = "|".join(branches)
    return f"(?:{tree})?" if tree and "" in texts else tree
