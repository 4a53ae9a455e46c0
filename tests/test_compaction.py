"""Session.compact: what is removed and compressed, what stays, and forks, files and refusals."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_state import same, whole_state
from small_models import small_model

from kvkeep import InvalidArgument, Model, Session, Snapshot
from kvkeep.chat.output_reader import OutputReader
from kvkeep.session.compaction_plan import COMPACTION_STEPS
from kvkeep.session.message_spans import reasoning_range, spans_of_kind
from kvkeep.session.streaming import TextStream
from tests.examples import examples

MODEL = small_model()


def text_of(start: int, count: int) -> list[int]:
    return [(i * i * 7 + 3 * i) % 255 + 1 for i in range(start, start + count)]


def agent_session(turns: int = 6, size: int = 1000, result: int = 60, **changes: object) -> Session:
    """A session with a system prompt, and turns of a question, reasoning, a result, an answer."""
    session = MODEL.session(**{"max_kv_size": size, "policy": "full"} | changes)
    session.feed(text_of(0, 12))
    session.name("system", 0, 12)
    for turn in range(1, turns + 1):
        add_turn(session, turn, result)
    return session


def add_turn(session: Session, turn: int, result: int = 60) -> None:
    start = len(session.tokens)
    parts = (("question", 8), ("reasoning", 15), ("result 1", result), ("answer", 10))
    for name, count in parts:
        with session.span(f"turn {turn} {name}"):
            session.feed(text_of(turn * 100 + count, count))
    session.name(f"turn {turn}", start, len(session.tokens))


def exact_tokens(session: Session) -> list[int]:
    """The ids of all tokens that have cells of their own."""
    statuses = session.token_status
    return [
        token
        for token, status in zip(session.tokens, statuses, strict=True)
        if status not in ("compressed", "forgotten")
    ]


def ids_of(session: Session, name: str) -> list[int]:
    start, end = session.span_ranges[name]
    return session.tokens[start:end]


def test_old_results_go_first_then_reasoning_then_the_rest_is_compressed() -> None:
    session = agent_session()
    placeholder = MODEL.text.encode("[gone]")
    few = session.compact(session.cache.cells - 50, placeholder="[gone]", keep_results=2)
    assert few.removed_results == ("turn 1 result 1",)
    assert few.compression is None
    assert ids_of(session, "turn 1 result 1") == placeholder
    more = session.compact(350, placeholder="[gone]", keep_results=3)
    assert more.removed_results == ("turn 2 result 1", "turn 3 result 1")
    assert more.removed_reasoning[:2] == ("turn 1 reasoning", "turn 2 reasoning")
    assert "turn 6 reasoning" in session.span_ranges
    assert more.compression is None
    assert more.cells_after == session.cache.cells <= 350
    most = session.compact(180)
    assert most.compression is not None
    assert session.cache.cells <= 180
    assert "cells" in most.summary()


def test_a_session_that_is_small_enough_does_not_change() -> None:
    session = agent_session()
    session.compact(300)
    watch = session.watch()
    again = session.compact(300)
    assert not again.changed
    assert not watch()


@pytest.mark.parametrize("count", [0, 2, 5])
def test_an_interrupted_compaction_changes_nothing(count: int) -> None:
    """Also after some of its steps."""
    session, calls = agent_session(), list[int]()
    before = whole_state(session)

    def interrupt(tokens: int) -> None:
        if len(calls) == count:
            raise KeyboardInterrupt
        calls.append(tokens)

    with pytest.raises(KeyboardInterrupt):
        session.compact(180, progress=interrupt)
    assert same(whole_state(session), before)


@settings(max_examples=examples(8))
@given(
    st.integers(60, 500),
    st.integers(0, 3),
    st.integers(1, 5),
    st.sets(st.sampled_from(COMPACTION_STEPS)),
)
def test_the_system_prompt_pins_and_the_newest_turns_stay(
    target: int, keep_recent: int, pinned_turn: int, steps: set[str]
) -> None:
    session = agent_session()
    session.pin(f"turn {pinned_turn} result 1")
    protected = ["system", f"turn {pinned_turn} result 1"]
    before = {name: ids_of(session, name) for name in protected}
    newest = session.tokens[-32:]
    report = session.compact(
        target,
        keep_recent=keep_recent,
        steps=[step for step in COMPACTION_STEPS if step in steps],
    )
    exact = exact_tokens(session)
    assert exact[: len(before["system"])] == before["system"]
    assert exact[-32:] == newest
    for name in protected:
        assert ids_of(session, name) == before[name]
        assert session.spans[name].remembered == len(before[name])
    assert report.cells_after == session.cache.cells
    assert session.cache.cells <= target or any("not reached" in note for note in report.notes)


def test_memory_stays_bounded_over_ten_compactions_and_a_fork_before_is_intact(
    tmp_path: Path,
) -> None:
    session = agent_session(1, size=500)
    fork, turn, sizes = session.fork(), 1, []
    expected = (list(fork.tokens), fork.fork().next_token())
    for cycle in range(10):
        while session.cache.cells <= 400:
            turn += 1
            add_turn(session, turn)
        session.compact(0.5)
        assert session.cache.cells <= 250
        assert session.room == 250 or session.room == 500 - session.cache.cells
        sizes.append(session.nbytes)
        if cycle == 4:
            session.snapshot().save(tmp_path / "session.kvkeep")
            session = MODEL.restore(Snapshot.load(tmp_path / "session.kvkeep"))
    assert max(sizes) <= 1.5 * min(sizes)
    assert (list(fork.tokens), fork.fork().next_token()) == expected


def test_many_turns_that_are_long_compressed_take_nothing_from_the_target() -> None:
    session = MODEL.session(max_kv_size=400, policy="full")
    for turn in range(1, 121):
        session.compact(200, keep_recent=1) if session.cache.cells > 250 else None
        with session.span(f"turn {turn} question"):
            session.feed(text_of(turn * 100, 8))
        session.name(f"turn {turn}", len(session.tokens) - 8, len(session.tokens))
    report = session.compact(100)
    assert 75 <= report.cells_after <= 100


def test_a_compacted_session_continues_the_same_after_a_restart(tmp_path: Path) -> None:
    session = agent_session()
    session.compact(200)
    session.snapshot().save(tmp_path / "session.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "session.kvkeep"))
    for each in (session, restored):
        add_turn(each, 7)
        each.compact(180)
    assert [session.next_token() for _ in range(5)] == [restored.next_token() for _ in range(5)]


def test_a_session_is_compacted_again_when_all_older_cells_are_compressed() -> None:
    """Then there is no text to score."""
    session = MODEL.session(max_kv_size=1000, policy="full")
    session.feed(text_of(0, 400))
    session.compact(160, steps=("compress",))
    session.delete(0, 4)
    report = session.compact(90, steps=("compress",))
    assert report.compression is not None
    assert 75 <= session.cache.cells <= 90
    session.feed(text_of(500, 20))
    assert session.next_token() in range(MODEL.spec.vocab_size)


@pytest.mark.parametrize("policy", ["sliding", "archive"])
def test_other_policies_remove_and_do_not_compress(policy: str) -> None:
    session = agent_session(5, policy=policy, keep=4)
    report = session.compact(200, keep_results=1, keep_recent=1)
    assert len(report.removed_results) == 4
    assert report.compression is None
    assert any("full" in note for note in report.notes)


def test_suffix_recomputation_gives_a_session_that_never_had_the_results() -> None:
    session = agent_session(4)
    report = session.compact(300, keep_results=0, recompute="suffix", steps=("results",))
    assert report.removed_results
    assert report.tokens_evaluated > 100
    fresh = MODEL.session(1000, policy="full")
    fresh.feed(list(session.tokens))
    assert session.next_token() == fresh.next_token()


@pytest.mark.parametrize(
    "arguments",
    [
        {"target": 0},
        {"target": "much"},
        {"target": 100, "steps": ("summarise",)},
        {"target": 100, "keep_recent": -1},
        {"target": 100, "keep_results": -1},
        {"target": 100, "recompute": "all"},
        {"target": 100, "placeholder": 7},
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(arguments: dict[str, object]) -> None:
    session = agent_session(2)
    watch = session.watch()
    with pytest.raises(InvalidArgument):
        session.compact(**arguments)  # type: ignore[arg-type]
    assert not watch()


def test_the_reasoning_of_an_answer_is_found_without_its_markers(smollm2: Model) -> None:
    text = smollm2.text
    ids = text.encode("<think>\nFirst I add the two numbers.\n</think>\n\nIt is 12.")
    start, end = reasoning_range(text, smollm2.renderer, ids) or (0, 0)
    assert text.decode(ids[start:end]).strip() == "First I add the two numbers."
    assert reasoning_range(text, smollm2.renderer, text.encode("No reasoning.")) is None


def reasoning_read_by_token(model: Model, ids: list[int]) -> tuple[int, int] | None:
    """Return the range of an answer's reasoning, from the text and the events of each token."""
    reader, stream = model.renderer.new_reader(), TextStream(model.text, ())
    ends, text = list[int](), ""
    for token in ids:
        reader.push(pieces := stream.push_pieces(token))
        text += "".join(piece for piece in pieces if isinstance(piece, str))
        ends.append(len(text))
    reader.finish()
    reasoning = reader.output.reasoning.strip()
    if not reasoning or reasoning not in text:
        return None
    start = text.index(reasoning)
    inside = [
        index
        for index, (first, last) in enumerate(pairwise([0, *ends]))
        if start <= first < last <= start + len(reasoning)
    ]
    return (inside[0], inside[-1] + 1) if inside else None


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "\n", " ", "I add", "two", "é😀", "<tool_call>", "<|im_end|>"]
        ),
        max_size=12,
    )
)
def test_reasoning_is_where_it_is_read_token_by_token(smollm2: Model, texts: list[str]) -> None:
    ids = smollm2.text.encode("".join(texts), special=True)
    expected = reasoning_read_by_token(smollm2, ids)
    if "</think>" not in smollm2.text.decode(ids):
        expected = None
    assert reasoning_range(smollm2.text, smollm2.renderer, ids) == expected


def test_reasoning_of_many_tokens_is_read_in_one_step(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed, push = list[int](), OutputReader.push

    def counted_push(reader: OutputReader, pieces: Sequence[str | int]) -> Any:
        pushed.append(len(pieces))
        return push(reader, pieces)

    monkeypatch.setattr(OutputReader, "push", counted_push)
    ids = smollm2.text.encode("<think>\n" + "I add two numbers. " * 50 + "</think>12.")
    assert reasoning_range(smollm2.text, smollm2.renderer, ids)
    assert len(pushed) == 1


def test_names_of_spans_say_their_kind() -> None:
    names = ["turn 2 result 1", "turn 1 result", "tool result b", "turn 1 answer", "turn 12"]
    spans = {name: (index, index + 1) for index, name in enumerate(names)}
    assert spans_of_kind(spans, "result") == names[:3]


@pytest.mark.parametrize("kind", ["result", "reasoning"])
@pytest.mark.parametrize(
    ("one", "other", "removed"),
    [
        ((10, 60), (20, 50), (10, 60)),
        ((20, 50), (10, 60), (10, 60)),
        ((10, 60), (10, 60), (10, 60)),
        ((10, 60), (40, 80), (10, 80)),
        ((30, 60), (10, 60), (10, 60)),
    ],
)
def test_spans_that_overlap_are_removed_together(
    kind: str, one: tuple[int, int], other: tuple[int, int], removed: tuple[int, int]
) -> None:
    session = MODEL.session(max_kv_size=400, policy="full")
    session.feed(text_of(0, 200))
    session.name(f"turn 1 {kind} 1", *one)
    session.name("tool result 1" if kind == "result" else "reasoning 1", *other)
    step = "results" if kind == "result" else kind
    session.compact(1, keep_results=0, steps=(step,), placeholder="")  # type: ignore[arg-type]
    start, end = removed
    assert session.tokens == [*text_of(0, start), *text_of(end, 200 - end)]
    assert not session.spans
