"""Ragged cells on the compiled path: decode, chunks, groups.

Heads that have nothing are among them, a layer that has nothing, and heads with several hundreds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled.test_compressed import FAMILIES, PROMPT
from compiled.test_decoding import by_torch, last
from listed_cells import biased
from packed_model import VOCABULARY, packed_model, spec_of

from kvkeep import SessionGroup
from kvkeep.cache import Cells, RaggedCells, Segment
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.model import Model
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

BITS = [None, "8", "8/4", "4"]


def by_heads(model: Model, ratio: float = 3.0, kv_bits: Any = None) -> Session:
    session = model.session(policy="full", kv_bits=kv_bits)
    session.feed(PROMPT)
    session.compress(ratio, "keydiff", recent=30, budget="heads")
    return biased(session)


def two_runs(model: Model, ratio: float = 3.0, kv_bits: Any = None) -> Session:
    """Return a session with two segments, the first empty in all but some heads."""
    session = model.session(policy="full", kv_bits=kv_bits)
    session.feed(PROMPT)
    session.pin(8, 200)
    session.compress(ratio / 2, "keydiff", recent=30, budget="heads")
    return biased(session)


def emptied(model: Model, ratio: float = 3.0, kv_bits: Any = None) -> Session:
    """Return a session in which one head and one layer have no cells."""
    session = by_heads(model, ratio, kv_bits)
    for index, segment in enumerate(session.cache.segments):
        cells = segment.block.slots
        if isinstance(cells, RaggedCells):
            mask = torch.ones(cells.total, dtype=torch.bool)
            for place in ((0, 1), (1, 0), (1, 1)):
                mask[cells.head_slice(*place)] = False
            remaining = RaggedCells.select_from(cells, mask)
            assert (remaining.counts == 0).sum() == 3
            session.cache.segments[index] = Segment.from_cells(
                segment.layout, remaining, segment.position_map, segment.is_anchor
            )
    return session


MADE = [by_heads, two_runs, emptied]


def transplanted(session: Session, model: Model, kv_bits: Any = None) -> Session:
    """Return a session of the same model in another dtype with the same cells."""
    other, cache = model.session(policy="full", kv_bits=kv_bits), session.cache
    there = other.cache
    for segment in cache.segments:
        cells = in_dtype(segment.read(0, segment.length), there.layout.dtype)
        there.segments.append(
            Segment.from_cells(there.layout, cells, segment.position_map, segment.is_anchor)
        )
    there.time, there.serial = cache.time, cache.serial
    other.core.memory.tokens, other.core.memory.serials = (
        session.tokens,
        session.core.memory.serials,
    )
    return other


def in_dtype(cells: Cells, dtype: torch.dtype) -> Cells:
    tensors = [
        x.to(dtype) if isinstance(x, torch.Tensor) else x
        for x in (cells.stored_keys, cells.stored_values)
    ]
    return replace(cells, stored_keys=tensors[0], stored_values=tensors[1])


def require_near(model: Model, session: Session, step: int, kv_bits: Any = None) -> None:
    """Check that logits are as near to float32 as torch's in bfloat16, over several texts.

    Of one text each is half as far again as the other now and then.
    """
    assert isinstance(model.decoder.executor, CompiledExecutor)
    assert any(isinstance(each.block.slots, RaggedCells) for each in session.cache.segments)
    others = [by_torch(model, dtype) for dtype in (torch.bfloat16, torch.float32)]
    errors = torch.zeros(2)
    for text in range(10):
        sessions = [session.fork(), *(transplanted(session, each, kv_bits) for each in others)]
        rows: list[list[torch.Tensor]] = [[], [], []]
        for first in range(0, 3 * step, step):
            ids = [(token + 61 * text) % VOCABULARY for token in PROMPT[first : first + step]]
            for each, results in zip(sessions, rows, strict=True):
                each.feed(ids)
                results.append(last(each))
        here, there, exact = (torch.stack(results) for results in rows)
        assert exact.abs().max() > 5
        errors += torch.stack([(here - exact).square().mean(), (there - exact).square().mean()])
    assert errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("step", [1, 50])
@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize(("family", "head_dim"), FAMILIES)
def test_logits_are_as_near_to_float32_as_torch_in_bfloat16(
    family: str, head_dim: int, make: Callable[..., Session], step: int
) -> None:
    model = packed_model(spec_of(head_dim, family), None)
    require_near(model, make(model), step)


@pytest.mark.parametrize("step", [1, 50])
@pytest.mark.parametrize("kv_bits", BITS[1:])
def test_logits_over_quantised_cells_are_as_near_to_float32_as_torch(
    kv_bits: str, step: int
) -> None:
    """One step each: later steps read cells that each arithmetic has quantised in its own way."""
    model, errors = packed_model(spec_of(), None), torch.zeros(2)
    for make in MADE:
        session = make(model, kv_bits=kv_bits)
        others = [
            transplanted(session, by_torch(model, dtype), kv_bits)
            for dtype in (torch.bfloat16, torch.float32)
        ]
        for first in range(0, 240, 40):
            here, there, exact = (
                fed_and_forgotten(each, PROMPT[first : first + step]) for each in (session, *others)
            )
            errors += torch.stack([(here - exact).square().mean(), (there - exact).square().mean()])
    # In 4 bits the kernels for chunks, of even cells too, err a quarter more than torch.
    assert errors[0] <= 1.5 * errors[1]


def fed_and_forgotten(session: Session, tokens: list[int]) -> torch.Tensor:
    """Return the logits of a fork of the session after some tokens."""
    fork = session.fork()
    fork.feed(tokens)
    return last(fork)


@pytest.mark.parametrize("step", [1, 50])
def test_logits_over_more_cells_than_a_unit_are_as_near_to_float32_as_torch(step: int) -> None:
    model = packed_model(spec_of(), None)
    session = model.session(policy="full")
    session.feed(PROMPT)
    session.compress(1.5, "knorm", recent=30, budget="heads")
    (cells,) = (s.block.slots for s in session.cache.segments if s.compressed)
    assert isinstance(cells, RaggedCells)
    assert cells.max_count > 256 + 64
    assert int(cells.counts.min()) < cells.max_count - 64
    require_near(model, session, step)


@pytest.mark.parametrize("kv_bits", BITS)
@pytest.mark.parametrize("make", MADE)
def test_a_group_of_forks_gives_the_same_bits_as_each_fork_alone(
    make: Callable[..., Session], kv_bits: str | None
) -> None:
    parent = make(packed_model(spec_of(), 4), kv_bits=kv_bits)
    together, alone = ([parent.fork() for _ in range(4)] for _ in range(2))
    for forks in (together, alone):
        for index, fork in enumerate(forks):
            fork.feed(PROMPT[index : 2 * index + 1])
    group = SessionGroup(together)
    for _ in range(10):
        assert group.next_tokens() == [session.next_token() for session in alone]
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(last(one), last(other))


def test_a_group_of_all_kinds_of_cells_gives_the_same_bits_as_each_alone() -> None:
    model = packed_model(spec_of(), None)

    def sessions() -> list[Session]:
        even = model.session(policy="full")
        even.feed(PROMPT[:300])
        even.compress(3.0, "keydiff", recent=30)
        parent = by_heads(model)
        return [parent, even, parent.fork(), emptied(model, 5.0), model_fed(model)]

    group, alone = SessionGroup(sessions()), sessions()
    for _ in range(10):
        assert group.next_tokens() == [session.next_token() for session in alone]
        for one, other in zip(group.sessions, alone, strict=True):
            assert torch.equal(last(one), last(other))


def model_fed(model: Model) -> Session:
    session = model.session(64)
    session.feed(PROMPT[:100])
    return session


@pytest.mark.parametrize("make", MADE)
def test_logits_are_the_same_on_any_number_of_threads(make: Callable[..., Session]) -> None:
    parent, results = make(packed_model(spec_of(), None)), []
    for threads in (1, 2, 5):
        session = parent.fork()
        torch.set_num_threads(threads)
        session.feed(PROMPT[:50])
        for token in PROMPT[50:53]:
            session.feed([token])
        results.append(last(session))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_memory_shared_by_forks_is_counted_once_and_to_the_byte() -> None:
    parent = by_heads(packed_model(spec_of(), None))
    (cells,) = (s.block.slots for s in parent.cache.segments if s.compressed)
    assert isinstance(cells, RaggedCells)
    each = 2 * 64 * 2 + 8 + 4  # a key and a value in bfloat16, a position and a bias
    assert cells.nbytes == cells.total * each + 8 * cells.counts.numel()
    group = SessionGroup([parent.fork() for _ in range(5)])
    alone = SessionGroup([parent.fork()])
    assert group.nbytes == alone.nbytes == parent.cache.nbytes
