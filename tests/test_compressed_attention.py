"""Attention over compressed cells equals a dense reference, with a bias for each cell."""

from collections.abc import Callable

import pytest
from listed_cells import ListedCells, biased
from policies.archives import Setting
from small_models import small_model

from kvkeep import SessionGroup
from kvkeep.cache import RaggedCells
from kvkeep.session.session import Session

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(400)]


def compressed(method: str = "keydiff", ratio: float = 3.0) -> Session:
    session = MODEL.session(policy="full")
    session.feed(TEXT[:300])
    session.compress(ratio, method, recent=20)
    return biased(session)


def edited() -> Session:
    session = compressed()
    session.delete(285, 289)
    session.insert(295, TEXT[:7])
    return session


def twice() -> Session:
    session = compressed("fitted", 2.0)
    session.feed(TEXT[:60])
    session.compress(2.0, "fitted", recent=20)
    return session


def archive_after_block() -> Session:
    """An archive one token after a block was compressed, so that none follows soon."""
    return biased(Setting().fed(245))


def archive_edited() -> Session:
    session = Setting().fed(245)
    session.delete(235, 238)
    return biased(session)


def by_heads(ratio: float = 3.0) -> Session:
    """A session in which each layer and KV head has its own number of cells."""
    session = MODEL.session(policy="full")
    session.feed(TEXT[:300])
    session.compress(ratio, "keydiff", recent=20, budget="heads")
    return biased(session)


def by_heads_pinned() -> Session:
    """Two runs of ragged cells with exact cells between them."""
    session = MODEL.session(policy="full")
    session.feed(TEXT[:300])
    session.pin(150, 160)
    session.compress(3.0, "keydiff", recent=20, budget="heads")
    return biased(session)


def by_heads_edited() -> Session:
    session = by_heads()
    session.delete(285, 289)
    session.insert(295, TEXT[:7])
    return session


def by_heads_edited_before() -> Session:
    """Ragged cells on both sides of an edit in a pin; those before it move."""
    session = by_heads_pinned()
    session.replace(152, 155, TEXT[:1])
    return session


def by_heads_twice() -> Session:
    session = by_heads(2.0)
    session.feed(TEXT[:60])
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    return session


def by_heads_then_uniform() -> Session:
    """Ragged cells compressed again by the same ratio in every head."""
    session = by_heads(2.0)
    session.feed(TEXT[:60])
    session.compress(2.0, "fitted", recent=20, budget="uniform")
    return session


def uniform_then_by_heads() -> Session:
    session = compressed("fitted", 2.0)
    session.feed(TEXT[:60])
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    return session


RAGGED = [
    by_heads,
    by_heads_pinned,
    by_heads_edited,
    by_heads_edited_before,
    by_heads_twice,
    by_heads_then_uniform,
    uniform_then_by_heads,
]
SESSIONS = [compressed, edited, twice, archive_after_block, archive_edited, *RAGGED]


@pytest.mark.parametrize("make", RAGGED)
def test_heads_have_different_numbers_of_cells(make: Callable[[], Session]) -> None:
    slots = [segment.block.slots for segment in make().cache.segments]
    ragged = [cells for cells in slots if isinstance(cells, RaggedCells)]
    assert ragged
    assert len({int(count) for cells in ragged for count in cells.counts.flatten()}) > 1


@pytest.mark.parametrize("step", [1, 5, 64])
@pytest.mark.parametrize("make", SESSIONS)
def test_logits_equal_the_dense_reference(make: Callable[[], Session], step: int) -> None:
    session = make()
    session.prefill_step = step
    reference = ListedCells(session, MODEL.decoder)
    assert reference.bias[0, 0].abs().max() > 0.5
    for first in (0, 3):
        expected = reference.feed(TEXT[first : first + 3])
        session.feed(TEXT[first : first + 3])
        assert (session.logits - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("make", SESSIONS)
def test_logits_of_a_group_of_forks_equal_the_dense_reference(make: Callable[[], Session]) -> None:
    parent = make()
    group = SessionGroup([parent.fork() for _ in range(3)])
    for index, fork in enumerate(group.sessions):
        fork.feed([index + 1])
    references = [ListedCells(fork, MODEL.decoder) for fork in group.sessions]
    for _ in range(2):
        tokens = group.next_tokens()
        for fork, reference, token in zip(group.sessions, references, tokens, strict=True):
            assert (fork.logits - reference.feed([token])).abs().max() <= 1e-3
