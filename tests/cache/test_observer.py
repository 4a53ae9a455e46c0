"""An observer records the newest queries before rotation, however their tokens were fed."""

import pytest
import torch
from attention_hooks import attending
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model
from torch import Tensor

from kvkeep import SessionGroup
from kvkeep.cache import Queries
from kvkeep.cache.observer import MAX_QUERIES
from kvkeep.errors import NonFiniteLogits
from kvkeep.models.layers.executor import AnyStep
from kvkeep.session.session import Session
from tests.examples import examples

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(400)]


def observing(step: int = 512, tokens: int = 0, budget: int = 48) -> Session:
    session = MODEL.session(budget, prefill_step=step)
    session.cache.observe()
    if tokens:
        session.feed(TEXT[:tokens])
    return session


def queries(session: Session) -> Queries:
    assert session.cache.observer is not None
    recorded = session.cache.observer.queries()
    assert recorded is not None
    return recorded


def queries_passed_to_attention(tokens: int) -> Tensor:
    """The queries that the model passes to attention: `[layers, heads, n, head_dim]`."""
    session, layers = MODEL.session(48), list[list[Tensor]]([[] for _ in range(2)])

    def listening(step: AnyStep, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers[layer].append(q.clone())
        return step.attend(layer, q, k, v)

    with attending(MODEL.decoder, listening):
        session.feed(TEXT[:tokens])
    return torch.stack([torch.cat(queries) for queries in layers]).transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 40, MAX_QUERIES, MAX_QUERIES + 1, 390])
@pytest.mark.parametrize("step", [1, 7, MAX_QUERIES, 512])
def test_the_newest_queries_are_recorded_unrotated(step: int, tokens: int) -> None:
    actual, expected = (
        queries(observing(step, tokens)),
        queries_passed_to_attention(tokens)[:, :, -MAX_QUERIES:],
    )
    assert actual.times.tolist() == list(range(max(0, tokens - MAX_QUERIES), tokens))
    torch.testing.assert_close(actual.vectors, expected, rtol=1e-4, atol=1e-4)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["feed", "feed", "rewind", "fail", "fork"]), st.integers(1, 150)),
    max_size=8,
)


@settings(max_examples=examples(20))
@given(ACTIONS, st.sampled_from([1, 50, 512]))
def test_queries_follow_rewinds_failures_and_forks(
    actions: list[tuple[str, int]], step: int
) -> None:
    session, times = observing(step, 9, budget=2000), list(range(9))
    for kind, amount in actions:
        total = len(session.tokens)
        if kind == "feed":
            session.feed(TEXT[:amount])
            times = [*times, *range(total, total + amount)][-MAX_QUERIES:]
        elif kind == "rewind" and amount < total:
            session.rewind(amount)  # the token before is evaluated again
            times = [t for t in times if t < total - amount - 1] + [total - amount - 1]
        elif kind == "fail":
            weight = MODEL.decoder.tensors["model.layers.1.mlp.down_proj.weight"]
            sound = weight.clone()
            weight[0, 0] = torch.nan
            with pytest.raises(NonFiniteLogits):
                session.feed(TEXT[:3])
            weight.copy_(sound)
        elif kind == "fork":
            session.fork().feed(TEXT[:amount])
        assert queries(session).times.tolist() == times
        assert queries(session).vectors.shape[2] == len(times)


def test_a_fork_records_its_own_queries() -> None:
    session = observing(tokens=60)
    fork, before = session.fork(), queries(session)
    fork.feed(TEXT[200:210])
    assert torch.equal(queries(session).vectors, before.vectors)
    session.feed(TEXT[60:70])
    alone = observing(tokens=60)
    alone.feed(TEXT[60:70])
    torch.testing.assert_close(queries(session).vectors, queries(alone).vectors)
    assert not torch.equal(queries(fork).vectors[:, :, -1], queries(session).vectors[:, :, -1])


def test_sessions_of_a_group_record_their_own_queries() -> None:
    sessions, alone = ([observing(tokens=n) for n in (20, 60, 45)] for _ in range(2))
    group = SessionGroup(sessions)
    for _ in range(5):
        assert group.next_tokens() == [session.next_token() for session in alone]
    for session, other in zip(sessions, alone, strict=True):
        assert torch.equal(queries(session).times, queries(other).times)
        torch.testing.assert_close(
            queries(session).vectors, queries(other).vectors, rtol=1e-4, atol=1e-4
        )


def test_a_restored_session_has_the_same_queries() -> None:
    session = MODEL.session(300, policy="archive", method="snapkv", prefill_step=100)
    session.feed(TEXT[:200])
    restored = MODEL.restore(session.snapshot())
    for each in (session, restored):
        each.rewind(60)
        each.feed(TEXT[300:310])
    assert torch.equal(queries(session).times, queries(restored).times)
    assert torch.equal(queries(session).vectors, queries(restored).vectors)
