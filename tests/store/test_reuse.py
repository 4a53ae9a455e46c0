"""What a session gives a prefix store, and takes from it, is what its policy keeps exact."""

from pathlib import Path

import pytest
import torch
from small import small_model
from store.prefill import prompt
from topics import topic_ids

from kvkeep.methods import METHODS
from kvkeep.model import Model
from kvkeep.session import Session
from kvkeep.store.prefix import BLOCK, PrefixStore

MODEL = small_model()
WINDOW = 300  # of tokens that come one after another, before self-extend begins to group
SESSIONS = {
    "full": {"policy": "full"},
    "sliding": {"policy": "sliding", "max_kv_size": 600},
    "sliding, without sinks": {"policy": "sliding", "max_kv_size": 600, "keep": 0},
    "sliding, many kept": {"policy": "sliding", "max_kv_size": 600, "keep": 400},
    "the whole prompt kept": {"policy": "sliding", "max_kv_size": 1000, "keep": -1},
    "shift": {"policy": "shift", "max_kv_size": 600, "discard": 50},
    "shift by half": {"policy": "shift", "max_kv_size": 600},
    "archive": {"policy": "archive", "max_kv_size": 600},
    "self_extend": {"policy": "self_extend", "group": 4, "window": WINDOW},
    "self_extend, in groups of one": {"policy": "self_extend", "group": 1, "window": WINDOW},
}


def session(name: str, store: PrefixStore | None, prefill_step: int = 512) -> Session:
    return MODEL.session(**SESSIONS[name], store=store, prefill_step=prefill_step)  # type: ignore[arg-type]


def require_same(found: Session, expected: Session, tokens: int = 8) -> None:
    assert (found.logits - expected.logits).abs().max() <= 1e-4
    for _ in range(tokens):
        assert found.next_token() == expected.next_token()
    assert (found.logits - expected.logits).abs().max() <= 1e-4


@pytest.mark.parametrize("prefill_step", [100, 512])
@pytest.mark.parametrize("name", SESSIONS)
def test_a_store_changes_no_result_of_any_policy(
    tmp_path: Path, name: str, prefill_step: int
) -> None:
    """Fed twice beyond every window; then a session that keeps all takes what they left."""
    store, ids = PrefixStore(tmp_path), prompt(7, 900)
    alone = session(name, None, prefill_step)
    alone.feed(ids)
    for _ in range(2):
        again = session(name, store, prefill_step)
        again.feed(ids)
        require_same(again, alone.fork())
    whole, expected = (MODEL.session(policy="full", store=each) for each in (store, None))
    for each in (whole, expected):
        each.feed(ids)
    require_same(whole, expected)


@pytest.mark.parametrize("name", SESSIONS)
def test_what_a_session_that_kept_all_left_changes_no_result(tmp_path: Path, name: str) -> None:
    store, ids = PrefixStore(tmp_path), prompt(7, 900)
    MODEL.session(policy="full", store=store).feed(ids)
    found, alone = (session(name, each) for each in (store, None))
    assert found.feed(ids).reused >= BLOCK
    alone.feed(ids)
    require_same(found, alone)


@pytest.mark.parametrize("name", SESSIONS)
def test_nothing_but_what_is_exact_enters_after_edits_and_rewinds(
    tmp_path: Path, name: str
) -> None:
    store, ids = PrefixStore(tmp_path), prompt(7, 900)
    edited = session(name, store)
    edited.feed(ids[:290])
    edited.delete(20, 40)
    edited.insert(30, ids[300:320])
    edited.feed(ids[290:680])
    rewound = session(name, store)
    rewound.feed(ids[:280])
    rewound.rewind(280)
    rewound.feed(ids)
    emptied = session(name, store)
    emptied.feed(ids[:270])
    emptied.delete(100, 120)
    emptied.delete(0, 250)
    emptied.feed(ids[:800])
    whole, alone = (MODEL.session(policy="full", store=each) for each in (store, None))
    for each in (whole, alone):
        each.feed(ids)
    require_same(whole, alone)


def test_self_extend_on_the_real_model(smollm2: Model, tmp_path: Path) -> None:
    """What it groups, and what sees that, neither enters a store nor is taken from one."""
    ids, store = topic_ids(smollm2)[:540], PrefixStore(tmp_path)
    alone = smollm2.session(policy="self_extend", group=4, window=256)
    alone.feed(ids)
    for reused in (0, 256):
        found = smollm2.session(policy="self_extend", group=4, window=256, store=store)
        assert found.feed(ids).reused == reused
        assert torch.equal(found.logits, alone.logits)
    whole, expected = (
        smollm2.session(policy="full", store=each, prefill_step=256) for each in (store, None)
    )
    assert whole.feed(ids).reused == 256
    expected.feed(ids)
    assert torch.equal(whole.logits, expected.logits)


def archives(model: Model, method: str, store: PrefixStore) -> list[Session]:
    """One with a store and one without; both evaluate from where blocks of a store begin."""
    return [
        model.session(
            700, keep=0, policy="archive", method=method, ratio=4, store=each, prefill_step=256
        )
        for each in (store, None)
    ]


def require_same_archives(found: Session, alone: Session) -> None:
    """To the bit: the queries that decided, and every cell that was left."""
    assert found.cache.cells == alone.cache.cells
    for a, b in zip(found.cache.segments, alone.cache.segments, strict=True):
        one, other = a.read(0, a.length), b.read(0, b.length)
        assert torch.equal(one.positions, other.positions)
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    assert torch.equal(found.logits, alone.logits)


@pytest.mark.parametrize("method", METHODS)
def test_an_archive_decides_the_same_with_a_store(tmp_path: Path, method: str) -> None:
    """Methods that look at queries must have seen those of the newest tokens."""
    store, ids = PrefixStore(tmp_path), prompt(7, 900)
    MODEL.session(policy="full", store=store, prefill_step=256).feed(ids)
    found, alone = archives(MODEL, method, store)
    assert found.feed(ids).reused == (BLOCK if METHODS[method].observes else 2 * BLOCK)
    alone.feed(ids)
    require_same_archives(found, alone)


def test_an_archive_decides_the_same_on_the_real_model(smollm2: Model, tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), topic_ids(smollm2)[:600]
    smollm2.session(policy="full", store=store, prefill_step=256).feed(ids)
    found, alone = archives(smollm2, "snapkv", store)
    assert found.feed(ids).reused == BLOCK
    alone.feed(ids)
    require_same_archives(found, alone)


@pytest.mark.parametrize("method", ["h2o", "expected_attention"])
def test_an_archive_decides_the_same_after_a_prompt_that_is_stored_nearly_whole(
    tmp_path: Path, method: str
) -> None:
    """Tokens that an edit puts in fill the window, too, and nobody observes their queries."""
    store, ids = PrefixStore(tmp_path), prompt(7, 900)
    MODEL.session(policy="full", store=store, prefill_step=256).feed(ids)
    for length in (260, 390, 514):
        found, alone = archives(MODEL, method, store)
        for each in (found, alone):
            each.feed(ids[:length])
            each.rewind(2)
            each.insert(100, ids[300:400])
            each.feed(ids[length:])
        assert (found.logits - alone.logits).abs().max() <= 1e-4
