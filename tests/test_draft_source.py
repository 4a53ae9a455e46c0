"""Drafts from the text of a session: the place that the newest tokens repeat, and what follows."""

import json
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.model import Model
from kvkeep.session.draft_source import DraftSource
from kvkeep.session.drafts import Acceptance, Draft, DraftPlanner, Offer
from kvkeep.session.ngram_index import INDEXED_TOKENS, NgramIndex


def test_a_run_is_looked_up_by_its_last_place() -> None:
    index = NgramIndex([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 7, 2, 3])
    assert index.last_end(4) == 9
    assert index.last_end(5) is None
    assert index.count_matched(9, 4) == 3
    index.extend([4, 5])
    assert index.last_end(9) == 6
    assert index.count_matched(6, 9) == 5
    assert NgramIndex([1]).last_end(2) is None


def test_an_index_that_grows_keeps_the_newest_tokens() -> None:
    index = NgramIndex([1, 2, 3, 4])
    index.extend([9] * 2 * INDEXED_TOKENS)
    assert len(index.tokens) == INDEXED_TOKENS
    index.extend([5, 6, 7, 8, 1, 2])
    assert index.last_end(3) is None
    index.extend([5, 6])
    assert index.last_end(7) == INDEXED_TOKENS + 3


def test_in_long_texts_runs_have_their_last_place() -> None:
    random, found = Random(1), 0
    tokens = [random.randrange(12) for _ in range(5000)]
    whole, grown = NgramIndex(tokens), NgramIndex()
    for first in range(0, len(tokens), 7):
        grown.extend(tokens[first : first + 7])
    for token in range(12):
        run = [*tokens[-2:], token]
        last = max((e for e in range(3, 5001) if tokens[e - 3 : e] == run), default=0)
        for end in (whole.last_end(token), grown.last_end(token)):
            if end is not None:  # another run may have its place in the table
                found += 1
                assert end == last
    assert found > 12


def test_a_draft_is_what_followed_the_newest_tokens() -> None:
    assert DraftSource([1, 2, 3, 4, 5, 6, 2, 3]).draft(4, 2) == Draft([5, 6], 3)
    assert DraftSource([1, 2, 3, 4, 5, 6, 2, 3]).draft(5, 2) is None
    assert DraftSource([1]).draft(2, 3) is None


def test_a_text_that_goes_round_is_continued() -> None:
    assert DraftSource([3, 4, 5] * 4).draft(3, 7) == Draft([4, 5, 3, 4, 5, 3, 4], 10)
    assert DraftSource([8] * 9).draft(8, 4) == Draft([8] * 4, 8)


LINES = [100, 1, 2, 3, 11, 4, 5, 1, 2, 3, 12, 4, 5, 1, 2, 3, 13, 4, 5, 1, 2, 3, 14, 4, 5]
LONG = list(range(200, 280))


def copying(tokens: Sequence[int], source: Sequence[int] = LINES) -> DraftSource:
    """Return the source of a text: `source`, 0, and then `tokens` one by one."""
    drafts = DraftSource([*source, 0])
    for token in tokens:
        drafts.draft(token, 1)
        drafts.extend([token])
    return drafts


def test_a_source_is_followed_where_its_tokens_came_later_too() -> None:
    source = copying(LINES[:9])
    assert source.draft(3, 4) == Draft([12, 4, 5, 1], 10)  # not 11, which came last, nor 14


def test_after_a_token_that_differs_the_source_goes_on_with_the_next_one() -> None:
    source = copying(LINES[:10])
    assert source.draft(77, 4) == Draft([4, 5, 1, 2], 0)  # in place of 12
    source.extend([77])
    assert source.draft(4, 3) == Draft([5, 1, 2], 1)
    source.extend([4, 5, 1, 2])
    assert source.draft(3, 1) == Draft([13], 5)


@pytest.mark.parametrize(("common", "lasts"), [(7, False), (8, True)])
def test_a_short_common_run_is_a_coincidence(common: int, lasts: bool) -> None:
    source = copying(LONG[:common], LONG)
    assert (source.draft(0, 1) is not None) == lasts


def test_a_source_goes_on_after_tokens_that_were_inserted_or_left_out() -> None:
    for inserted, left_out in (([77, 78, 79], 0), ([77, 78, 79], 3), ([], 3), ([], 14)):
        begin = 20 + left_out
        source = copying([*LONG[:20], *inserted, LONG[begin]], LONG)
        draft = source.draft(LONG[begin + 1], 2)
        assert draft == Draft(LONG[begin + 2 : begin + 4], 2)


def test_a_source_goes_on_at_the_nearest_place() -> None:
    text = [*LONG[:20], 1, 2, 3, 50, 51, 1, 2, 3, 60, 61]
    source = copying([*LONG[:20], 1, 2], text)
    source.draft(90, 1)  # in place of 3
    source.extend([90, 1, 2])
    assert source.draft(3, 1) == Draft([60], 3)


@pytest.mark.parametrize(("common", "is_left"), [(11, False), (12, True)])
def test_a_source_is_left_for_a_long_run_elsewhere(common: int, is_left: bool) -> None:
    run = [*LONG[21 - common : 20], 500]
    source = copying(LONG[:20], [*LONG, *run, 501, 502])
    assert source.draft(500, 1) == Draft([501], common)
    source.extend([500])
    expected = None if is_left else Draft([LONG[22]], 0)  # the first source goes on
    assert source.draft(99, 1) == expected


@pytest.mark.parametrize(("wrong", "lasts"), [(4, True), (5, False)])
def test_a_source_that_differs_for_long_is_given_up(wrong: int, lasts: bool) -> None:
    source = copying([*LONG[:20], *range(wrong - 1)], LONG)
    assert (source.draft(99, 1) is not None) == lasts
    source = copying([*LONG[:20], 0, 1, *LONG[22:30], *range(wrong - 1)], LONG)
    assert (source.draft(99, 1) is not None) == lasts


def test_a_source_does_not_outlast_the_removal_of_old_tokens() -> None:
    source = DraftSource([*LONG, *[9] * (2 * INDEXED_TOKENS - 120), 0])
    for token in LONG[:20]:
        source.draft(token, 1)
        source.extend([token])
    source.extend([7] * 40)
    assert len(source.tokens) < 2 * INDEXED_TOKENS - 60
    assert source.draft(99, 1) is None


def forwards(prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Return the number of forwards in which an answer is written, where a row costs a fifth."""
    source, acceptance, planner, count, first = (
        DraftSource(prompt),
        Acceptance(),
        DraftPlanner(),
        0,
        0,
    )
    while first < len(answer):
        draft = source.draft(answer[first], len(answer) - first)
        tried = planner.choose([Offer(draft, acceptance)], 63)[0] if draft and draft.tokens else 0
        rows = [answer[first], *(draft.tokens[:tried] if draft else ())]
        right = [row == token for row, token in zip(rows, answer[first:], strict=False)]
        accepted = [*right, False].index(False)
        source.extend(rows[:accepted])
        acceptance.learn(draft, tried, accepted - 1, planner.cost.value)
        first, count = first + accepted, count + 1
    return count


def test_an_edited_list_of_records_is_written_in_few_forwards(smollm2: Model) -> None:
    records = [{"name": f"part {i * 37 % 89}", "size": i * i, "done": False} for i in range(30)]
    edited = [record | {"done": i % 5 == 0} for i, record in enumerate(records)]
    prompt, answer = (smollm2.text.encode(json.dumps(each, indent=1)) for each in (records, edited))
    assert len(answer) > 600
    assert forwards(prompt, answer) < len(answer) / 8


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40),
)
def test_a_draft_is_a_part_of_the_text(text: list[int], steps: list[tuple[int, int]]) -> None:
    source, known = DraftSource(text), list(text)
    for token, count in steps:
        draft = source.draft(token, 5)
        added = [token]
        if draft is not None:
            size = len(known)
            places = range(size + 1)
            run = [*known, token][size + 1 - draft.matched :] if draft.matched else []
            going_round = [([*known[end:], token] * 5)[:5] for end in places]
            assert any(
                known[max(0, end - len(run)) : end] == run
                and list(draft.tokens) in (known[end : end + 5], going_round[end])
                for end in places
            )
            added += list(draft.tokens)[:count]
        source.extend(added)
        known += added
        assert list(source.tokens) == known
