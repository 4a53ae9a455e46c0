"""The bytes of cells: at most those of a budget and an eighth, after any call."""

import random
from contextlib import suppress
from pathlib import Path

import pytest
from edit_actions import MODEL

from kvkeep import Snapshot
from kvkeep.cache import KVCache, Segment
from kvkeep.errors import KvkeepError
from kvkeep.policies import POLICIES
from kvkeep.session.session import Session

TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(3000)]
SETTINGS = {
    "archive": {"method": "keydiff", "ratio": 4.0},
    "archive by heads": {"method": "keydiff", "ratio": 4.0, "budget": "heads"},
    "self_extend": {"group": 1, "window": 32},
}


def act(session: Session, draw: random.Random) -> Session:
    """Make one random call; return the session to continue with."""
    kinds = ("feed", "replace", "delete", "insert", "pin", "unpin", "rewind", "write", "fork")
    kind, total = draw.choice(kinds), len(session.tokens)
    start, count = max(0, total - draw.randint(1, session.max_kv_size)), draw.randint(1, 9)
    if kind == "feed":
        session.feed(TEXT[: draw.randint(1, session.max_kv_size // 2)])
    elif kind == "replace":
        session.replace(start, start + count, TEXT[: draw.randint(1, 9)])
    elif kind == "insert":
        session.insert(start, TEXT[:count])
    elif kind == "rewind":
        session.rewind(count)
    elif kind == "write":
        for _ in range(3 * count):
            session.next_token()
    elif kind == "fork":
        return session.fork()
    else:
        getattr(session, kind)(start, start + count)
    return session


def plain_bytes(cache: KVCache) -> int:
    """Return the bytes of keys and values alone.

    Compressed cells also have positions and biases, and ragged ones the counts of the heads.
    """
    slots = [segment.block.slots for segment in cache.segments if segment.compressed]
    extra = sum(x.nbytes - x.stored_keys.nbytes - x.stored_values.nbytes for x in slots)
    return cache.nbytes - extra


@pytest.mark.parametrize("bits", [{}, {"kv_bits": "8"}], ids=["plain", "8 bits"])
@pytest.mark.parametrize("kind", [*POLICIES, "archive by heads"])
def test_storage_is_at_most_nine_eighths_of_the_budget(kind: str, bits) -> None:
    for seed in range(4):
        budget, draw = (48, 256)[seed % 2], random.Random(seed)
        session = MODEL.session(
            budget, policy=kind.split()[0], prefill_step=64, **SETTINGS.get(kind, {}), **bits
        )
        for _ in range(40):
            with suppress(KvkeepError):
                session = act(session, draw)
                session.rewind(0)  # in a fork, the first call since its parent was dropped
            check(session.cache, budget)


def check(cache: KVCache, budget: int) -> None:
    """Check the bytes of a cache whose storage no other cache shares."""
    most, plain = budget + budget // 8, plain_bytes(cache)
    assert cache.cells <= budget
    assert plain <= most * cache.layout.cell_bytes
    assert cache.nbytes - plain <= most * 2 * 2 * 12  # layers, KV heads, bytes of position and bias


@pytest.mark.parametrize("kind", [*POLICIES, "archive by heads"])
def test_a_restored_session_allocates_no_more_than_its_budget(kind: str, tmp_path: Path) -> None:
    """Under self_extend a sixteenth more: two of its segments grow."""
    policy, settings, budget = kind.split()[0], SETTINGS.get(kind, {}), 256
    session = MODEL.session(budget, policy=policy, prefill_step=16, **settings)
    session.feed(TEXT[:60])
    session.snapshot().save(tmp_path / "a.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    most = budget + (budget // 16 if policy == "self_extend" else 0)
    for token in TEXT[60:budget]:
        for each in (session, restored):
            each.feed([token])
            assert plain_bytes(each.cache) <= most * each.cache.layout.cell_bytes


@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_deleted_cells_free_their_storage(policy: str) -> None:
    session = MODEL.session(1024, policy=policy)
    session.feed(TEXT[:1000])
    for start in range(900, 20, -40):
        session.delete(start, start + 38)
        allowed = session.cache.cells + 256 + 1  # and the newest segment's free slots
        assert session.cache.nbytes <= 2 * allowed * session.cache.layout.cell_bytes
    assert session.cache.cells < 200


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_storage_that_cannot_be_freed_is_freed_by_a_later_call(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = MODEL.session(60, keep=4, prefill_step=16)
    session.feed(TEXT[:50])
    session.delete(10, 14)  # leaves storage of which the next tokens make a part idle
    failed = list[Segment]()

    def fail(segment: Segment) -> None:
        failed.append(segment)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "compact", fail)
        feeding = session.feeding(TEXT[50:90])
        while not failed:
            done = next(feeding).done
        assert feeding.done == done
        assert session.tokens[46:] == TEXT[50 : 50 + done]
    list(feeding)
    assert session.tokens[46:] == TEXT[50:90]
    check(session.cache, 60)


def test_shared_storage_is_copied_only_once_the_parent_is_gone() -> None:
    parent = MODEL.session(1024, policy="full")
    parent.feed(TEXT[:1000])
    fork = parent.fork(at=300)
    fork.delete(100, 290)
    storage = {segment.block.storage for segment in parent.cache.segments}
    assert fork.cache.segments[0].block.storage in storage
    del parent
    fork.feed(TEXT[:1])
    assert fork.cache.nbytes < 500 * fork.cache.layout.cell_bytes
