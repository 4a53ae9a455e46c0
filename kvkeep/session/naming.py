"""Naming and pinning ranges of a session's tokens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.session.core import SessionCore
from kvkeep.session.spans import Span, TokenRange
from kvkeep.session.transaction import session_transaction


def list_spans(core: SessionCore) -> dict[str, Span]:
    """Return the named spans with the number of tokens of each that are still held."""
    held, serials = set(core.memory.cache.serials()), core.memory.serials
    return {
        name: Span(name, start, end, sum(s in held for s in serials[start:end]))
        for name, (start, end) in core.state.spans.items()
    }


def count_remembered(core: SessionCore, start: int | str, end: int | None) -> int:
    """Return how many tokens of a range or a named span are still held."""
    first, last = core.token_range(start, end)
    held = set(core.memory.cache.serials())
    return sum(serial in held for serial in core.memory.serials[first:last])


def change_spans(
    core: SessionCore, added: Mapping[str, TokenRange], removed: str | None = None
) -> None:
    """Name ranges of tokens, and remove one name."""
    with session_transaction([core]) as (state,):
        spans = {**state.spans, **added}
        state.spans = {name: tokens for name, tokens in spans.items() if name != removed}


@contextmanager
def new_span(core: SessionCore, name: str) -> Iterator[None]:
    """Name the tokens that come within the block; see `Session.span`."""
    name = validation.text("name", name)
    if name in core.state.spans and not core.is_forgotten(core.state.spans[name]):
        raise InvalidArgument(f"there is a span {name!r} already")
    try:
        first = len(core.memory.tokens)
        change_spans(core, {name: (first, first)})
        yield
        total = len(core.memory.tokens)
        first, _ = core.state.spans.get(name, (total, total))
        change_spans(core, {name: (first, total)})
    except BaseException:
        change_spans(core, {}, removed=name)
        raise


def pin(core: SessionCore, start: int | str, end: int | None) -> None:
    """Pin a range or a named span."""
    with session_transaction([core]) as (state,):
        state.memory.pin(*core.token_range(start, end))


def unpin(core: SessionCore, start: int | str, end: int | None) -> None:
    """Unpin a range or a named span."""
    with session_transaction([core]) as (state,):
        state.memory.unpin(*core.token_range(start, end))
