"""Compressed cells on the compiled path: decode, chunks, groups, and the queries it observes."""

import pytest
import torch
from compiled.test_decoding import by_torch, last
from listed_cells import biased
from packed_model import packed_model, spec_of, spec_with_states

from kvkeep import SessionGroup
from kvkeep.cache import Cells, Segment
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.model import Model
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

PROMPT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(600)]
FAMILIES = [("llama", 64), ("llama", 32), ("qwen2", 96), ("qwen3", 128)]


def compressed(model: Model, count: int = 600, ratio: float = 3.0) -> Session:
    session = model.session(policy="full")
    session.feed(PROMPT[:count])
    session.compress(ratio, "keydiff", recent=30)
    return biased(session)


def transplanted(session: Session, model: Model) -> Session:
    """Return a session of the same model in another dtype with the same cells."""
    other, cache = model.session(policy="full"), session.cache
    there = other.cache
    for segment in cache.segments:
        cells = segment.read(0, segment.length)
        keys, values = (x.to(there.layout.dtype) for x in (cells.keys, cells.values))
        cells = Cells(keys, values, cells.positions, cells.serials, cells.bias)
        there.segments.append(
            Segment.from_cells(there.layout, cells, segment.position_map, segment.is_anchor)
        )
    there.time, there.serial = cache.time, cache.serial
    if model.spec.states is not None:
        dtypes = model.spec.states.all_dtypes(there.layout.dtype)
        states = cache.recurrent_states.items()
        there.recurrent_states = {name: x.to(dtypes[name]) for name, x in states}
    other.core.memory.tokens, other.core.memory.serials = (
        session.tokens,
        session.core.memory.serials,
    )
    return other


@pytest.mark.parametrize("step", [1, 50])
@pytest.mark.parametrize(("family", "head_dim"), FAMILIES)
def test_logits_are_as_near_to_float32_as_torch_in_bfloat16(
    family: str, head_dim: int, step: int
) -> None:
    assert_as_near_as_torch(packed_model(spec_of(head_dim, family), None), step)


@pytest.mark.parametrize("step", [1, 50])
@pytest.mark.parametrize("kind", ["convolution", "delta_net", "mamba2, beside attention"])
def test_with_states_logits_are_as_near_to_float32_as_torch(kind: str, step: int) -> None:
    assert_as_near_as_torch(packed_model(spec_with_states(kind), None), step)


def assert_as_near_as_torch(model: Model, step: int) -> None:
    assert isinstance(model.decoder.executor, CompiledExecutor)
    session = compressed(model)
    sessions = [session]
    for dtype in (torch.bfloat16, torch.float32):
        sessions.append(transplanted(session, by_torch(model, dtype)))
    rows: list[list[torch.Tensor]] = [[], [], []]
    for first in range(0, 6 * step, step):
        for each, results in zip(sessions, rows, strict=True):
            each.feed(PROMPT[first : first + step])
            results.append(last(each))
    here, there, exact = (torch.stack(results) for results in rows)
    assert exact.abs().max() > 5
    assert (here - exact).square().mean() <= 1.2 * (there - exact).square().mean()


@pytest.mark.parametrize("bits", [None, 4])
def test_a_group_of_forks_gives_the_same_bits_as_each_fork_alone(bits: int | None) -> None:
    model = packed_model(spec_of(), bits)  # type: ignore[arg-type]
    parent = compressed(model)
    together, alone = ([parent.fork() for _ in range(4)] for _ in range(2))
    for forks in (together, alone):
        for index, fork in enumerate(forks):
            fork.feed(PROMPT[index : 2 * index + 1])
    group = SessionGroup(together)
    for _ in range(20):
        assert group.next_tokens() == [session.next_token() for session in alone]
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(last(one), last(other))


def test_a_group_of_archives_gives_the_same_bits_as_each_alone() -> None:
    model = packed_model(spec_of(), 4)

    def sessions() -> list[Session]:
        parent = model.session(96, policy="archive", method="snapkv", window=40)
        parent.feed(PROMPT[:300])
        return [parent, parent.fork(), compressed(model, 200)]

    group, alone = SessionGroup(sessions()), sessions()
    for _ in range(30):
        assert group.next_tokens() == [session.next_token() for session in alone]
        for one, other in zip(group.sessions, alone, strict=True):
            assert torch.equal(last(one), last(other))


@pytest.mark.parametrize(("family", "head_dim"), FAMILIES)
def test_observed_queries_equal_those_of_torch_to_bfloat16_rounding(
    family: str, head_dim: int
) -> None:
    model = packed_model(spec_of(head_dim, family), None)
    results = []
    for each in (model, by_torch(model, torch.bfloat16)):
        session = each.session()
        session.cache.observe()
        session.feed(PROMPT[:40])  # in a chunk
        for token in PROMPT[40:50]:
            session.feed([token])
        fork = session.fork()
        group = SessionGroup([session, fork])
        for token in PROMPT[50:55]:
            for one in group.sessions:
                one.core.memory.append([], one.core.memory.hidden, forced(one, token))
            group.next_tokens()
        for one in group.sessions:
            assert one.cache.observer is not None
            queries = one.cache.observer.queries()
            assert queries is not None
            assert queries.times.tolist() == list(range(55))
            results.append(queries.vectors.float())
    for here, there in zip(results[:2], results[2:], strict=True):
        assert (here - there).square().mean() <= 1e-3 * there.square().mean()


def forced(session: Session, token: int) -> torch.Tensor:
    """Return logits whose argmax is a token."""
    logits = torch.zeros_like(last(session))
    logits[token] = 1.0
    return logits
