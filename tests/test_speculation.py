"""Speculation gives the text, logits, cells and sampler of a session without it, to the bit."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_small_steps import EXACT, KINDS, PROMPT, SETTINGS, model_of, require_same_bits

from kvkeep import Sampling
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import MAX_ROWS
from kvkeep.model import Model
from kvkeep.session.drafts import Draft, DraftLength, NgramIndex
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import Snapshot

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")


@dataclass
class Alternating:
    """A constraint that allows some tokens after an even number of tokens, and others else."""

    limit: int
    count: int = 0

    @property
    def complete(self) -> bool:
        return self.count >= self.limit

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(logits, -torch.inf)
        first = 5 + 3 * (self.count % 2)
        masked[first : first + 2] = logits[first : first + 2]
        return masked

    def accept(self, token: int) -> None:
        assert token in range(5 + 3 * (self.count % 2), 7 + 3 * (self.count % 2))
        self.count += 1


def sampling_of(data: st.DataObject) -> dict[str, Any]:
    few_tokens = [(token, 60.0) for token in range(20, 20 + data.draw(st.integers(1, 3)))]
    return {
        "temperature": data.draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
        "seed": data.draw(st.integers(0, 3)),
        "top_p": data.draw(st.sampled_from([1.0, 0.9])),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.2])),
        "presence_penalty": data.draw(st.sampled_from([0.0, 0.5])),
        "logit_bias": data.draw(st.sampled_from([(), few_tokens])),
        "stop": data.draw(st.sampled_from([(), ("7",), ("a", "zz")])),
    }


def generated(
    session: Session, speculate: bool, count: int, how: dict[str, Any], limit: int
) -> str:
    constraint = Alternating(limit) if limit else None
    sampling = Sampling(**how, constraint=constraint)
    text = "".join(session.stream(count, sampling, speculate=speculate))
    return f"{text} {session.finish_reason} {constraint and constraint.count}"


@dataclass
class KnownDrafts:
    """Drafts of the tokens that another session has sampled, half of them with a mistake."""

    random: Random
    tokens: Sequence[int] = ()

    def draft(self, index: NgramIndex, count: int) -> Draft:
        right = [*self.tokens[len(index) + 1 :], *range(1, count + 1)][:count]
        size = self.random.randint(1, count)
        right_count = size if self.random.random() < 0.5 else self.random.randrange(size)
        return Draft([*right[:right_count], *range(5, 5 + size - right_count)], 3)


@settings(max_examples=40)
@given(st.data())
def test_speculation_changes_no_bit(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    name = data.draw(st.sampled_from(EXACT if kind in KINDS[-3:] else sorted(SETTINGS)))
    bits = data.draw(st.sampled_from([None, None, "8", "4"]))
    first, are_known = data.draw(st.integers(1, 120)), data.draw(st.booleans())
    settings_of_session = {**SETTINGS[name], "kv_bits": bits}
    speculating, other = (model_of(kind).session(**settings_of_session) for _ in range(2))
    period = data.draw(st.sampled_from([4, 7, 900]))
    for session in (speculating, other):
        session.feed([PROMPT[i % period] for i in range(first)])
    drafts = KnownDrafts(Random(data.draw(st.integers(0, 999))))
    with pytest.MonkeyPatch.context() as patch:
        if are_known:
            patch.setattr(NgramIndex, "draft", lambda index, token, n: drafts.draft(index, n))
            patch.setattr(DraftLength, "choose", lambda self, draft: len(draft.tokens))
        for _ in range(data.draw(st.integers(1, 3))):
            how, count = sampling_of(data), data.draw(st.integers(1, 40))
            limit = data.draw(st.sampled_from([0, 0, 25]))
            text = generated(other, False, count, how, limit)
            drafts.tokens = other.tokens
            assert generated(speculating, True, count, how, limit) == text
            require_same_bits(speculating, other)
            samplers = [session.core.state.sampler.state() for session in (speculating, other)]
            assert samplers[0] == samplers[1]
            back = data.draw(st.integers(0, 2))
            if other.core.memory.num_rewindable > back + 1:
                for session in (speculating, other):
                    session.rewind(back)
                require_same_bits(speculating, other)


def test_a_rejected_draft_leaves_no_far_segment_without_cells(tmp_path: Path) -> None:
    sessions = [model_of("dense").session(**SETTINGS["self_extend"]) for _ in range(2)]
    for session in sessions:
        session.feed(PROMPT[:26])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramIndex, "draft", lambda self, token, count: Draft([1] * count, 3))
        patch.setattr(DraftLength, "choose", lambda self, draft: len(draft.tokens))
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

        def right_draft(index: NgramIndex, next_token: int, count: int) -> Draft:
            return Draft(right[len(index) - end + 1 :][:count], 3)

        patch.setattr(NgramIndex, "draft", right_draft)
        patch.setattr(DraftLength, "choose", lambda self, draft: len(draft.tokens))
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
        text = "".join(speculating.stream(60, ignore_eos=True, speculate=True))
        assert text == "".join(other.stream(60, ignore_eos=True))
        assert speculating.logits is not None
        assert other.logits is not None
        assert torch.equal(speculating.logits, other.logits)
    accepted, drafted = sessions[0].speculated
    assert 30 <= accepted <= drafted
    assert sessions[1].speculated == (0, 0)


def test_a_draft_is_what_followed_the_newest_tokens_last() -> None:
    index = NgramIndex([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 7, 2, 3])
    assert index.draft(4, 10) == Draft([6, 7, 2, 3], 3)
    assert index.draft(4, 2) == Draft([6, 7], 3)
    assert index.draft(5, 10) is None
    index.extend([4, 5])
    assert index.draft(9, 10) == Draft([2, 3, 4, 6, 7, 2, 3, 4, 5], 5)
    assert NgramIndex([3, 4, 5] * 4).draft(3, 2) == Draft([4, 5], 10)
    assert NgramIndex([1]).draft(2, 3) is None


def test_drafts_that_are_never_right_are_tried_ever_more_rarely() -> None:
    length, draft = DraftLength(), Draft([1] * 15, 3)
    tries = 0
    for _ in range(2000):
        if tried := length.choose(draft):
            length.learn(draft, tried, 0)
            tries += 1
    assert tries < 40
    for _ in range(40):
        length.learn(draft, 15, 15)
    assert length.choose(draft) > 8


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
