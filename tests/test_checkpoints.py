"""Checkpoints: back to tokens whose local windows and states later ones have overwritten."""

import pytest
import torch
from edit_actions import LOCAL_MODEL, MODEL, loud_model
from hypothesis import given
from hypothesis import strategies as st
from small_models import local_spec, small_model, state_specs
from topics import topic_text

from kvkeep.cache.checkpoint import Checkpoints, checkpoint_nbytes, max_checkpoint_count
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.session.session import Session

IDS = MODEL.text.encode(topic_text())[:1200]
STEP = 50
STATE_MODELS = {kind: small_model(spec=spec) for kind, spec in state_specs().items()}
MODELS = {"local": LOCAL_MODEL, **STATE_MODELS}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def fed(count: int, model: Model = LOCAL_MODEL) -> Session:
    session = model.session(2048, policy="full", prefill_step=STEP)
    session.feed(IDS[:count])
    return session


def require_close(session: Session, other: Session) -> None:
    torch.testing.assert_close(session.logits, other.logits, rtol=1e-4, atol=1e-3)


def require_same_future(session: Session, other: Session) -> None:
    session.feed(IDS[-STEP:])
    other.feed(IDS[-STEP:])
    for _ in range(10):
        assert torch.equal(session.logits, other.logits)
        assert session.next_token() == other.next_token()


def test_the_beginning_at_a_checkpoint_continues_to_the_bit(model: Model) -> None:
    session = fed(1000, model)
    for count in session.checkpoints[:-1]:
        require_same_future(session.beginning(count), fed(count, model))


def test_taking_a_beginning_changes_nothing_in_the_session(model: Model) -> None:
    session, untouched = fed(1000, model), fed(1000, model)
    begun = session.beginning(session.checkpoints[-3])
    begun.feed(IDS[:300])
    require_same_future(session, untouched)


def test_the_error_of_a_beginning_names_the_checkpoints(model: Model) -> None:
    session = fed(300, model)
    ends = ", ".join(map(str, session.checkpoints))
    with pytest.raises(InvalidArgument, match=rf"after 17 tokens.* all 300 .*\({ends}\)"):
        session.beginning(17)


@pytest.mark.parametrize("rewound_to", range(140, 1000, 60))
def test_a_beginning_takes_no_windows_that_a_rewind_computed_anew(rewound_to: int) -> None:
    """They differ by rounding, because they were evaluated in other steps."""
    session = fed(1000)
    session.rewind(1000 - rewound_to)
    newest = session.checkpoints[-1]
    begun, expected = session.beginning(newest), fed(newest)
    windows = [each.cache.local_cache.segments[-1] for each in (begun, expected)]
    cells = [window.read(window.length - 7, 7) for window in windows]
    assert torch.equal(cells[0].values, cells[1].values)
    require_same_future(begun, expected)


@pytest.mark.parametrize("count", [STEP, 80])
def test_the_beginning_of_a_fork_continues_to_the_bit(count: int) -> None:
    """In its local layers too, no tokens are cut where the fork began."""
    model = loud_model(local_spec(window=100))
    fork = fed(80, model).fork()
    fork.feed(IDS[:30])
    require_same_future(fork.beginning(count), fed(count, model))


@pytest.mark.parametrize("at", [3, 60, 480, 700, 990])
def test_a_fork_at_an_earlier_token_equals_a_session_of_these_tokens(model: Model, at: int) -> None:
    fork = fed(1000, model).fork(at)
    require_close(fork, fed(at, model))
    fork.feed(IDS[at : at + 20])
    require_close(fork, fed(at + 20, model))


def test_a_suffix_edit_evaluates_only_what_follows_a_checkpoint(model: Model) -> None:
    session = fed(1000, model)
    nearest = max(each for each in session.checkpoints if each < 600)
    report = session.replace(600, 610, [7, 8, 9], recompute="suffix")
    # The token before the edit is evaluated for its logits.
    assert report.tokens_evaluated == 600 - nearest + 3 + 390
    expected = model.session(2048, policy="full", prefill_step=STEP)
    expected.feed([*IDS[:600], 7, 8, 9, *IDS[610:1000]])
    require_close(session, expected)


def test_generated_tokens_are_rewound(model: Model) -> None:
    session = fed(1000, model)
    for _ in range(30):
        session.next_token()
    session.rewind(30)
    require_close(session, fed(1000, model))
    session.rewind(1000)
    session.feed(IDS[:100])
    assert torch.equal(session.logits, fed(100, model).logits)


def test_without_checkpoints_all_tokens_are_evaluated_again(model: Model) -> None:
    session = fed(1000, model)
    session.checkpoint_bytes = 0
    report = session.replace(600, 610, [7, 8, 9], recompute="suffix")
    assert report.tokens_evaluated == 600 + 3 + 390


@pytest.mark.parametrize("kind", STATE_MODELS)
def test_a_bounded_session_goes_back_as_far_as_its_checkpoints(kind: str) -> None:
    """Further back there are neither the states nor all the tokens to compute them from."""
    model = STATE_MODELS[kind]
    session = model.session(200, policy="sliding", prefill_step=STEP)
    session.feed(IDS[:1000])
    oldest = min(each for each in session.checkpoints if each > 804)
    assert session.fork(oldest + 1).tokens == IDS[: oldest + 1]
    with pytest.raises(InvalidArgument, match="rewind takes 0 to"):
        session.fork(oldest)


def test_an_edit_removes_the_checkpoints_after_it() -> None:
    session = fed(1000)
    assert max(session.checkpoints) > 400
    session.replace(400, 403, [7, 8, 9])  # in place, and of the same length
    assert max(session.checkpoints) <= 400
    session.delete(10, 14)  # from here on the clock of earlier tokens has moved
    before = fed(1000).delete(10, 14, recompute="suffix")
    assert before.tokens_evaluated > 900
    fork = session.fork(5)
    require_close(fork, fed(5))


def test_compression_removes_those_that_it_makes_useless() -> None:
    session = fed(1000)
    assert session.memory_use.checkpoints > 0
    session.compress(2.0, method="fitted")
    assert session.checkpoints == []
    assert session.memory_use.checkpoints == 0


def test_messages_begin_at_checkpoints(model: Model) -> None:
    session = fed(330, model)
    for _ in range(20):
        session.next_token()
    session.feed(IDS[:10])
    assert 350 in session.checkpoints


@pytest.mark.parametrize("written", [False, True])
def test_a_scored_prompt_leaves_those_of_a_fed_one(model: Model, written: bool) -> None:
    session = model.session(2048, policy="full", prefill_step=STEP)
    session.score(IDS[:120], token_by_token=written)
    session.score(IDS[:20])
    assert session.checkpoints == [50, 100, 120]


@pytest.mark.parametrize("kind", STATE_MODELS)
def test_a_bounded_session_goes_back_to_a_scored_prompt(kind: str) -> None:
    session = STATE_MODELS[kind].session(64)
    session.score(IDS[:300])
    session.score(IDS[:20])
    assert session.rewind(3) == IDS[17:20]


def test_the_suffix_of_an_edit_has_checkpoints(model: Model) -> None:
    session = fed(1000, model)
    session.delete(100, 103, recompute="suffix")
    report = session.delete(950, 951, recompute="suffix")
    assert report.tokens_evaluated <= STEP + 46


def test_an_exact_alignment_leaves_checkpoints(model: Model) -> None:
    """Each turn replaces the end of the last one. Later ones drop no more than those of `feed`."""
    session, ends = model.session(2048, policy="full", prefill_step=STEP), range(200, 1000, 40)
    for end in ends:
        report = session.align([*IDS[:end], 7, 8, 9], mode="exact")
        assert report.evaluated <= (end if end == ends[0] else 40 + STEP) + 4
    expected = model.session(2048, policy="full", prefill_step=STEP)
    expected.feed(session.tokens)
    require_close(session, expected)
    assert len(session.checkpoints) <= len(expected.checkpoints) + 8
    assert min(session.checkpoints) <= 200
    assert any(300 <= each <= 700 for each in session.checkpoints)


def test_the_tail_of_an_alignment_in_place_has_checkpoints() -> None:
    session = fed(600)
    target = [*IDS[:20], *IDS[23:600], *IDS[700:1000]]
    assert session.align(target, mode="in_place", min_saved=0).mode == "in_place"
    assert len([each for each in session.checkpoints if each > 600]) >= 4


def test_a_failed_step_takes_no_checkpoint(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = fed(1000, model)
    checkpoints, decoder = session.checkpoints, session.core.memory.decoder
    monkeypatch.setattr(decoder, "forward", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        session.feed(IDS[:STEP])
    assert session.checkpoints == checkpoints


def test_models_without_local_layers_have_none() -> None:
    assert fed(1000, MODEL).checkpoints == []


def test_their_bytes_are_bounded_and_counted(model: Model) -> None:
    session = fed(1000, model)
    free = session.checkpoints
    without = session.cache.nbytes
    assert session.nbytes > without
    session.checkpoint_bytes = (session.nbytes - without) // 2
    assert session.nbytes - without <= session.checkpoint_bytes
    assert set(session.checkpoints) < set(free)
    session.feed(IDS[:500])
    assert session.nbytes - session.cache.nbytes <= session.checkpoint_bytes
    session.checkpoint_bytes = 0
    assert session.checkpoints == []
    session.feed(IDS[:500])
    assert session.checkpoints == []


def test_windows_that_fill_share_one_storage() -> None:
    model = loud_model(local_spec(window=900))
    session = model.session(2048, policy="full", prefill_step=STEP)
    for first in range(0, 1000, 100):
        session.feed(IDS[first : first + 100])
        entries = session.core.memory.checkpoints.entries
        assert len({each.local_segments[0].block.storage for each in entries}) == 1
        assert session.nbytes - session.cache.nbytes <= checkpoint_nbytes(entries)
    assert len(session.checkpoints) >= 5
    for count in session.checkpoints[:-1]:
        require_same_future(session.beginning(count), fed(count, model))


def test_after_an_eviction_they_are_not_used() -> None:
    """Local windows at a checkpoint may contain what evicted tokens said."""
    session = LOCAL_MODEL.session(200, policy="sliding", prefill_step=STEP)
    session.feed(IDS[:1000])
    rewound = session.fork(900)
    naive = LOCAL_MODEL.session(200, policy="sliding", prefill_step=STEP, checkpoint_bytes=0)
    naive.feed(IDS[:1000])
    torch.testing.assert_close(rewound.logits, naive.fork(900).logits)


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    branch=st.integers(0, 200),
)
def test_the_distances_between_them_grow_with_that_to_the_newest(
    counts: list[int], branch: int
) -> None:
    memory, checkpoints, total = fed(STEP).core.memory, Checkpoints(branch=branch), 0
    seen = set[int]()
    for count in counts:
        total += count
        seen.add(total)
        checkpoints = checkpoints.added(memory.cache.checkpoint(total))
        kept = [each.num_tokens for each in checkpoints.entries]
        assert kept == sorted(kept)
        assert set(kept) <= seen
        assert total in kept
        assert branch not in seen or branch in kept
        for taken in seen:  # whatever was taken, something near it is left
            nearest = max((each for each in kept if each <= taken), default=0)
            assert taken - nearest <= max(40, total - taken) or nearest == min(seen)
    assert len(kept) <= max_checkpoint_count(total, min(counts)) + 2
