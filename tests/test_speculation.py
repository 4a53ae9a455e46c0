"""Speculation gives the text, logits, cells and sampler of a session without it, to the bit."""

from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation_cases import (
    STATE_KINDS,
    Alternating,
    Drafts,
    run_case,
    sampling_settings,
    whole_drafts,
)
from test_small_steps import EXACT, KINDS, PROMPT, SETTINGS, model_of, require_same_bits

from benchmarks.speculation import Written
from kvkeep import Sampling
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import MAX_ROWS
from kvkeep.model import Model
from kvkeep.session.draft_source import DraftSource
from kvkeep.session.drafts import Acceptance, Draft, DraftPlanner, ForwardTime, Offer, RowCost
from kvkeep.session.history import History
from kvkeep.session.ngram_index import INDEXED_TOKENS
from kvkeep.session.session import Session
from kvkeep.session.speculation import Speculation, sample_runs
from kvkeep.storage.snapshots.snapshot import Snapshot
from tests.examples import examples

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")


def generated(
    session: Session, speculate: bool, count: int, how: dict[str, Any], limit: int
) -> str:
    constraint = Alternating(limit) if limit else None
    sampling = Sampling(**how, constraint=constraint)
    text = "".join(session.stream(count, sampling, speculate=speculate))
    return f"{text} {session.finish_reason} {constraint and constraint.count}"


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_speculation_changes_no_bit_of_sessions_and_groups(first: int) -> None:
    for number in range(first, first + 10):
        run_case(1_000_000 + number)


@settings(max_examples=examples(10))
@given(st.integers(0, 9999))
def test_a_stream_has_the_same_text(number: int) -> None:
    random = Random(number)
    kind = random.choice(KINDS)
    name = random.choice(EXACT if kind in STATE_KINDS else sorted(SETTINGS))
    speculating, other = (model_of(kind).session(**SETTINGS[name]) for _ in range(2))
    first = random.randint(1, 120)
    for session in (speculating, other):
        session.feed(PROMPT[:first])
    how, count = sampling_settings(random), random.randint(1, 40)
    limit = random.choice([0, 0, 25])
    text = generated(other, False, count, how, limit)
    with Drafts(random, [other.tokens]).used():
        assert generated(speculating, True, count, how, limit) == text
    require_same_bits(speculating, other)


def test_a_rejected_draft_leaves_no_far_segment_without_cells(tmp_path: Path) -> None:
    sessions = [model_of("dense").session(**SETTINGS["self_extend"]) for _ in range(2)]
    for session in sessions:
        session.feed(PROMPT[:26])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftSource, "draft", lambda self, token, count: Draft([1] * count, 3))
        patch.setattr(DraftPlanner, "choose", whole_drafts)
        next(sessions[0].stream(40, ignore_eos=True, speculate=True))  # and leave it
    count = len(sessions[0].tokens) - 26
    assert count < 6
    assert sessions[0].speculated == (0, count * (MAX_ROWS - 1))
    for _ in range(count):
        sessions[1].next_token()
    require_same_bits(*sessions)
    sessions[0].snapshot().save(tmp_path / "saved.kvkeep")
    restored = model_of("dense").restore(Snapshot.load(tmp_path / "saved.kvkeep"))
    require_same_bits(restored, sessions[1])


class Failing:
    """A constraint that allows any token, and fails after some."""

    def __init__(self, limit: int):
        self.left = limit

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.left:
            raise ZeroDivisionError
        return logits

    def accept(self, token: int) -> None:
        self.left -= 1


@pytest.mark.parametrize("name", ["full", "tiny"])
def test_a_constraint_that_fails_leaves_the_tokens_before(name: str) -> None:
    sessions = [model_of("dense").session(**SETTINGS[name]) for _ in range(3)]
    for session in sessions:
        session.feed(PROMPT[:30])
    right = [sessions[2].next_token() for _ in range(MAX_ROWS)]
    texts, end = ["", ""], len(sessions[0].tokens)
    with pytest.MonkeyPatch.context() as patch:

        def right_draft(source: DraftSource, next_token: int, count: int) -> Draft:
            return Draft(right[len(source.tokens) - end + 1 :][:count], 3)

        patch.setattr(DraftSource, "draft", right_draft)
        patch.setattr(DraftPlanner, "choose", whole_drafts)
        for index, speculate in enumerate((True, False)):
            sampling = Sampling(constraint=Failing(5))
            with suppress(ZeroDivisionError):
                for text in sessions[index].stream(40, sampling, True, speculate):
                    texts[index] += text
    assert texts[0] == texts[1]
    assert sessions[0].speculated[0] > 3
    assert [session.finish_reason for session in sessions[:2]] == ["error"] * 2
    require_same_bits(*sessions[:2])


def test_the_default_model_repeats_a_text_in_fewer_forwards(smollm2: Model) -> None:
    prompt = smollm2.text.encode("one two three four five six seven eight nine ten. " * 6)
    sessions = [smollm2.session(max_kv_size=size) for size in (None, None, 64, 64)]
    for session in sessions:
        session.feed(prompt)
    for speculating, other in (sessions[:2], sessions[2:]):
        text = "".join(speculating.stream(60, ignore_eos=True))
        assert text == "".join(other.stream(60, ignore_eos=True, speculate=False))
        assert speculating.logits is not None
        assert other.logits is not None
        assert torch.equal(speculating.logits, other.logits)
    accepted, drafted = sessions[0].speculated
    assert 30 <= accepted <= drafted
    assert sessions[1].speculated == (0, 0)


def count_searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the searches for drafts from now on; returns the sampled token of each."""
    searches, draft = list[int](), DraftSource.draft

    def counted(source: DraftSource, next_token: int, max_tokens: int) -> Draft | None:
        searches.append(next_token)
        return draft(source, next_token, max_tokens)

    monkeypatch.setattr(DraftSource, "draft", counted)
    return searches


def test_a_text_that_repeats_nothing_is_searched_in_one_step_of_four(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches, session = count_searches(monkeypatch), model_of("llama").session()
    session.feed(PROMPT[:100])
    answer = [251 - (7 * i) % 250 for i in range(80)]
    sampling = Sampling(constraint=Written([*answer, *PROMPT[20:80]]))
    for _ in session.stream(80, sampling, ignore_eos=True):
        pass
    assert 16 + 60 // 4 <= len(searches) <= 16 + 80 // 4
    for _ in session.stream(60, sampling, ignore_eos=True):
        pass
    assert session.speculated[0] > 40
    assert session.tokens[-60:] == PROMPT[20:80]


def test_sessions_of_a_group_are_searched_in_the_same_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One without a draft would wait for the drafts of others, which therefore are not tried."""
    model, group, planner = model_of("llama"), list[Speculation](), DraftPlanner(0.05)
    for number in range(4):  # 0 to 3 tokens ahead of the first
        answer = [*[251 - (7 * i) % 250 for i in range(60 + number)], *PROMPT[20:80]]
        session = model.session()
        session.feed(PROMPT[:100])
        sampling = Sampling(constraint=Written(answer))
        group.append(Speculation(session.core, sampling, lambda token: False))
        for _ in range(20 + number):
            sample_runs(group[-1:], [9], DraftPlanner())
    searches = count_searches(monkeypatch)
    for _ in range(40):
        sample_runs(group, [9] * 4, planner)
    assert len(searches) == 4 * 40 // 4
    steps = 0
    while not any(each.sampling.complete for each in group):
        left = [100 + 60 + n + 60 - len(each.core.memory.tokens) for n, each in enumerate(group)]
        sample_runs(group, left, planner)
        steps += 1
    assert steps < 30


def test_tokens_that_were_fed_between_steps_are_searched() -> None:
    session, fed = model_of("llama").session(), Random(0).sample(range(1, 251), 100)
    session.feed(PROMPT[:100])
    sampling = Sampling(constraint=Written([*Random(1).sample(range(1, 251), 40), *fed]))
    speculation, planner = Speculation(session.core, sampling, lambda token: False), DraftPlanner()
    while len(session.tokens) < 117:
        sample_runs([speculation], [9], planner)
    assert not planner.looks([speculation.fruitless_steps])
    session.feed(fed)
    steps = 0
    while not sampling.complete:
        sample_runs([speculation], [340 - len(session.tokens)], planner)
        steps += 1
    assert steps < 23 + 50


def test_of_a_long_text_the_newest_tokens_are_indexed() -> None:
    session = model_of("dense").session(64)
    session.feed(PROMPT[:20])
    memory, filling = session.core.memory, [9] * INDEXED_TOKENS
    for end, following in (([1, 2], None), ([5, 6], Draft([8, 5, 6], 3))):
        memory.tokens = History("i", [1, 2, 3, 4, *filling, 5, 6, 7, 8, *end])
        speculation = Speculation(session.core, Sampling(), lambda token: False)
        assert speculation.draft(end[-1] + 1, 4) == following


def test_drafts_that_are_never_right_are_tried_ever_more_rarely() -> None:
    planner, acceptance, draft = DraftPlanner(), Acceptance(), Draft([1] * 15, 3)
    tries, cost = 0, planner.cost.value
    for _ in range(2000):
        tried = planner.choose([Offer(draft, acceptance)], 63)[0]
        acceptance.learn(draft, tried, 0, cost)
        tries += tried > 0
    assert 5 < tries < 40
    for _ in range(40):
        acceptance.learn(draft, 15, 15, cost)
    assert planner.choose([Offer(draft, acceptance)], 63)[0] > 8


@given(st.lists(st.tuples(st.sampled_from([0, 1, 3, 6, 12]), st.integers(0, 15)), max_size=300))
def test_wrong_drafts_cost_half_a_percent_of_the_time_and_one_forward(
    steps: list[tuple[int, int]],
) -> None:
    planner, acceptance = DraftPlanner(), Acceptance()
    cost, time, tokens = planner.cost.value, 0.0, 0
    for matched, right in steps:
        draft = Draft([1] * 15, matched)
        tried = planner.choose([Offer(draft, acceptance)], 63)[0]
        accepted = min(tried, right)
        acceptance.learn(draft, tried, accepted, cost)
        time, tokens = time + 1 + cost * tried, tokens + 1 + accepted
        assert time <= 1.005 * tokens + 1 + 1e-6


def test_the_cost_of_a_row_is_measured() -> None:
    cost = RowCost()
    time = ForwardTime(cost)
    for step in range(400):
        rows = 1 + 5 * (step % 4 == 0)
        time.learn(rows, rows - 1, 0.01 * (1 + 0.3 * (rows - 1)) * (50 if step == 300 else 1))
    assert 0.25 < cost.value < 0.33
    for _ in range(2000):
        time.learn(1, 0, 0.01)  # a text without drafts
    assert 0.25 < cost.value < 0.33


def test_a_longer_session_does_not_make_rows_dearer() -> None:
    planner = DraftPlanner()
    for scale in (1, 4, 1):  # a forward of the second session takes four times as long
        sessions = [Acceptance()]
        for step in range(60):
            drafted = 5 * (step % 20 != 0)
            planner.learn(sessions, 1 + drafted, drafted, scale * 0.01 * (1 + 0.3 * drafted))
            assert planner.cost.value < 0.33
    assert planner.cost.value > 0.27


def test_a_slow_first_forward_does_not_make_rows_cheap() -> None:
    planner, sessions = DraftPlanner(), [Acceptance()]
    planner.learn(sessions, 1, 0, 0.2)
    for _ in range(40):
        planner.learn(sessions, 6, 5, 0.01 * (1 + 0.3 * 5))
    assert planner.cost.value > 0.1


def test_the_cost_of_a_row_is_measured_in_groups() -> None:
    cost = RowCost()
    time = ForwardTime(cost)
    for step in range(400):
        drafted = 6 * (step % 3 == 0)
        time.learn(4 + drafted, drafted, 0.01 * (1 + 0.5 * (3 + drafted)))
    assert 0.45 < cost.value < 0.55


def good(is_good: bool = True) -> Offer:
    acceptance, draft = Acceptance(), Draft([1] * 15, 12)
    for _ in range(60):
        acceptance.learn(draft if is_good else None, 15 * is_good, 15 * is_good, 0.17)
    return Offer(draft if is_good else None, acceptance)


def test_drafts_delay_no_session_that_has_none() -> None:
    assert DraftPlanner(0.05).choose([good(), good(False)], 62) == [0, 0]
    lengths = DraftPlanner().choose([good(), good(False)], 62)
    assert lengths[0] > 4
    assert lengths[1] == 0
    assert min(DraftPlanner(0.05).choose([good(), good()], 62)) > 4
    many = DraftPlanner(0.05).choose([good() for _ in range(30)], 34)
    assert sum(many) <= 34


def test_a_fork_counts_its_own_drafts(smollm2: Model) -> None:
    session = smollm2.session()
    session.feed(smollm2.text.encode("one two three four five six seven eight nine ten. " * 6))
    stream = session.stream(60, ignore_eos=True, speculate=True)
    next(stream)
    fork = session.fork()
    before = fork.speculated
    for _ in stream:
        pass
    assert session.speculated[1] > before[1]
    assert fork.speculated == before
