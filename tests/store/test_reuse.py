"""What a session gives a prefix store, and takes from it, is what its policy keeps exact."""

import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from small import small_model
from small_files import small_files_only
from store.prefill import prompt
from topics import topic_ids

from kvkeep import Calibration, calibrate
from kvkeep.compression.methods import METHODS
from kvkeep.errors import Locked
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.prefixes import store as prefix
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS
from kvkeep.storage.prefixes.store import PrefixStore

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
    assert found.feed(ids).reused >= BLOCK_TOKENS
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


@pytest.mark.extended
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


def archives(
    model: Model, method: str, store: PrefixStore, known: Calibration | None = None
) -> list[Session]:
    """One with a store and one without; both evaluate from where blocks of a store begin."""
    how = {"keep": 0, "policy": "archive", "method": method, "ratio": 4, "prefill_step": 256}
    return [
        model.session(700, store=each, calibration=known, **how)  # type: ignore[arg-type]
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


@cache
def calibration() -> Calibration:
    return calibrate(MODEL, prompt(3, 8 * 512))


@pytest.mark.parametrize(
    "method", [name for name in METHODS if not METHODS[name].uses_reconstruction]
)
def test_an_archive_decides_the_same_with_a_store(tmp_path: Path, method: str) -> None:
    """Methods that look at queries must have seen those of the newest tokens."""
    store, ids = PrefixStore(tmp_path), prompt(7, 900)
    MODEL.session(policy="full", store=store, prefill_step=256).feed(ids)
    known = calibration() if METHODS[method].uses_surrogate else None
    found, alone = archives(MODEL, method, store, known)
    assert found.feed(ids).reused == (
        BLOCK_TOKENS if METHODS[method].uses_queries else 2 * BLOCK_TOKENS
    )
    alone.feed(ids)
    require_same_archives(found, alone)


@pytest.mark.extended
def test_an_archive_decides_the_same_on_the_real_model(smollm2: Model, tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), topic_ids(smollm2)[:600]
    smollm2.session(policy="full", store=store, prefill_step=256).feed(ids)
    found, alone = archives(smollm2, "snapkv", store)
    assert found.feed(ids).reused == BLOCK_TOKENS
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


# A store that fails


def require_answered(store: PrefixStore, error: str, model: Model = MODEL) -> None:
    """A session that has such a store answers as one without, and says why."""
    ids = prompt(7, 900)
    session, alone = (model.session(policy="full", store=each) for each in (store, None))
    report = session.feed(ids)
    assert (report.tokens, report.reused) == (len(ids), 0)
    assert report.store_error is not None
    assert error in report.store_error
    alone.feed(ids)
    require_same(session, alone)
    assert session.feed(ids[:20]).store_error is None  # only a first prompt asks a store


def test_a_full_disk_costs_no_answer(tmp_path: Path) -> None:
    with small_files_only(20_000):
        require_answered(PrefixStore(tmp_path), "File too large")
    assert os.listdir(tmp_path) == ["lock"]


def test_a_folder_that_vanished_is_made_anew(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path / "store"), prompt(7, 900)
    for reused in (0, 768):
        report = MODEL.session(store=store).feed(ids)
        assert (report.reused, report.store_error) == (reused, None)
        if not reused:
            shutil.rmtree(tmp_path / "store")
            report = MODEL.session(store=store).feed(ids)
            assert (report.reused, report.store_error) == (0, None)


def test_a_file_in_the_place_of_the_folder_costs_no_answer(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("in the way")
    require_answered(store, "Not a directory")


def test_a_folder_that_takes_no_new_files_costs_no_answer(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path)
    (tmp_path / "lock").mkdir()  # permissions would not stop the superuser
    require_answered(store, "cannot be written")


def test_a_store_that_another_process_does_not_let_go_of_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PrefixStore(tmp_path)
    monkeypatch.setattr(prefix, "PATIENCE", 0.1)
    with FileLock(tmp_path / "lock"):
        require_answered(store, "another process")
        with pytest.raises(Locked, match="another process"):
            store.gc(0)
    assert MODEL.session(store=store).feed(prompt(7, 900)).store_error is None


def test_a_store_that_fails_is_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for it at each step would cost more than it saves."""
    store, lock = PrefixStore(tmp_path), FileLock(tmp_path / "lock")
    monkeypatch.setattr(prefix, "PATIENCE", 0.1)
    steps = []

    def advance(count: int) -> None:
        steps.append(count)
        if len(steps) == 3:  # the first block is whole, and was refused
            lock.release()

    lock.acquire()
    report = MODEL.session(policy="full", store=store, prefill_step=100).feed(
        prompt(7, 900), advance
    )
    assert len(steps) > 3
    assert report.store_error is not None
    assert store.nbytes == 0
