"""What cells take in memory: no more than a budget and an eighth, whatever is done."""

import random
from contextlib import suppress

import pytest
from edit_actions import MODEL

from kvkeep.cache import KVCache
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
    """One call of any kind; the session that goes on."""
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
    """Those of keys and values alone: an archived cell also has a position and a bias, and of
    ragged ones each head has a number of them.
    """
    slots = [segment.block.slots for segment in cache.segments if segment.compressed]
    beside = sum(x.nbytes - x.stored_keys.nbytes - x.stored_values.nbytes for x in slots)
    return cache.nbytes - beside


@pytest.mark.parametrize("bits", [{}, {"kv_bits": "8"}], ids=["plain", "8 bits"])
@pytest.mark.parametrize("kind", [*POLICIES, "archive by heads"])
def test_storage_takes_no_more_than_a_budget_and_an_eighth(kind: str, bits) -> None:
    for seed in range(4):
        budget, draw = (48, 256)[seed % 2], random.Random(seed)
        session = MODEL.session(
            budget, policy=kind.split()[0], prefill_step=64, **SETTINGS.get(kind, {}), **bits
        )
        for _ in range(40):
            with suppress(KvkeepError):
                session = act(session, draw)
                session.rewind(0)  # of a fork the first call once its parent is gone
            check(session.cache, budget)


def check(cache: KVCache, budget: int) -> None:
    """Nobody may go on looking at the cache: storage that others look at stays."""
    most, plain = budget + budget // 8, plain_bytes(cache)
    assert cache.cells <= budget
    assert plain <= most * cache.layout.cell_bytes
    assert cache.nbytes - plain <= most * 2 * 2 * 12  # layers, KV heads, and what each cell has


@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_what_is_deleted_is_given_back(policy: str) -> None:
    session = MODEL.session(1024, policy=policy)
    session.feed(TEXT[:1000])
    for start in range(900, 20, -40):
        session.delete(start, start + 38)
        held = session.cache.cells + 256 + 1  # and the newest segment's room to grow
        assert session.cache.nbytes <= 2 * held * session.cache.layout.cell_bytes
    assert session.cache.cells < 200


def test_what_a_fork_still_looks_at_is_not_copied_to_free_what_it_does_not() -> None:
    parent = MODEL.session(1024, policy="full")
    parent.feed(TEXT[:1000])
    fork = parent.fork(at=300)
    fork.delete(100, 290)
    storage = {segment.block.storage for segment in parent.cache.segments}
    assert fork.cache.segments[0].block.storage in storage
    del parent
    fork.feed(TEXT[:1])
    assert fork.cache.nbytes < 500 * fork.cache.layout.cell_bytes
