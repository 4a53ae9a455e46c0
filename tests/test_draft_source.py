"""Drafts from the text of a session: the place that the newest tokens repeat, and what follows."""

import json
from collections.abc import Sequence
from random import Random

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
    assert DraftSource([3, 4, 5] * 4).draft(3, 2) == Draft([4, 5], 10)
    assert DraftSource([1]).draft(2, 3) is None


LINES = [100, 1, 2, 3, 11, 4, 5, 1, 2, 3, 12, 4, 5, 1, 2, 3, 13, 4, 5, 1, 2, 3, 14, 4, 5]


def copying(tokens: Sequence[int]) -> DraftSource:
    """Return the source of a text: `LINES`, then `tokens` one by one."""
    source = DraftSource([*LINES, 0])
    for token in tokens:
        source.draft(token, 1)
        source.extend([token])
    return source


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


def test_a_source_goes_on_after_tokens_that_it_has_not_or_that_are_left_out() -> None:
    source = copying([*LINES[:10], 77, 78, 79, 12, 4])  # three more
    assert source.draft(5, 4) == Draft([1, 2, 3, 13], 3)
    source = copying([*LINES[:10], 5, 1, 2])  # two left out
    assert source.draft(3, 1) == Draft([13], 4)


def test_a_source_that_differs_for_long_is_given_up() -> None:
    source = copying([*LINES[:10], 77, 78, 79, 80])
    assert source.draft(81, 1) is None
    source.extend([81, 1, 2])
    assert source.draft(3, 1) == Draft([77], 3)  # which came last


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
            assert draft.tokens == [] or any(
                known[i : i + len(draft.tokens)] == draft.tokens for i in range(len(known))
            )
            matched = min(draft.matched, len(known) + 1)
            assert matched == 0 or [*known, token][-matched:] in (
                known[i : i + matched] for i in range(len(known))
            )
            added += draft.tokens[:count]
        source.extend(added)
        known += added
        assert list(source.tokens) == known
