"""Text that says the same again, word for word: only repeats go, where that is enough."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policies.archives import same, state
from small import small_model
from test_compress import cells_of, require_untouched

from kvkeep import Session
from kvkeep.cache import NO_TOKEN, Cells
from kvkeep.compression.methods.repeats import RUN, find_repeats
from kvkeep.evaluate.passkey import JUNK, PREFIX
from kvkeep.model import Model

ONCE = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(60)]
LINE = [(i * 11) % 97 + 100 for i in range(30)]
TEXT = ONCE[:20] + LINE * 20 + ONCE[20:] + LINE * 20
FACT = " The pass key is 56700. Remember it. 56700 is the pass key."


def fed(model: Model | None = None, ids: list[int] = TEXT) -> Session:
    session = (model or small_model()).session(policy="full")
    session.feed(ids)
    return session


def compressed_cells(session: Session) -> Cells:
    """All of them, each head's in their order."""
    parts = [
        segment.read(0, segment.length) for segment in session.cache.segments if segment.compressed
    ]
    return Cells.concatenate(parts)


@given(st.lists(st.integers(0, 1), max_size=120))
def test_a_token_was_said_before_if_a_run_with_it_was(tokens: list[int]) -> None:
    expected = [False] * len(tokens)
    for first in range(len(tokens) - RUN + 1):
        run = tokens[first : first + RUN]
        if any(tokens[at : at + RUN] == run for at in range(first)):
            expected[first : first + RUN] = [True] * RUN
    assert find_repeats(tokens).tolist() == expected


def test_a_token_of_a_run_that_is_too_short_was_not() -> None:
    run = list(range(RUN - 1))
    assert not find_repeats([*run, 99, *run, 98]).any()
    assert find_repeats([*run, 99, *run, 99]).tolist() == [False] * RUN + [True] * RUN


@pytest.mark.parametrize("pin", [None, (300, 310)])
@pytest.mark.parametrize("ratio", [2.0, 8.0])
def test_what_is_said_once_stays_in_every_head(ratio: float, pin: tuple[int, int] | None) -> None:
    session = fed()
    if pin:
        session.pin(*pin)
    before = cells_of(session)
    report = session.compress(ratio, recent=20)
    left = -(-len(TEXT) // int(ratio))
    assert (report.method, report.budget) == ("kvzip", "uniform")
    assert session.cache.cells == report.cells_after == left
    kept = {*range(4), *range(len(TEXT) - 20, len(TEXT)), *(range(*pin) if pin else ())}
    require_untouched(before, cells_of(session), sorted(kept))
    assert sum(chunk.cells_before for chunk in report.chunks) == len(TEXT) - len(kept)
    assert sum(chunk.cells_after for chunk in report.chunks) == left - len(kept)
    assert sum(chunk.merged for chunk in report.chunks) > 0
    cells = compressed_cells(session)
    assert cells.bias is not None
    assert (cells.bias == 0).all(), "how often the same was said counts for nothing"
    assert (cells.serials == NO_TOKEN).all()
    assert (cells.positions.diff(dim=-1) > 0).all()
    once = set((~find_repeats(TEXT)).nonzero()[:, 0].tolist()) - kept
    for layer, head in ((a, b) for a in range(2) for b in range(2)):
        at = {int(each): index for index, each in enumerate(cells.positions[layer, head])}
        assert once <= at.keys()
        for token in once:
            keys, values, position = before[token]
            assert position == token
            assert torch.equal(cells.keys[layer, head, at[token]], keys[layer, head])
            assert torch.equal(cells.values[layer, head, at[token]], values[layer, head])


@pytest.mark.parametrize(("ratio", "newest"), [(2, 256), (4, 155), (8, 38)])
def test_as_many_of_the_newest_stay_as_where_heads_compete_or_256(ratio: int, newest: int) -> None:
    ids = ONCE[:20] + LINE * 20 + ONCE[20:40] + LINE * 20
    session = fed(ids=ids)
    assert len(ids) == 1240
    before = cells_of(session)
    assert session.compress(ratio).budget == "uniform"
    after = cells_of(session)
    require_untouched(before, after, [*range(4), *range(len(ids) - newest, len(ids))])
    assert len(after) == 4 + newest


def test_where_leaving_repeats_is_not_enough_heads_compete() -> None:
    session, asked = fed(), fed()
    assert session.compress(16, recent=20).budget == "heads"
    assert asked.compress(16, "kvzip", 20, budget="heads").budget == "heads"
    session.feed(ONCE)
    asked.feed(ONCE)
    assert torch.equal(session.logits, asked.logits)
    assert fed().compress(2, budget="heads").budget == "heads", "unless somebody says otherwise"
    assert fed(ids=TEXT[: 20 + 30]).compress(1.5, recent=4).budget == "heads", "no repeats"
    assert fed().compress(2, "fitted").method == "fitted"


@pytest.mark.parametrize(("once", "budget"), [(70, "uniform"), (71, "heads")])
def test_heads_compete_where_hardly_a_repeat_would_be_left(once: int, budget: str) -> None:
    """Of 640 cells 100 are left, of which 80 are not the first or the newest: 10 are an eighth."""
    said = [255 - each for each in range(4 + once - len(LINE))]  # and a line of 30 is said once
    ids = (said + LINE * 25)[:640]
    session = fed(ids=ids)
    assert session.compress(6.4, recent=16).budget == budget


def test_of_a_few_repeats_between_pinned_cells_nothing_may_stay() -> None:
    session = fed(ids=ONCE[:10] + LINE * 40)
    for pin in ((300, 305), (307, 320), (321, 330)):
        session.pin(*pin)
    assert session.compress(8, recent=20).budget == "uniform"
    assert session.cache.cells == -(-1210 // 8)
    session.next_token()


def test_progress_is_told_and_an_interrupt_leaves_the_session_as_it_was() -> None:
    told: list[int] = []
    fed().compress(4, recent=20, progress=told.append)
    assert sum(told) == len(TEXT) - 24
    session = fed()
    before = state(session)

    def interrupted(cells: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.compress(4, recent=20, progress=interrupted)
    assert same(state(session), before)


@pytest.mark.parametrize("kv_bits", ["8", "8/4"])
def test_cells_of_few_bits_stay_so(kv_bits: str) -> None:
    session = small_model().session(policy="full", kv_bits=kv_bits)
    session.feed(TEXT)
    other = session.fork().compress(4, "fitted", recent=20)
    report = session.compress(4, recent=20)
    assert report.budget == "uniform"
    assert report.bytes_after == other.bytes_after
    session.feed(ONCE)
    assert session.fork().next_token() == session.next_token()


def test_a_fact_among_repeats_is_whole_in_every_head(smollm2: Model) -> None:
    """In a quarter of the cells; where heads competed for them, each had lost some of it."""
    encode = smollm2.text.encode
    ids = encode(PREFIX + JUNK * 20 + FACT + JUNK * 20)
    first, length = len(encode(PREFIX + JUNK * 20)), len(encode(FACT))
    fact = set(range(first + 1, first + length - 1))  # a sentence began and ended so before
    session = fed(smollm2, ids)
    session.compress(4)
    held = compressed_cells(session).positions
    assert all(fact <= set(head.tolist()) for layer in held for head in layer)
    session.feed(" What is the pass key? The pass key is")
    assert "".join(session.stream(7)).startswith(" 56700")
