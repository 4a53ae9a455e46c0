"""Forks: what one does, no other sees; and memory is shared for as long as it can be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import local_spec, small_model, state_specs

from kvkeep import Sampling
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.session.session import Session
from tests.examples import examples

MODEL = small_model()
LOCAL_MODEL = small_model(spec=local_spec())
STATE_MODEL = small_model(spec=state_specs()["delta_net"])
MODELS = {"plain": MODEL, "local": LOCAL_MODEL, "delta_net": STATE_MODEL}
TEXT = list(b"one prompt, and several ways to go on from it, none of which knows the others")
TOKENS = st.lists(st.integers(1, 255), min_size=1, max_size=30)

# What a user does with one of several sessions, chosen by the first number.
ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.one_of(
            st.tuples(st.just("feed"), TOKENS),
            st.tuples(st.just("next"), st.integers(1, 6)),
            st.tuples(st.just("rewind"), st.integers(0, 8)),
            st.tuples(st.just("keep"), st.integers(0, 10)),
            st.tuples(st.just("fork"), st.none()),
        ),
    ),
    min_size=2,
    max_size=14,
)


def act(session: Session, kind: str, value: object) -> None:
    try:
        if kind == "feed":
            session.feed(value)  # type: ignore[arg-type]
        elif kind == "rewind":
            session.rewind(value)  # type: ignore[arg-type]
        elif kind == "keep":
            session.keep = value  # type: ignore[assignment]
        elif session.logits is not None:
            for _ in range(value):  # type: ignore[call-overload]
                session.next_token()
    except KvkeepError:
        pass


@settings(max_examples=examples(25))
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["full", "sliding", "shift"]),
    st.sampled_from([16, 24, 64]),
    ACTIONS,
)
def test_forks_equal_sessions_that_were_never_forked(
    name: str, policy: str, budget: int, actions: list
) -> None:
    def new() -> Session:
        keep = None if policy == "full" else 3
        return MODELS[name].session(budget, keep=keep, policy=policy, prefill_step=16)

    def check() -> None:
        for session, alone in zip(family, loners, strict=True):
            assert session.tokens == alone.tokens
            assert session.cache.cells == alone.cache.cells
            if alone.logits is not None:
                assert (session.logits - alone.logits).abs().max() <= 1e-4

    family, loners, histories = [new()], [new()], [[]]
    for who, (kind, value) in actions:
        index = who % len(family)
        if kind == "fork":
            family.append(family[index].fork())
            histories.append(list(histories[index]))
            loners.append(new())
            for step in histories[-1]:
                act(loners[-1], *step)
        else:
            histories[index].append((kind, value))
            act(family[index], kind, value)
            act(loners[index], kind, value)
        check()


@pytest.mark.parametrize("policy", ["full", "sliding", "shift"])
@pytest.mark.parametrize(
    ("name", "count"), [("plain", 20), ("plain", 77), ("local", 40), ("delta_net", 40)]
)
def test_a_fork_changes_no_bit_of_its_parent(policy: str, name: str, count: int) -> None:
    budget = 200 if policy == "full" else 40
    parent, unforked = (MODELS[name].session(budget, policy=policy) for _ in "ab")
    for each in (parent, unforked):
        each.feed(TEXT[:count])
    forks = [parent.fork(), parent.fork()]
    for _ in range(20):
        forks[0].feed([7, 8])
        forks[1].next_token(Sampling(temperature=1, seed=3))
        assert parent.next_token() == unforked.next_token()
        assert torch.equal(parent.logits, unforked.logits)


def test_forks_have_random_generators_of_their_own() -> None:
    how, parent = Sampling(temperature=1.5, seed=5), MODEL.session(64)
    parent.feed(TEXT)
    parent.next_token(how)
    fork, other = parent.fork(), parent.fork()
    expected = [fork.next_token(how) for _ in range(10)]
    assert [parent.next_token(how) for _ in range(10)] == expected
    assert [other.next_token(how) for _ in range(10)] == expected


def test_changing_keep_of_a_fork_changes_only_the_fork() -> None:
    parent = MODEL.session(40, keep=4)
    parent.feed(TEXT)
    fork = parent.fork()
    fork.keep = 9
    assert (parent.keep, fork.keep) == (4, 9)


@pytest.mark.parametrize("policy", ["full", "sliding"])
@pytest.mark.parametrize("at", [0, 1, 4, 30, 60])
def test_a_fork_at_a_token_stands_as_the_session_did_then(policy: str, at: int) -> None:
    session, then = (MODEL.session(128, policy=policy) for _ in "ab")
    session.feed(TEXT)
    fork = session.fork(at=at)
    assert fork.tokens == TEXT[:at]
    assert session.tokens == TEXT
    if at:
        then.feed(TEXT[:at])
        assert (fork.logits - then.logits).abs().max() <= 1e-4
    for each in (fork, then):
        each.feed(TEXT[at:] + TEXT[:9])
    assert (fork.logits - then.logits).abs().max() <= 1e-4


def test_a_fork_at_a_forgotten_token_is_refused() -> None:
    session = MODEL.session(24)
    session.feed(TEXT)
    with pytest.raises(InvalidArgument, match="in the cache"):
        session.fork(at=10)
    for wrong in (-1, len(TEXT) + 1):
        with pytest.raises(InvalidArgument, match="fork must be at 0 to 77"):
            session.fork(at=wrong)


def test_a_fork_at_a_token_has_its_length_while_another_thread_adds_tokens(monkeypatch) -> None:
    session, forked = MODEL.session(128, policy="full"), Session._forked
    session.feed(TEXT)

    def forked_later(session: Session) -> Session:
        session.feed([7, 8])  # as a thread does that gets the compute lock first
        return forked(session)

    monkeypatch.setattr(Session, "_forked", forked_later)
    assert session.fork(at=50).tokens == TEXT[:50]
    assert session.fork(at=len(TEXT) + 4).tokens == [*TEXT, 7, 8, 7, 8]


def storage(session: Session) -> list[int]:
    """Where the cells of a session begin in memory."""
    return [segment.block.slots.keys.data_ptr() for segment in session.cache.segments]


@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_forks_of_a_long_prompt_share_its_memory(policy: str) -> None:
    session = MODEL.session(policy=policy)
    session.feed([1 + i % 255 for i in range(2000)])
    shared, cell = storage(session), session.cache.layout.cell_bytes
    forks = [session.fork() for _ in range(3)]
    for fork in forks:
        for _ in range(20):
            fork.next_token()
    session.next_token()
    for fork in forks:
        assert storage(fork)[: len(shared)] == shared
        own = [s for s in fork.cache.segments if s.block.slots.keys.data_ptr() not in shared]
        assert sum(s.length for s in own) == 20
        assert sum(s.block.slots.nbytes for s in own) <= 300 * cell


def test_forks_of_a_wrapped_window_share_it_until_one_goes_on() -> None:
    session = MODEL.session(64)
    session.feed(TEXT)
    forks = [session.fork(), session.fork()]
    assert storage(session) == storage(forks[0]) == storage(forks[1])
    forks[0].next_token()
    assert storage(session) == storage(forks[1])
    assert storage(session)[-1] != storage(forks[0])[-1]
    assert storage(session)[0] == storage(forks[0])[0]  # the anchors stay shared
