"""Sessions of every policy store and reuse only exact prefix cells, even if the store fails."""

import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from full_disk import small_files_only
from small_models import small_model
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
WINDOW = 300  # tokens; beyond these, self-extend groups positions
SESSIONS = {
    "full": {"policy": "full"},
    "sliding": {"policy": "sliding", "max_kv_size": 600},
    "sliding, without sinks": {"policy": "sliding", "max_kv_size": 600, "keep": 0},
    "sliding, many sinks": {"policy": "sliding", "max_kv_size": 600, "keep": 400},
    "sliding, whole prompt kept": {"policy": "sliding", "max_kv_size": 1000, "keep": -1},
    "shift": {"policy": "shift", "max_kv_size": 600, "discard": 50},
    "shift by half": {"policy": "shift", "max_kv_size": 600},
    "archive": {"policy": "archive", "max_kv_size": 600},
    "self_extend": {"policy": "self_extend", "group": 4, "window": WINDOW},
    "self_extend, in groups of one": {"policy": "self_extend", "group": 1, "window": WINDOW},
}


def session(name: str, store: PrefixStore | None, prefill_step: int = 512) -> Session:
    return MODEL.session(**SESSIONS[name], store=store, prefill_step=prefill_step)  # type: ignore[arg-type]


def require_same_continuation(reusing: Session, expected: Session, tokens: int = 8) -> None:
    assert (reusing.logits - expected.logits).abs().max() <= 1e-4
    for _ in range(tokens):
        assert reusing.next_token() == expected.next_token()
    assert (reusing.logits - expected.logits).abs().max() <= 1e-4


@pytest.mark.parametrize("prefill_step", [100, 512])
@pytest.mark.parametrize("name", SESSIONS)
def test_a_store_does_not_change_the_results_of_any_policy(
    tmp_path: Path, name: str, prefill_step: int
) -> None:
    """Feed two sessions beyond every window; then a full session reuses the blocks they stored."""
    store, ids = PrefixStore(tmp_path), prompt(7, 900)
    without_store = session(name, None, prefill_step)
    without_store.feed(ids)
    for _ in range(2):
        with_store = session(name, store, prefill_step)
        with_store.feed(ids)
        require_same_continuation(with_store, without_store.fork())
    full_session, expected = (
        MODEL.session(policy="full", store=prefix_store) for prefix_store in (store, None)
    )
    for fed_session in (full_session, expected):
        fed_session.feed(ids)
    require_same_continuation(full_session, expected)


@pytest.mark.parametrize("name", SESSIONS)
def test_blocks_of_a_full_session_do_not_change_the_results_of_any_policy(
    tmp_path: Path, name: str
) -> None:
    store, ids = PrefixStore(tmp_path), prompt(7, 900)
    MODEL.session(policy="full", store=store).feed(ids)
    reusing, without_store = (session(name, prefix_store) for prefix_store in (store, None))
    assert reusing.feed(ids).reused >= BLOCK_TOKENS
    without_store.feed(ids)
    require_same_continuation(reusing, without_store)


@pytest.mark.parametrize("name", SESSIONS)
def test_only_exact_cells_are_stored_after_edits_and_rewinds(tmp_path: Path, name: str) -> None:
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
    full_session, without_store = (
        MODEL.session(policy="full", store=prefix_store) for prefix_store in (store, None)
    )
    for fed_session in (full_session, without_store):
        fed_session.feed(ids)
    require_same_continuation(full_session, without_store)


@pytest.mark.extended
def test_self_extend_neither_stores_nor_reuses_grouped_cells_on_the_real_model(
    smollm2: Model, tmp_path: Path
) -> None:
    """Grouped cells, and cells that attend to them, are neither stored nor reused."""
    ids, store = topic_ids(smollm2)[:540], PrefixStore(tmp_path)
    without_store = smollm2.session(policy="self_extend", group=4, window=256)
    without_store.feed(ids)
    for reused in (0, 256):
        reusing = smollm2.session(policy="self_extend", group=4, window=256, store=store)
        assert reusing.feed(ids).reused == reused
        assert torch.equal(reusing.logits, without_store.logits)
    full_session, expected = (
        smollm2.session(policy="full", store=prefix_store, prefill_step=256)
        for prefix_store in (store, None)
    )
    assert full_session.feed(ids).reused == 256
    expected.feed(ids)
    assert torch.equal(full_session.logits, expected.logits)


def archives(
    model: Model, method: str, store: PrefixStore, calibration_used: Calibration | None = None
) -> list[Session]:
    """Return a session with a store and one without; both prefill in steps of a block."""
    settings = {"keep": 0, "policy": "archive", "method": method, "ratio": 4, "prefill_step": 256}
    return [
        model.session(700, store=prefix_store, calibration=calibration_used, **settings)  # type: ignore[arg-type]
        for prefix_store in (store, None)
    ]


def require_same_archives(reusing: Session, without_store: Session) -> None:
    """Require the same kept cells and the same logits, bit for bit."""
    assert reusing.cache.cells == without_store.cache.cells
    for a, b in zip(reusing.cache.segments, without_store.cache.segments, strict=True):
        one, other = a.read(0, a.length), b.read(0, b.length)
        assert torch.equal(one.positions, other.positions)
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    assert torch.equal(reusing.logits, without_store.logits)


@cache
def calibration() -> Calibration:
    return calibrate(MODEL, prompt(3, 8 * 512))


@pytest.mark.parametrize(
    "method", [name for name in METHODS if not METHODS[name].reconstruction_kind]
)
def test_an_archive_keeps_the_same_cells_with_a_store(tmp_path: Path, method: str) -> None:
    """Methods that use queries must have observed those of the newest tokens."""
    store, ids = PrefixStore(tmp_path), prompt(7, 900)
    MODEL.session(policy="full", store=store, prefill_step=256).feed(ids)
    calibration_used = calibration() if METHODS[method].uses_surrogate else None
    reusing, without_store = archives(MODEL, method, store, calibration_used)
    assert reusing.feed(ids).reused == (
        BLOCK_TOKENS if METHODS[method].uses_queries else 2 * BLOCK_TOKENS
    )
    without_store.feed(ids)
    require_same_archives(reusing, without_store)


@pytest.mark.extended
def test_an_archive_keeps_the_same_cells_on_the_real_model(smollm2: Model, tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), topic_ids(smollm2)[:600]
    smollm2.session(policy="full", store=store, prefill_step=256).feed(ids)
    reusing, without_store = archives(smollm2, "snapkv", store)
    assert reusing.feed(ids).reused == BLOCK_TOKENS
    without_store.feed(ids)
    require_same_archives(reusing, without_store)


@pytest.mark.parametrize("method", ["h2o", "expected_attention"])
def test_an_archive_keeps_the_same_cells_after_reusing_nearly_the_whole_prompt(
    tmp_path: Path, method: str
) -> None:
    """Inserted tokens fill the window as well, and their queries are not observed."""
    store, ids = PrefixStore(tmp_path), prompt(7, 900)
    MODEL.session(policy="full", store=store, prefill_step=256).feed(ids)
    for length in (260, 390, 514):
        reusing, without_store = archives(MODEL, method, store)
        for fed_session in (reusing, without_store):
            fed_session.feed(ids[:length])
            fed_session.rewind(2)
            fed_session.insert(100, ids[300:400])
            fed_session.feed(ids[length:])
        assert (reusing.logits - without_store.logits).abs().max() <= 1e-4


# A store that fails


def require_session_without_store(store: PrefixStore, error: str, model: Model = MODEL) -> None:
    """Require that a session with this store continues like one without, and reports the error."""
    ids = prompt(7, 900)
    session, without_store = (
        model.session(policy="full", store=prefix_store) for prefix_store in (store, None)
    )
    report = session.feed(ids)
    assert (report.tokens, report.reused) == (len(ids), 0)
    assert report.store_error is not None
    assert error in report.store_error
    without_store.feed(ids)
    require_same_continuation(session, without_store)
    assert session.feed(ids[:20]).store_error is None  # only the first prompt uses the store


def test_feeding_works_on_a_full_disk(tmp_path: Path) -> None:
    with small_files_only(20_000):
        require_session_without_store(PrefixStore(tmp_path), "File too large")
    assert os.listdir(tmp_path) == ["lock"]


def test_a_removed_folder_is_created_again(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path / "store"), prompt(7, 900)
    for reused in (0, 768):
        report = MODEL.session(store=store).feed(ids)
        assert (report.reused, report.store_error) == (reused, None)
        if not reused:
            shutil.rmtree(tmp_path / "store")
            report = MODEL.session(store=store).feed(ids)
            assert (report.reused, report.store_error) == (0, None)


def test_feeding_works_if_a_file_replaces_the_folder(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("in the way")
    require_session_without_store(store, "Not a directory")


def test_feeding_works_if_the_folder_is_not_writable(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path)
    (tmp_path / "lock").mkdir()  # permissions would not stop the superuser
    require_session_without_store(store, "cannot be written")


def test_feeding_works_while_another_process_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PrefixStore(tmp_path)
    monkeypatch.setattr(prefix, "LOCK_TIMEOUT", 0.1)
    with FileLock(tmp_path / "lock"):
        require_session_without_store(store, "another process")
        with pytest.raises(Locked, match="another process"):
            store.gc(0)
    assert MODEL.session(store=store).feed(prompt(7, 900)).store_error is None


def test_a_failed_store_is_not_used_again_for_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for the lock at each step would cost more than reuse saves."""
    store, lock = PrefixStore(tmp_path), FileLock(tmp_path / "lock")
    monkeypatch.setattr(prefix, "LOCK_TIMEOUT", 0.1)
    steps = []

    def advance(count: int) -> None:
        steps.append(count)
        if len(steps) == 3:  # the first block is complete, and storing it failed
            lock.release()

    lock.acquire()
    report = MODEL.session(policy="full", store=store, prefill_step=100).feed(
        prompt(7, 900), advance
    )
    assert len(steps) > 3
    assert report.store_error is not None
    assert store.nbytes == 0
