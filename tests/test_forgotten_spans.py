"""Spans of which nothing is remembered, or nothing ever was: their names, and what can be done."""

import pytest
from small import small_model
from whole_state import differences, same, whole_state

from kvkeep import Session
from kvkeep.errors import InvalidArgument

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


def test_a_name_whose_tokens_are_all_forgotten_is_free() -> None:
    session = forgetful()
    for result in ("new result", "newer one!", "newest one"):
        with session.span("tool"):
            session.feed(result)
        assert text(session, "tool") == result
        session.feed("?" * 30)


def test_a_name_whose_tokens_are_all_compressed_is_free() -> None:
    session = forgetful(policy="archive", window=8)
    with session.span("tool"):
        session.feed("new result")
    assert text(session, "tool") == "new result"


def test_a_name_is_not_free_as_long_as_one_token_is_remembered() -> None:
    session = MODEL.session(24)
    with session.span("tool"):
        session.feed("a" * 24)
    session.feed("b" * 23)  # the first four are kept, and one token is left of the window
    assert session.spans["tool"].remembered == 4
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="already"), session.span("tool"):
        session.feed("never")
    assert same(whole_state(session), before)


def test_an_open_span_is_not_free_though_its_tokens_are_forgotten() -> None:
    session = MODEL.session(16)
    with session.span("long"):
        session.feed("x" * 50)
        with pytest.raises(InvalidArgument, match="already"), session.span("long"):
            session.feed("never")
    assert (session.spans["long"].start, session.spans["long"].end) == (0, 50)


def test_deleting_what_is_forgotten_takes_it_off_the_record_and_nothing_else() -> None:
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


def test_what_may_live_on_in_compressed_cells_is_not_taken_out() -> None:
    session = forgetful(policy="archive", window=8)
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="compressed cells"):
        session.delete("tool")
    assert same(whole_state(session), before)


def test_what_is_forgotten_cannot_be_replaced_pinned_or_evaluated_around() -> None:
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
def test_an_empty_span_is_replaced_by_text_which_it_names_then(recompute: str) -> None:
    session = with_an_empty_span()
    session.replace("note", None, "in between ", recompute)
    assert session.text() == "before in between after"
    assert text(session, "note") == "in between "
    session.replace("note", None, "and ", recompute)
    assert session.text() == "before and after"
    assert text(session, "note") == "and "


def test_an_empty_span_is_deleted_by_its_name_and_has_nothing_to_pin() -> None:
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
