"""Groups: sessions that write at the same time say what each would say alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from counting_constraint import Counting
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import local_spec, small_model, state_specs

from kvkeep import Sampling, SessionGroup, Snapshot
from kvkeep.cache.segment import MIN_GROWTH
from kvkeep.errors import ContextFull, InvalidArgument, NonFiniteLogits
from kvkeep.model import Model
from kvkeep.session.session import Session
from tests.examples import examples

MODEL = small_model()
MODELS = {
    "plain": MODEL,
    "local": small_model(spec=local_spec()),
    "delta_net": small_model(spec=state_specs()["delta_net"]),
}
PROMPT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(2000)]
WARM = Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.1, seed=7)


def branches(parent: Session, count: int) -> list[Session]:
    """Forks that differ in their last token."""
    forks = [parent.fork() for _ in range(count)]
    for index, fork in enumerate(forks):
        fork.feed([index + 1])
    return forks


def fed(
    prompt: list[int], budget: int | None = None, model: Model = MODEL, **settings: object
) -> Session:
    session = model.session(budget, **settings)  # type: ignore[arg-type]
    session.feed(prompt)
    return session


def mixed() -> list[Session]:
    """Sessions of every policy, some bounded so tightly that all windows wrap in 40 tokens."""
    sliding = fed(PROMPT[:30], 32)
    pinned = fed(PROMPT[5:40], 48, keep=2)
    pinned.pin(10, 14)
    edited = fed(PROMPT[:60], 64)
    edited.delete(20, 27)
    edited.insert(30, [9, 8, 7])
    return [
        fed(PROMPT[:50], policy="full"),
        sliding,
        sliding.fork(),
        sliding.fork(at=12),
        fed(PROMPT[:7], 24, policy="shift", discard=6),
        fed(PROMPT[100:180], 40, policy="shift"),
        fed(PROMPT[:90], 400, policy="self_extend", group=2, window=32),
        fed(PROMPT[:1], 16, keep=4),
        fed(PROMPT[:20], 16, keep=0),
        pinned,
        edited,
    ]


def require_same(session: Session, other: Session) -> None:
    assert session.tokens == other.tokens
    assert session.cache.serials() == other.cache.serials()
    assert (session.logits - other.logits).abs().max() <= 1e-4


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "seeded"])
def test_forks_of_one_prompt_write_what_each_writes_alone(sampling: Sampling) -> None:
    parent = fed(PROMPT[:200], policy="full")
    before = parent.logits
    group = SessionGroup(branches(parent, 16))
    alone = branches(parent, 16)
    for _ in range(40):
        assert group.next_tokens(sampling) == [session.next_token(sampling) for session in alone]
    for session, other in zip(group.sessions, alone, strict=True):
        require_same(session, other)
    assert parent.tokens == PROMPT[:200]
    assert torch.equal(parent.logits, before)


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "seeded"])
def test_sessions_of_all_policies_write_what_each_writes_alone(sampling: Sampling) -> None:
    group, alone = SessionGroup(mixed()), mixed()
    for _ in range(40):
        assert group.next_tokens(sampling) == [session.next_token(sampling) for session in alone]
        for session, other in zip(group.sessions, alone, strict=True):
            require_same(session, other)


@settings(max_examples=examples(10))
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["full", "sliding", "shift"]),
    st.lists(
        st.one_of(
            st.tuples(st.just("fork"), st.integers(0, 7), st.integers(0, 30)),
            st.tuples(st.just("feed"), st.integers(0, 7), st.integers(1, 25)),
            st.tuples(st.just("rewind"), st.integers(0, 7), st.integers(1, 5)),
            st.tuples(st.just("write"), st.just(0), st.integers(1, 12)),
        ),
        min_size=3,
        max_size=10,
    ),
)
def test_a_family_may_be_forked_fed_and_rewound_between_calls(
    name: str, policy: str, actions: list[tuple[str, int, int]]
) -> None:
    def family(together: bool) -> list[Session]:
        sessions = [fed(PROMPT[:20], 32, MODELS[name], policy=policy)]
        for kind, which, amount in actions:
            session = sessions[which % len(sessions)]
            try:
                if kind == "fork":
                    sessions.append(session.fork(at=len(session.tokens) - amount))
                elif kind == "feed":
                    session.feed(PROMPT[100 : 100 + amount])
                elif kind == "rewind":
                    session.rewind(amount)
                else:
                    write(sessions, amount, together)
            except (InvalidArgument, ContextFull):
                pass
        return sessions

    def write(sessions: list[Session], amount: int, together: bool) -> None:
        able = [s for s in sessions if s.logits is not None and s.room != 0]
        for _ in range(amount if able else 0):
            if any(session.room == 0 for session in able):
                break
            if together:
                SessionGroup(able).next_tokens()
            else:
                for session in able:
                    session.next_token()

    for session, other in zip(family(together=True), family(together=False), strict=True):
        assert session.tokens == other.tokens
        assert session.cache.serials() == other.cache.serials()
        if other.logits is not None:
            assert (session.logits - other.logits).abs().max() <= 1e-4


def test_each_session_may_have_a_sampling_of_its_own() -> None:
    parent = fed(PROMPT[:50])
    how = [Sampling(), WARM, Sampling(temperature=1.5, seed=3), Sampling(temperature=1.5, seed=4)]
    group, alone = SessionGroup(branches(parent, 4)), branches(parent, 4)
    for _ in range(20):
        expected = [session.next_token(each) for session, each in zip(alone, how, strict=True)]
        assert group.next_tokens(how) == expected


def test_a_session_goes_on_alone_after_a_group_and_a_group_after_that() -> None:
    parent = fed(PROMPT[:40], 48)
    group, alone = SessionGroup([parent, *branches(parent, 3)]), branches(parent, 3)
    for _ in range(3):
        group.next_tokens(WARM)
        group.sessions[2].next_token(WARM)
        alone[1].next_token(WARM)
        alone[1].next_token(WARM)
    assert group.sessions[2].tokens == alone[1].tokens


def test_memory_grows_by_the_branches_own_tokens_only() -> None:
    parent = fed(PROMPT, policy="full")
    cell = parent.cache.layout.cell_bytes
    group = SessionGroup([parent.fork() for _ in range(16)])
    own = 2000 + MIN_GROWTH  # a prompt's, and the room for what is written after it
    assert group.nbytes == parent.cache.nbytes == own * cell
    for _ in range(40):
        group.next_tokens()
    assert group.nbytes <= (own + 16 * (1 + MIN_GROWTH)) * cell
    assert sum(session.cache.cells for session in group.sessions) == 16 * 2040
    assert SessionGroup([parent, *group.sessions]).nbytes == group.nbytes


def test_compressed_cells_take_what_they_are_seen_with_too() -> None:
    session = fed(list(range(1, 120)), policy="full")
    session.compress(3, recent=8)
    assert SessionGroup([session]).nbytes == session.cache.nbytes


def test_a_branch_survives_a_snapshot(tmp_path: Path) -> None:
    group = SessionGroup(branches(fed(PROMPT[:60], 64), 3))
    for _ in range(10):
        group.next_tokens(WARM)
    branch = group.sessions[1]
    branch.snapshot().save(tmp_path / "branch")
    restored = MODEL.restore(Snapshot.load(tmp_path / "branch"))
    assert torch.equal(restored.logits, branch.logits)
    again = SessionGroup([restored, group.sessions[0].fork()])
    for _ in range(10):
        tokens = group.next_tokens(WARM)
        assert again.next_tokens(WARM) == [tokens[1], tokens[0]]


def test_a_failure_of_one_changes_none() -> None:
    sessions, alone = mixed(), mixed()
    group = SessionGroup(sessions)
    for _ in range(30):
        group.next_tokens(WARM)
        for session in alone:
            session.next_token(WARM)
    broken = sessions[4].cache.segments[-1].block.slots.values
    sound = broken.clone()
    logits = [session.logits for session in sessions]
    with torch.inference_mode():
        broken.fill_(torch.nan)
        with pytest.raises(NonFiniteLogits):
            group.next_tokens(WARM)
        broken.copy_(sound)
    for session, other, before in zip(sessions, alone, logits, strict=True):
        assert torch.equal(session.logits, before)
        require_same(session, other)
    assert group.next_tokens(WARM) == [session.next_token(WARM) for session in alone]


def test_one_that_is_full_stops_all_before_anything_is_drawn() -> None:
    sessions = [fed(PROMPT[:20]), fed(PROMPT[:30], 31, policy="full")]
    alone = fed(PROMPT[:20])
    group = SessionGroup(sessions)
    group.next_tokens(WARM)
    alone.next_token(WARM)
    with pytest.raises(ContextFull, match="sliding"):
        group.next_tokens(WARM)
    assert [len(session.tokens) for session in sessions] == [21, 31]
    assert sessions[0].next_token(WARM) == alone.next_token(WARM)


def test_a_group_needs_sessions_of_one_model_each_once() -> None:
    session = fed(PROMPT[:5])
    with pytest.raises(InvalidArgument, match="at least one"):
        SessionGroup([])
    with pytest.raises(InvalidArgument, match="session 1 is in the group already"):
        SessionGroup([session, session])
    with pytest.raises(InvalidArgument, match="session 1 and session 0 belong to different"):
        SessionGroup([session, small_model(seed=1).session()])


def test_what_is_asked_wrongly_changes_nothing() -> None:
    session = fed(PROMPT[:5])
    with pytest.raises(InvalidArgument, match="session 1 has nothing to continue"):
        SessionGroup([session, MODEL.session()]).next_tokens()
    with pytest.raises(InvalidArgument, match="found 2"):
        SessionGroup([session]).next_tokens([Sampling(), Sampling()])
    assert session.tokens == PROMPT[:5]


def test_each_session_needs_a_constraint_of_its_own() -> None:
    parent = fed(PROMPT[:30])
    group = SessionGroup(branches(parent, 3))
    shared = Sampling(constraint=Counting())
    own = [Sampling(constraint=Counting()) for _ in range(3)]
    for wrong in (shared, [own[0], shared, replace(shared, temperature=1.0)]):
        with pytest.raises(InvalidArgument, match="shares its constraint object"):
            group.next_tokens(wrong)
    assert [len(session.tokens) for session in group.sessions] == [31, 31, 31]
    assert [group.next_tokens(own) for _ in range(3)] == [[10] * 3, [11] * 3, [12] * 3]
    assert [SessionGroup([parent]).next_tokens(shared) for _ in range(2)] == [[10], [11]]


@pytest.mark.extended
def test_prompts_held_side_by_side_on_the_real_model(smollm2_fp32: Model) -> None:
    def sessions() -> list[Session]:
        paris = smollm2_fp32.session(64, keep=-1)
        paris.feed("The capital of France is")
        rome = smollm2_fp32.session(64, keep=-1)
        rome.feed("Two and two are four, and three and three are")
        forks = [paris.fork(), paris.fork()]
        forks[0].feed(" the city of")
        return [paris, rome, *forks]

    group, alone = SessionGroup(sessions()), sessions()
    for _ in range(8):
        assert group.next_tokens() == [session.next_token() for session in alone]
    for session, other in zip(group.sessions, alone, strict=True):
        assert (session.logits - other.logits).abs().max() <= 1e-3
