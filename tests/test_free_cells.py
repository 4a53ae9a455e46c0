"""`Session.room`, and `keep=-1` until a first prompt was fed."""

import pytest
import torch
from session_state import same, whole_state
from small_models import small_model

from kvkeep.errors import ContextFull, InvalidArgument, NonFiniteLogits

MODEL = small_model(max_positions=400)
TEXT = [1 + i * 7 % 250 for i in range(400)]


def session_after_failed_feed(text: list[int], error: type[BaseException]):
    """Return a session with `keep=-1` whose first feed raised an error and changed nothing."""
    session = MODEL.session(64, keep=-1, prefill_step=16)
    before = whole_state(session)
    with pytest.raises(error):
        session.feed(text)
    assert same(whole_state(session), before)
    return session


def test_keep_minus_one_applies_to_the_first_prompt_that_succeeds() -> None:
    weight = MODEL.decoder.tensors["model.layers.1.mlp.down_proj.weight"]
    sound = weight.clone()
    weight[0, 0] = torch.nan
    try:
        session = session_after_failed_feed(TEXT[:20], NonFiniteLogits)
    finally:
        weight.copy_(sound)
    assert session.keep == -1
    session.feed(TEXT[:20])
    session.feed(TEXT[20:200])
    assert session.keep == 20
    assert session.snapshot().serials[:20].tolist() == session.cache.serials()[:20]


def test_keep_minus_one_still_applies_after_a_prompt_that_is_too_long() -> None:
    session = session_after_failed_feed(TEXT[:64], InvalidArgument)
    assert session.keep == -1
    session.feed(TEXT[:63])
    assert session.keep == 63


def test_keep_minus_one_is_set_by_an_interrupted_first_prompt() -> None:
    session = MODEL.session(64, keep=-1, prefill_step=16)

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.feed(TEXT[:40], progress=stop)
    assert session.tokens == TEXT[:16]
    assert session.keep == 40
    session.feed(TEXT[16:40])
    session.feed(TEXT[40:200])
    assert session.snapshot().serials[:40].tolist() == session.cache.serials()[:40]


@pytest.mark.parametrize("policy", ["full", "self_extend"])
def test_keep_minus_one_is_refused_by_policies_without_keep(policy: str) -> None:
    with pytest.raises(InvalidArgument, match="keep"):
        MODEL.session(policy=policy, keep=-1, window=64 if policy == "self_extend" else None)
    session = MODEL.session(policy=policy, window=64 if policy == "self_extend" else None)
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="has no setting keep"):
        session.keep = -1
    assert same(whole_state(session), before)
    session.feed(TEXT[:10])
    assert session.tokens == TEXT[:10]


def test_compression_frees_room() -> None:
    session = MODEL.session(100, policy="full")
    session.feed(TEXT[:100])
    assert session.room == 0
    session.compress(4, recent=10)
    assert session.cache.cells == 25
    assert session.room == 75
    session.feed(TEXT[100:175])
    assert (session.cache.cells, session.room) == (100, 0)
    with pytest.raises(ContextFull, match="100 are in the cache"):
        session.feed(TEXT[:1])


def test_room_is_limited_by_the_trained_distance() -> None:
    session = MODEL.session(policy="full")
    session.feed(TEXT[:380])
    session.compress(4, recent=10)
    assert session.room == 20  # few cells, but the first is 380 of 400 positions back
    session.feed(TEXT[:20])
    assert session.cache.reach == 400
    with pytest.raises(ContextFull, match="400 positions back"):
        session.feed(TEXT[:1])


def test_a_restored_session_has_the_same_room(tmp_path) -> None:
    from kvkeep import Snapshot

    session = MODEL.session(100, policy="full")
    session.feed(TEXT[:100])
    session.compress(4, recent=10)
    session.snapshot().save(tmp_path / "a.kvkeep")
    assert MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep")).room == session.room == 75
