"""Contents of a session after a change: right ones are accepted, and wrong ones refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from small_models import small_model

from benchmarks.soak_faults.effects import (
    ALIGNMENT,
    COMPRESSION,
    first_content,
    is_effect,
    message_tokens,
)
from benchmarks.soak_faults.records import Change, Content, SessionPoint, Tokens
from benchmarks.soak_faults.replay import replay_changes
from kvkeep import Session, load_model
from kvkeep.session.conversation import Conversation

OLD = first_content(tuple(range(100, 150)), "sliding")
PINNED = replace(OLD, status=(*OLD.status[:10], *["pinned"] * 4, *OLD.status[14:]))
PIECE, END_ID = (201, 202, 203), 99
FEED = Change("feed", 50, 50, PIECE)
INSERT = Change("insert", 20, 20, PIECE)
DELETE, REWIND = Change("delete", 20, 23), Change("rewind", 48, 50)
GENERATE = Change("generate", 50, 50, max_answer=2)
TURN = Change("turn", 49, 50, PIECE, 4, (END_ID,))
ALIGN = Change("align", 20, tokens=(*OLD.tokens[:20], *OLD.tokens[22:], 1, 2))
PIN, COMPRESS = Change("pin", 10, 14), Change("compress")


def with_tokens(content: Content, *tokens: int, end: int = 50) -> Content:
    """Return a content that is cut off at `end`, and then goes on with tokens."""
    status = (*content.status[:end], *["window"] * len(tokens))
    return Content((*content.tokens[:end], *tokens), status, end + len(tokens))


def without(content: Content, start: int, end: int) -> Content:
    """Return a content without a range of tokens."""
    tokens = (*content.tokens[:start], *content.tokens[end:])
    return Content(tokens, (*content.status[:start], *content.status[end:]), len(tokens))


def with_inserted(content: Content, at: int, tokens: Sequence[int]) -> Content:
    """Return a content with tokens before one of its own."""
    status = (*content.status[:at], *["window"] * len(tokens), *content.status[at:])
    new = (*content.tokens[:at], *tokens, *content.tokens[at:])
    return Content(new, status, len(new))


def aligned(tokens: Sequence[int]) -> Content:
    return Content(tuple(tokens), (*OLD.status[:4], *["window"] * (len(tokens) - 4)), len(tokens))


def compressed(content: Content, cells: int) -> Content:
    status = (*content.status[:4], *["compressed"] * 38, *content.status[42:])
    return Content(content.tokens, status, cells)


FULL = replace(OLD, status=("window",) * 50)


@pytest.mark.parametrize(
    ("change", "new"),
    [
        (FEED, with_tokens(OLD, *PIECE)),
        (INSERT, with_inserted(OLD, 20, PIECE)),
        (DELETE, without(OLD, 20, 23)),
        (REWIND, without(OLD, 48, 50)),
        (GENERATE, with_tokens(OLD, 7, END_ID)),
        (replace(GENERATE, answer=(7, 8)), with_tokens(OLD, 7, 8)),
        (TURN, with_tokens(OLD, *PIECE, 7, 8, 9, 10, end=49)),
        (TURN, with_tokens(OLD, *PIECE, END_ID, end=49)),
        (replace(TURN, answer=(7,)), with_tokens(OLD, *PIECE, 7, END_ID, end=49)),
        (ALIGN, aligned(ALIGN.tokens)),
        (PIN, PINNED),
    ],
)
def test_a_change_made_once_explains_a_session(change: Change, new: Content) -> None:
    assert is_effect(change, OLD, new)


@pytest.mark.parametrize(
    ("change", "new"),
    [
        (FEED, OLD),
        (FEED, with_tokens(OLD, *PIECE, *PIECE)),
        (FEED, with_tokens(OLD, *PIECE[:2])),
        (FEED, with_tokens(OLD, 201, 202, 5)),
        (FEED, with_tokens(OLD, *PIECE, 5)),
        (FEED, replace(with_tokens(OLD, *PIECE), cells=52)),
        (FEED, replace(with_tokens(OLD, *PIECE), status=("forgotten", *OLD.status[1:], *"www"))),
        (FEED, with_tokens(PINNED, *PIECE)),
        (INSERT, with_inserted(OLD, 20, PIECE * 2)),
        (INSERT, with_inserted(OLD, 20, PIECE[:1])),
        (INSERT, with_inserted(OLD, 20, (201, 202, 5))),
        (INSERT, with_inserted(OLD, 21, PIECE)),
        (DELETE, without(OLD, 20, 26)),
        (DELETE, without(OLD, 20, 22)),
        (DELETE, without(PINNED, 20, 23)),
        (REWIND, without(OLD, 46, 50)),
        (REWIND, without(OLD, 49, 50)),
        (GENERATE, with_tokens(OLD, 7)),
        (GENERATE, with_tokens(OLD, 7, 8, 7, 8)),
        (replace(GENERATE, answer=(7, 8)), with_tokens(OLD, 7, 9)),
        (TURN, with_tokens(OLD, *PIECE, 7, 8, 9, 10)),
        (TURN, with_tokens(OLD, *PIECE, end=49)),
        (TURN, with_tokens(OLD, *PIECE, 7, 8, end=49)),
        (TURN, with_tokens(OLD, *PIECE[1:], 7, 8, 9, 10, end=49)),
        (TURN, with_tokens(OLD, *PIECE, *PIECE, 7, END_ID, end=49)),
        (TURN, with_tokens(OLD, *PIECE, 7, END_ID, *PIECE, 7, END_ID, end=49)),
        (TURN, with_tokens(OLD, *PIECE, END_ID, 8, 9, 10, end=49)),
        (TURN, with_tokens(OLD, *PIECE, 7, 8, 9, 10, 11, end=49)),
        (replace(TURN, answer=(7,)), with_tokens(OLD, *PIECE, 8, END_ID, end=49)),
        (replace(TURN, answer=(7,)), with_tokens(OLD, *PIECE, END_ID, end=49)),
        (ALIGN, aligned((*ALIGN.tokens, 1, 2))),
        (ALIGN, aligned((*ALIGN.tokens[:20], *ALIGN.tokens[22:]))),
        (ALIGN, replace(aligned(ALIGN.tokens), cells=30)),
        (ALIGN, replace(aligned(ALIGN.tokens), status=(*PINNED.status,))),
        (PIN, OLD),
        (PIN, replace(PINNED, status=(*OLD.status[:11], *["pinned"] * 4, *OLD.status[15:]))),
        (Change("fork"), OLD),
    ],
)
def test_other_states_are_refused(change: Change, new: Content) -> None:
    assert not is_effect(change, OLD, new)


def test_a_compression_made_twice_has_too_few_cells() -> None:
    assert is_effect(COMPRESS, FULL, compressed(FULL, 34))
    assert not is_effect(COMPRESS, FULL, compressed(FULL, 23))
    assert not is_effect(COMPRESS, FULL, replace(FULL, cells=34))


def content_of(session: Session) -> Content:
    return Content(tuple(session.tokens), tuple(session.token_status), session.cache.cells)


@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_a_session_of_the_library_changes_as_expected(policy: str) -> None:
    """All changes but turns, one after the other; the replay takes what it feeds from them."""
    first: Tokens = tuple(range(1, 101))
    moved = (*first[:9], *range(150, 153), *first[9:20], *first[24:])
    changes = [
        Change("feed", tokens=first),
        Change("pin", 8, 12),
        Change("insert", 9, 9, (150, 151, 152)),
        Change("delete", 23, 27),
        Change("align", 40, tokens=(*moved[:40], *moved[42:], *moved[4:8])),
        Change("generate", 101, 101, max_answer=3),
        Change("rewind", 102, 104),
        Change("feed", 102, 102, (160, 161)),
    ]
    changes += [COMPRESS, Change("feed", 104, 104, (5, 6))] if policy == "full" else []
    session, point = small_model().session(512, policy=policy), list[SessionPoint]()
    for change in changes:
        before = content_of(session)
        tokens = (*before.tokens, *[0] * change.max_answer)
        if change.kind == "feed":
            tokens = (*before.tokens, *change.tokens)
        point = [SessionPoint(replace(before, tokens=tokens), 1, change)]
        session = replay_changes(session, point)
        after = content_of(session)
        assert before.tokens or after == first_content(first, policy)
        assert not before.tokens or is_effect(change, before, after), change
    assert {"mode", "ratio"} <= {*ALIGNMENT, *COMPRESSION}


def test_a_message_has_the_tokens_of_a_conversation(tiny_folder: Path) -> None:
    model = load_model(str(tiny_folder))
    end_id, other_id = model.end_token_ids[0], 5
    end_ids, question = (end_id, other_id), "What is a cell?"
    for last_ids, is_removed in [([], False), ([end_id], False), ([other_id], True)]:
        session = model.session(512)
        session.feed([*model.text.encode("The cells of a window."), *last_ids])
        before = tuple(session.tokens)
        kept, ids = message_tokens(model.text, end_ids, before, question)
        assert Conversation(session, model.text, end_ids, None).begin_turn(question) == list(ids)
        assert before[:kept] == tuple(session.tokens)
        assert kept == len(before) - is_removed
        assert (end_id in ids[:1]) == (last_ids != [end_id])
