"""Spans of which nothing is remembered, or nothing ever was: their names, and what can be done."""

from collections.abc import Callable

import pytest
import torch
from session_state import differences, same, whole_state
from small_models import small_model

from kvkeep import Session
from kvkeep.errors import InvalidArgument
from kvkeep.session.spans import Span

MODEL = small_model()


def text(session: Session, name: str) -> str:
    span = session.spans[name]
    return MODEL.text.decode(session.tokens[span.start : span.end])


def forgetful(**options) -> Session:
    """Eleven tokens named "tool", of which none is remembered, then 40 others."""
    session = MODEL.session(24, **options)
    session.feed("head ")
    with session.span("turn"):
        with session.span("tool"):
            session.feed("old result.")
        session.feed("!" * 20)
    session.feed("?" * 20)
    assert session.spans["tool"].remembered == 0
    return session


def test_a_span_name_can_be_reused_once_all_its_tokens_are_evicted() -> None:
    session = forgetful()
    for result in ("new result", "newer one!", "newest one"):
        with session.span("tool"):
            session.feed(result)
        assert text(session, "tool") == result
        session.feed("?" * 30)


def test_a_span_name_can_be_reused_once_all_its_tokens_are_compressed() -> None:
    session = forgetful(policy="archive", window=8)
    with session.span("tool"):
        session.feed("new result")
    assert text(session, "tool") == "new result"


def forgotten_by_eviction() -> Session:
    session = MODEL.session(24)
    session.feed("x" * 60)
    return session


def forgotten_by_compression() -> Session:
    session = MODEL.session(400, policy="full")
    session.feed("x" * 300)
    session.compress(2.0, "knorm", recent=20)
    return session


@pytest.mark.parametrize("make", [forgotten_by_eviction, forgotten_by_compression])
def test_forgotten_tokens_can_be_named_and_leave_their_name_free(
    make: Callable[[], Session],
) -> None:
    session = make()
    logits, segments = session.logits, whole_state(session)["segments"]
    session.name("x", 10, 20)
    assert session.spans["x"] == Span("x", 10, 20, remembered=0)
    assert session.spans["x"].partly_forgotten
    assert torch.equal(session.logits, logits)
    assert list(differences(whole_state(session)["segments"], segments)) == []
    with session.span("x"):
        session.feed("new")
    assert text(session, "x") == "new"


def test_a_span_name_is_taken_while_one_token_is_held() -> None:
    session = MODEL.session(24)
    with session.span("tool"):
        session.feed("a" * 24)
    session.feed("b" * 23)  # the first four are kept, and one token is left of the window
    assert session.spans["tool"].remembered == 4
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="already"), session.span("tool"):
        session.feed("never")
    assert same(whole_state(session), before)


def test_the_name_of_an_open_span_is_taken_even_if_its_tokens_are_evicted() -> None:
    session = MODEL.session(16)
    with session.span("long"):
        session.feed("x" * 50)
        with pytest.raises(InvalidArgument, match="already"), session.span("long"):
            session.feed("never")
    assert (session.spans["long"].start, session.spans["long"].end) == (0, 50)


def test_deleting_evicted_tokens_changes_only_the_history() -> None:
    session, other = forgetful(), forgetful()
    report = session.delete("tool")
    assert (report.tokens_evaluated, report.cells_moved) == (0, 0)
    assert session.text() == "head " + "!" * 20 + "?" * 20
    assert session.spans.keys() == {"turn"}
    assert text(session, "turn") == "!" * 20
    one, two = whole_state(session), whole_state(other)
    for name in ("tokens", "serials", "spans"):
        del one[name], two[name]
    assert list(differences(one, two)) == []
    assert session.next_token() == other.next_token()
    session.rewind(3)  # what is held is counted from the end, as before


def test_compressed_tokens_cannot_be_deleted() -> None:
    session = forgetful(policy="archive", window=8)
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="compressed cells"):
        session.delete("tool")
    assert same(whole_state(session), before)


def test_evicted_tokens_cannot_be_replaced_pinned_or_masked() -> None:
    session = forgetful()
    before = whole_state(session)
    for refused in (
        lambda: session.replace("tool", None, "x"),
        lambda: session.pin("tool"),
        lambda: session.delete("tool", recompute="suffix"),
    ):
        with pytest.raises(InvalidArgument):
            refused()
    assert same(whole_state(session), before)


def with_an_empty_span() -> Session:
    session = MODEL.session(64)
    session.feed("before ")
    with session.span("note"):
        pass
    session.feed("after")
    return session


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_replacing_an_empty_span_inserts_text_under_its_name(recompute: str) -> None:
    session = with_an_empty_span()
    session.replace("note", None, "in between ", recompute)
    assert session.text() == "before in between after"
    assert text(session, "note") == "in between "
    session.replace("note", None, "and ", recompute)
    assert session.text() == "before and after"
    assert text(session, "note") == "and "


def test_an_empty_span_can_be_deleted_and_cannot_be_pinned() -> None:
    session = with_an_empty_span()
    before = whole_state(session)
    for refused in (
        lambda: session.pin("note"),
        lambda: session.unpin("note"),
        lambda: session.replace("note", None, ""),
    ):
        with pytest.raises(InvalidArgument):
            refused()
    assert same(whole_state(session), before)
    session.delete("note")
    assert session.spans == {}
    assert session.text() == "before after"
