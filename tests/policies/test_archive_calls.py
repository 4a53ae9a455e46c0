"""Policy `archive`: failures, forks, pins, groups, and refused calls."""

from pathlib import Path

import pytest
import torch
from attention_hooks import attending
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.archives import MODEL, TEXT, Setting, archived, archives, same, state

from kvkeep import Sampling, SessionGroup, Snapshot
from kvkeep.errors import ContextFull, InvalidArgument, NonFiniteLogits
from kvkeep.models.layers.executor import AnyStep
from kvkeep.session.session import Session
from tests.examples import examples

WARM = Sampling(temperature=1.2, seed=7)
METHODS = ["fitted", "keydiff", "snapkv", "random", "expected_attention"]


class ForwardFailed(Exception):
    """Raised in the middle of a forward."""


@settings(max_examples=examples(10))
@given(archives(), st.integers(1, 120), st.integers(0, 1), st.integers(1, 7))
def test_a_step_that_fails_inside_the_model_changes_nothing(
    setting: Setting, fed: int, layer: int, more: int
) -> None:
    session, untouched = setting.fed(fed), setting.fed(fed)
    before = state(session)

    def failing(step: AnyStep, index: int, *args: torch.Tensor) -> torch.Tensor:
        out = step.attend(index, *args)
        if index == layer:
            raise ForwardFailed
        return out

    with attending(MODEL.decoder, failing), pytest.raises(ForwardFailed):
        session.feed(TEXT[:more])
    assert same(state(session), before)
    for item in (session, untouched):
        item.feed(TEXT[:60])
    assert same(state(session), state(untouched))


def test_a_text_that_is_evaluated_again_has_its_own_queries_alone(tmp_path: Path) -> None:
    """An edit in place before leaves the clock, and queries of tokens that are gone."""
    session = Setting(method="snapkv", window=60, max_kv_size=189).fed(23)
    session.replace(3, 11, [5, 6, 7])
    session.replace(1, 6, [9, 9], "suffix")
    session.snapshot().save(tmp_path / "a.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    for observer in (session.cache.observer, restored.cache.observer):
        queries = observer and observer.queries()
        assert queries is not None
        assert queries.times.tolist() == list(range(len(session.tokens)))
    for continued in (session, restored):
        continued.feed(TEXT[:190])
    assert same(state(session), state(restored))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("more", [1, 5])
def test_non_finite_logits_change_nothing(method: str, more: int) -> None:
    session = Setting(method=method).fed(100)
    before, weight = state(session), MODEL.decoder.tensors["model.layers.1.mlp.down_proj.weight"]
    sound = weight.clone()
    try:
        weight[0, 0] = torch.nan
        with pytest.raises(NonFiniteLogits):
            session.feed(TEXT[:more])
    finally:
        weight.copy_(sound)
    assert same(state(session), before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fed", [10, 60, 150])
def test_a_fork_and_its_parent_are_independent(method: str, fed: int) -> None:
    setting = Setting(method=method)
    session, alone = setting.fed(fed), setting.fed(fed)
    fork = session.fork()
    before = state(fork)
    for index in range(70):
        assert session.next_token(WARM) == alone.next_token(WARM)
        if index == 40:
            assert same(state(fork), before)
            fork.feed(TEXT[500:590])
    assert (session.logits - alone.logits).abs().max() <= 1e-4
    other = setting.fed(fed)
    other.feed(TEXT[500:590])
    assert (fork.logits - other.logits).abs().max() <= 1e-4


def test_pinned_tokens_stay_until_they_are_unpinned() -> None:
    session = Setting(max_kv_size=60).fed(100)
    session.pin(90, 94)
    pins = range(90, 94)  # serials: no token was edited
    for _ in range(5):
        session.feed(TEXT[:60])
        assert set(pins) <= set(session.cache.serials())
        assert session.token_status[90:94] == ["pinned"] * 4
    session.unpin(90, 94)
    session.feed(TEXT[:60])
    assert not set(pins) & set(session.cache.serials())


def test_archived_tokens_have_the_status_compressed() -> None:
    session = Setting().fed(100)
    held = session.cache.serials()
    statuses = session.token_status
    assert statuses[:4] == ["kept"] * 4
    assert set(statuses[4:]) == {"compressed", "window"}
    assert [item != "compressed" for item in statuses] == [n in held for n in range(100)]
    assert "compressed" not in Setting().fed(20).token_status


def test_archived_tokens_cannot_be_pinned_rewound_to_or_edited() -> None:
    session = Setting().fed(100)
    before = state(session)
    for call in (
        lambda: session.pin(30, 34),
        lambda: session.rewind(60),
        lambda: session.delete(30, 34),
        lambda: session.insert(30, TEXT[:3]),
    ):
        with pytest.raises(InvalidArgument):
            call()
        assert same(state(session), before)


def test_keep_cannot_be_changed_once_tokens_are_archived() -> None:
    session = Setting().fed(20)
    session.keep = 9
    session.keep = 6
    session.feed(TEXT[20:100])
    assert archived(session)
    assert session.cache.serials()[:6] == list(range(6))
    before = state(session)
    with pytest.raises(InvalidArgument, match="keep was 6 when the first tokens were archived"):
        session.keep = 7
    assert same(state(session), before)


def test_a_pin_that_leaves_no_room_for_the_window_is_refused() -> None:
    session = Setting(max_kv_size=34).fed(100)
    before = state(session)
    with pytest.raises(InvalidArgument, match="not enough room for pins"):
        session.pin(90, 96)
    assert same(state(session), before)


def different_sessions() -> list[Session]:
    parent = Setting(method="snapkv").fed(100)
    forks = [parent.fork() for _ in range(3)]
    forks[1].feed(TEXT[200:203])
    full = MODEL.session(policy="full")
    full.feed(TEXT[:50])
    others = [Setting(method=method).fed(40 + 9 * i) for i, method in enumerate(METHODS)]
    return [parent, *forks, full, *others]


def test_a_group_samples_what_its_sessions_sample_alone() -> None:
    group, alone = SessionGroup(different_sessions()), different_sessions()
    for _ in range(40):
        assert group.next_tokens(WARM) == [session.next_token(WARM) for session in alone]
    for session, other in zip(group.sessions, alone, strict=True):
        assert session.cache.serials() == other.cache.serials()
        assert (session.logits - other.logits).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "invalid",
    [{"ratio": 0.5}, {"window": -1}, {"window": 41}, {"method": "best"}, {"keep": 30}],
)
def test_invalid_settings_are_refused(invalid: dict) -> None:
    settings = {"max_kv_size": 48, "policy": "archive", "window": 16} | invalid
    with pytest.raises(InvalidArgument, match="found"):
        MODEL.session(**settings)


@pytest.mark.parametrize("size", [24, 48, 1000, 4096])
def test_defaults_fit_any_budget(size: int) -> None:
    session = MODEL.session(size, policy="archive")
    session.feed(TEXT[:100])
    assert session.cache.cells <= size


def test_an_insertion_into_the_window_archives_more() -> None:
    session = Setting().fed(100)
    before, at = state(session), len(session.tokens) - 15
    with pytest.raises(ContextFull, match="can be evicted"):
        session.insert(at, TEXT[:90])
    assert same(state(session), before)
    session.insert(at, TEXT[:22])
    assert session.tokens[at : at + 22] == TEXT[:22]
    assert session.cache.cells <= 48
    assert archived(session) > 8
