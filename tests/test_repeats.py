"""Compressing text with verbatim repeats: only repeats are evicted if that is enough."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policies.archives import same, state
from small_models import small_model
from test_compress import cells_of, require_unchanged

from kvkeep import Session
from kvkeep.cache import NO_TOKEN, Cells
from kvkeep.compression.methods.repeats import RUN_TOKENS, find_repeats
from kvkeep.evaluate.datasets import JUNK, PREFIX
from kvkeep.model import Model

UNIQUE = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(60)]
LINE = [(i * 11) % 97 + 100 for i in range(30)]
TEXT = UNIQUE[:20] + LINE * 20 + UNIQUE[20:] + LINE * 20
FACT = " The pass key is 56700. Remember it. 56700 is the pass key."


def fed(model: Model | None = None, ids: list[int] = TEXT) -> Session:
    session = (model or small_model()).session(policy="full")
    session.feed(ids)
    return session


def compressed_cells(session: Session) -> Cells:
    """Return all compressed cells, concatenated in order."""
    parts = [
        segment.read(0, segment.length) for segment in session.cache.segments if segment.compressed
    ]
    return Cells.concatenate(parts)


@given(st.lists(st.integers(0, 1), max_size=120))
def test_find_repeats_marks_tokens_of_runs_that_occurred_before(tokens: list[int]) -> None:
    expected = [False] * len(tokens)
    for first in range(len(tokens) - RUN_TOKENS + 1):
        run = tokens[first : first + RUN_TOKENS]
        if any(tokens[at : at + RUN_TOKENS] == run for at in range(first)):
            expected[first : first + RUN_TOKENS] = [True] * RUN_TOKENS
    assert find_repeats(tokens).tolist() == expected


def test_runs_below_the_minimal_length_are_no_repeats() -> None:
    run = list(range(RUN_TOKENS - 1))
    assert not find_repeats([*run, 99, *run, 98]).any()
    assert find_repeats([*run, 99, *run, 99]).tolist() == [False] * RUN_TOKENS + [True] * RUN_TOKENS


@pytest.mark.parametrize("pin", [None, (300, 310)])
@pytest.mark.parametrize("ratio", [2.0, 8.0])
def test_tokens_without_repeats_are_kept_in_every_head(
    ratio: float, pin: tuple[int, int] | None
) -> None:
    session = fed()
    if pin:
        session.pin(*pin)
    before = cells_of(session)
    report = session.compress(ratio, recent=20)
    expected_cells = -(-len(TEXT) // int(ratio))
    assert (report.method, report.budget) == ("kvzip", "uniform")
    assert session.cache.cells == report.cells_after == expected_cells
    kept_serials = {*range(4), *range(len(TEXT) - 20, len(TEXT)), *(range(*pin) if pin else ())}
    require_unchanged(before, cells_of(session), sorted(kept_serials))
    assert sum(chunk.cells_before for chunk in report.chunks) == len(TEXT) - len(kept_serials)
    assert sum(chunk.cells_after for chunk in report.chunks) == expected_cells - len(kept_serials)
    assert sum(chunk.merged for chunk in report.chunks) > 0
    cells = compressed_cells(session)
    assert cells.bias is not None
    assert (cells.bias == 0).all(), "evicted repeats add no bias to the kept cells"
    assert (cells.serials == NO_TOKEN).all()
    assert (cells.positions.diff(dim=-1) > 0).all()
    unique_tokens = set((~find_repeats(TEXT)).nonzero()[:, 0].tolist()) - kept_serials
    for layer, head in ((a, b) for a in range(2) for b in range(2)):
        at = {
            int(cell_position): index
            for index, cell_position in enumerate(cells.positions[layer, head])
        }
        assert unique_tokens <= at.keys()
        for token in unique_tokens:
            keys, values, token_position = before[token]
            assert token_position == token
            assert torch.equal(cells.keys[layer, head, at[token]], keys[layer, head])
            assert torch.equal(cells.values[layer, head, at[token]], values[layer, head])


@pytest.mark.parametrize(("ratio", "newest"), [(2, 256), (4, 155), (8, 38)])
def test_the_number_of_newest_cells_is_that_of_budget_heads_but_at_most_256(
    ratio: int, newest: int
) -> None:
    ids = UNIQUE[:20] + LINE * 20 + UNIQUE[20:40] + LINE * 20
    session = fed(ids=ids)
    assert len(ids) == 1240
    before = cells_of(session)
    assert session.compress(ratio).budget == "uniform"
    after = cells_of(session)
    require_unchanged(before, after, [*range(4), *range(len(ids) - newest, len(ids))])
    assert len(after) == 4 + newest


def test_heads_compete_if_evicting_repeats_is_not_enough() -> None:
    session, explicit = fed(), fed()
    assert session.compress(16, recent=20).budget == "heads"
    assert explicit.compress(16, "kvzip", 20, budget="heads").budget == "heads"
    session.feed(UNIQUE)
    explicit.feed(UNIQUE)
    assert torch.equal(session.logits, explicit.logits)
    assert fed().compress(2, budget="heads").budget == "heads", "an explicit budget is used"
    assert fed(ids=TEXT[: 20 + 30]).compress(1.5, recent=4).budget == "heads", (
        "the text has no repeats"
    )
    assert fed().compress(2, "fitted").method == "fitted"


@pytest.mark.parametrize(("unique", "budget"), [(70, "uniform"), (71, "heads")])
def test_heads_compete_if_too_few_repeats_would_be_kept(unique: int, budget: str) -> None:
    """Of 640 cells 100 are kept, of which 80 are neither sinks nor recent. With budget "uniform" at
    least an eighth of these, 10 cells, must be repeats.
    """
    # The first occurrence of the line of 30 is unique as well.
    unique_prefix = [255 - number for number in range(4 + unique - len(LINE))]
    ids = (unique_prefix + LINE * 25)[:640]
    session = fed(ids=ids)
    assert session.compress(6.4, recent=16).budget == budget


def test_short_runs_of_repeats_between_pins_can_be_evicted_entirely() -> None:
    session = fed(ids=UNIQUE[:10] + LINE * 40)
    for pin in ((300, 305), (307, 320), (321, 330)):
        session.pin(*pin)
    assert session.compress(8, recent=20).budget == "uniform"
    assert session.cache.cells == -(-1210 // 8)
    session.next_token()


def test_progress_counts_cells_and_an_interrupt_leaves_the_session_unchanged() -> None:
    progress_counts: list[int] = []
    fed().compress(4, recent=20, progress=progress_counts.append)
    assert sum(progress_counts) == len(TEXT) - 24
    session = fed()
    before = state(session)

    def interrupted(cells: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.compress(4, recent=20, progress=interrupted)
    assert same(state(session), before)


@pytest.mark.parametrize("kv_bits", ["8", "8/4"])
def test_quantised_cells_stay_quantised(kv_bits: str) -> None:
    session = small_model().session(policy="full", kv_bits=kv_bits)
    session.feed(TEXT)
    fitted = session.fork().compress(4, "fitted", recent=20)
    report = session.compress(4, recent=20)
    assert report.budget == "uniform"
    assert report.bytes_after == fitted.bytes_after
    session.feed(UNIQUE)
    assert session.fork().next_token() == session.next_token()


def test_a_fact_among_repeats_is_kept_whole_in_every_head(smollm2: Model) -> None:
    """At ratio 4. When heads competed for these cells, each head lost part of the fact."""
    encode = smollm2.text.encode
    ids = encode(PREFIX + JUNK * 20 + FACT + JUNK * 20)
    first, length = len(encode(PREFIX + JUNK * 20)), len(encode(FACT))
    fact = set(range(first + 1, first + length - 1))  # its first and last tokens occurred before
    session = fed(smollm2, ids)
    session.compress(4)
    positions = compressed_cells(session).positions
    assert all(fact <= set(head.tolist()) for layer in positions for head in layer)
    session.feed(" What is the pass key? The pass key is")
    assert "".join(session.stream(7)).startswith(" 56700")
