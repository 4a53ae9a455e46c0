"""Named spans: they follow what happens to the tokens around them."""

import pytest
from edit_actions import MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from session_state import same, whole_state

from kvkeep import Snapshot
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.session.session import Session
from tests.examples import examples


def template(**options) -> Session:
    session = MODEL.session(64, **options)
    session.feed("you are a cook. ")
    with session.span("turn"):
        session.feed("[")
        with session.span("task"):
            session.feed("peel the potatoes")
        session.feed("]")
    session.feed(" then? ")
    return session


def text(session: Session, name: str) -> str:
    span = session.spans[name]
    return MODEL.text.decode(session.tokens[span.start : span.end])


def test_spans_name_what_came_within_their_block_and_may_nest() -> None:
    session = template()
    assert text(session, "task") == "peel the potatoes"
    assert text(session, "turn") == "[peel the potatoes]"
    span = session.spans["task"]
    assert (span.name, span.start, span.end) == ("task", 17, 34)
    assert (span.remembered, span.partly_forgotten) == (17, False)


def test_tokens_that_the_model_writes_belong_to_the_span() -> None:
    session = template()
    with session.span("answer"):
        written = "".join(session.stream(max_tokens=5, ignore_eos=True))
    assert len(session.spans["answer"].name) == 6
    assert session.spans["answer"].end - session.spans["answer"].start == 5
    assert written is not None


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_a_span_is_replaced_deleted_and_pinned_by_its_name(recompute: str) -> None:
    session = template(keep=4)
    session.replace("task", None, "boil rice", recompute)
    assert session.text() == "you are a cook. [boil rice] then? "
    assert text(session, "task") == "boil rice"
    assert text(session, "turn") == "[boil rice]"
    session.pin("task")
    session.feed("x" * 80)
    assert session.spans["task"].remembered == 9
    assert session.spans["turn"].partly_forgotten
    session.unpin("task")
    session.feed("x" * 80)
    assert session.spans["task"].remembered == 0


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_a_span_that_loses_its_last_token_is_gone_and_its_name_is_free(recompute: str) -> None:
    session = template()
    session.delete("task", recompute=recompute)
    assert session.text() == "you are a cook. [] then? "
    assert session.spans.keys() == {"turn"}
    session.delete(0, 18, recompute)
    assert session.spans == {}
    with session.span("task"):
        session.feed("again")
    assert text(session, "task") == "again"


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_what_is_put_in_inside_belongs_to_a_span_and_at_its_border_does_not(recompute: str) -> None:
    session = template()
    task = session.spans["task"]
    session.insert(task.end, "!", recompute)
    session.insert(task.start + 4, "all ", recompute)
    session.insert(task.start, "?", recompute)
    assert text(session, "task") == "peelall  the potatoes"
    assert text(session, "turn") == "[?peelall  the potatoes!]"
    session.replace(0, 3, "they", recompute)
    assert text(session, "task") == "peelall  the potatoes"


def test_a_rewind_shortens_a_span_or_takes_it_away() -> None:
    session = template()
    session.rewind(10)
    assert text(session, "task") == "peel the potato"
    assert text(session, "turn") == "[peel the potato"
    session.rewind(15)
    assert session.spans.keys() == {"turn"}
    assert text(session, "turn") == "["


def test_spans_survive_a_file_and_forks(tmp_path) -> None:
    session = template()
    session.snapshot().save(tmp_path / "spans.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "spans.kvkeep"))
    assert restored.spans == session.spans
    fork = session.fork(at=30)
    assert text(fork, "task") == "peel the pota"
    fork.delete("task")
    with fork.span("other"):
        fork.feed("o")
    assert restored.spans == session.spans
    assert session.spans.keys() == {"task", "turn"}
    session.replace("task", None, "boil rice")
    assert text(restored, "task") == "peel the potatoes"


def test_a_span_says_how_much_of_it_is_remembered() -> None:
    session = MODEL.session(24, keep=4, policy="shift", discard=6)
    with session.span("all"):
        session.feed(list(range(1, 25)))
    assert session.spans["all"].remembered == 24
    session.feed([1])
    assert session.spans["all"].remembered == 18
    assert session.spans["all"].partly_forgotten
    before = whole_state(session)
    for refused in (session.delete, session.pin, lambda name: session.replace(name, None, "x")):
        with pytest.raises(InvalidArgument, match="not all in the cache"):
            refused("all")
    assert same(whole_state(session), before)


def test_an_exception_leaves_the_name_free_and_the_tokens_there() -> None:
    session = MODEL.session(32)
    session.feed("one ")
    with pytest.raises(KeyboardInterrupt), session.span("turn"):  # noqa: PT012
        session.feed("two ")
        raise KeyboardInterrupt
    assert session.text() == "one two "
    assert session.spans == {}
    with session.span("turn"):
        session.feed("three")
    assert text(session, "turn") == "three"


def test_a_block_in_which_earlier_text_is_edited_names_what_came_in_it() -> None:
    session = MODEL.session(64)
    session.feed("the first words; ")
    with session.span("turn"):
        session.feed("new")
        session.delete(0, 4)
        session.insert(2, "....")
        session.feed(" words")
    assert text(session, "turn") == "new words"
    session.rewind(6)
    with session.span("next"):
        session.rewind(5)
        session.feed("tail")
    assert text(session, "next") == "tail"
    assert session.spans.keys() == {"next"}


def test_names_that_cannot_be_are_refused() -> None:
    session = template()
    before, spans = whole_state(session), session.spans
    with pytest.raises(InvalidArgument, match="'task' already"), session.span("task"):
        session.feed("never")
    for call in (session.delete, session.pin, session.unpin):
        with pytest.raises(InvalidArgument, match="no span 'tusk'; there are: "):
            call("tusk")
    with pytest.raises(InvalidArgument, match="takes no end"):
        session.delete("task", 20)
    with pytest.raises(InvalidArgument, match="no span 'tusk'"):
        session.replace("tusk", None, "x")
    assert same(whole_state(session), before)
    assert session.spans == spans
    with pytest.raises(InvalidArgument, match="already"), session.span("outer"):  # noqa: SIM117
        with session.span("outer"):
            pass
    assert session.spans == spans


LETTERS = st.text("abcdefgh", min_size=0, max_size=4)


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6), LETTERS, st.booleans())))
def test_a_span_holds_what_took_the_place_of_its_own_tokens(edits: list) -> None:
    session = MODEL.session(256, policy="full")
    session.feed("....")
    with session.span("mine"):
        session.feed("ABCDEF")
    session.feed("....")
    mine = [False] * 4 + [True] * 6 + [False] * 4  # which tokens should belong to it
    for start, count, new, anew in edits:
        start = min(start, len(mine))
        end = min(start + count, len(mine))
        around = mine[start:end] if start < end else mine[max(0, start - 1) : start + 1]
        how = "suffix" if anew else "none"
        try:
            if start < end:
                session.replace(start, end, new, how)
            else:
                session.insert(start, new, how)
        except KvkeepError:
            continue
        inside = len(around) > 1 - (start < end) and all(around)
        mine[start:end] = [inside] * len(new)
        if "mine" in session.spans:
            span = session.spans["mine"]
            assert mine == [span.start <= i < span.end for i in range(len(mine))]
        else:
            assert not any(mine)


def test_ranges_and_remembered_counts_equal_those_of_the_spans() -> None:
    session = MODEL.session(32)
    session.feed("a first part that is long enough to be forgotten")
    for name, (start, end) in {"old": (8, 12), "half": (10, 25), "new": (40, 45)}.items():
        session.name(name, start, end)
    assert dict(session.span_ranges) == {s.name: (s.start, s.end) for s in session.spans.values()}
    with pytest.warns(DeprecationWarning, match="use Session.span_ranges"):
        assert session.places == session.span_ranges
    for span in session.spans.values():
        assert session.remembered(span.name) == span.remembered
        assert session.remembered(span.start, span.end) == span.remembered
    assert session.remembered("old") == 0 < session.remembered("half") < 15
    assert session.remembered("new") == 5
    with pytest.raises(InvalidArgument):
        session.remembered(40, 400)


@pytest.mark.parametrize(
    "change",
    [
        lambda session: session.feed("x"),
        lambda session: session.next_token(),
        lambda session: session.rewind(1),
        lambda session: session.pin("task"),
        lambda session: session.delete("task"),
        lambda session: session.name("task", 1, 2),
        lambda session: setattr(session, "keep", 7),
    ],
)
def test_a_watch_says_whether_the_session_changed(change) -> None:
    session = template()
    changed = session.watch()
    session.snapshot()
    session.fork().feed("x")
    assert session.logits is not None
    assert len(session.spans) < len(session.token_status) <= len(session.text())
    with pytest.raises(InvalidArgument):
        session.delete("nothing")
    assert not changed()
    change(session)
    assert changed()
    assert not session.watch()()
