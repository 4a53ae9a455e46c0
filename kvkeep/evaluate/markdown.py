"""Tables for pages, and the places in a page that they go to."""

from collections.abc import Sequence


def piped(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the head first, then rows whose first column is words."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, f"|---|{'---:|' * (len(rows[0]) - 1)}", *body])


def has_place(page: str, begin: str, end: str) -> bool:
    return end in page.partition(begin)[2]


def put(page: str, begin: str, end: str, content: str) -> str:
    """The page with `content` in the place of what lies between two markers that it has."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{content}\n\n{end}{rest.partition(end)[2]}"
