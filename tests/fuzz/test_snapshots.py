"""Fuzz tests of snapshots: damaged bytes, and wrong content with correct checksums."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from fuzz.fuzzing import fuzz
from fuzz.sealed import assemble, mutate, take_apart
from lossy_basis import random_basis
from small_models import local_spec, small_model, state_specs

from kvkeep import Session, Snapshot
from kvkeep.storage.lossy.basis import add_basis

MODEL = small_model()
WINDOW_MODEL = small_model(spec=local_spec())
STATE_MODEL = small_model(spec=state_specs()["delta_net"])
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(300)]


def wrapped() -> Session:
    session = MODEL.session(24)
    session.feed(TEXT[:40])
    session.pin(30, 33)
    session.name("said", 34, 37)
    session.next_token()
    return session


def edited() -> Session:
    session = MODEL.session(policy="full", kv_bits="8/4")
    session.feed(TEXT[:40])
    session.delete(5, 9)
    session.insert(12, TEXT[:4])
    return session


def archived() -> Session:
    session = MODEL.session(40, 4, "archive", method="snapkv", window=12)
    session.feed(TEXT[:80])
    return session


def compressed() -> Session:
    session = MODEL.session(policy="full")
    session.feed(TEXT[:60])
    session.compress(3, recent=8)
    return session


def ragged() -> Session:
    session = MODEL.session(policy="full", kv_bits="8/4")
    session.feed(TEXT[:60])
    session.compress(3, "knorm", recent=8, budget="heads")
    return session


def with_residual_cells() -> Session:
    session = MODEL.session(policy="full")
    session.feed(TEXT[:60])
    session.compress(3, "kvzip", recent=8)
    return session


def archived_by_heads() -> Session:
    session = MODEL.session(40, 4, "archive", method="knorm", budget="heads", window=12)
    session.feed(TEXT[:80])
    return session


def grouped() -> Session:
    session = MODEL.session(policy="self_extend", group=2, window=8)
    session.feed(TEXT[:30])
    return session


def with_windows() -> Session:
    session = WINDOW_MODEL.session(200, policy="full", prefill_step=30)
    session.feed(TEXT[:180])
    return session


def with_states() -> Session:
    session = STATE_MODEL.session(200, policy="full", prefill_step=30)
    session.feed(TEXT[:100])
    return session


def rounded() -> Session:
    add_basis(random_basis(MODEL))
    session = MODEL.session(policy="full")
    session.feed(TEXT)
    return session


SESSIONS: dict[str, Callable[[], Session]] = {
    constructor.__name__: constructor
    for constructor in (
        wrapped,
        edited,
        archived,
        compressed,
        grouped,
        ragged,
        archived_by_heads,
        with_windows,
        with_states,
        with_residual_cells,
        rounded,
    )
}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_damaged_snapshot_continues_or_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))  # with the basis of rounded cells
    path = tmp_path / "a.kvkeep"
    saved = SESSIONS[name]()
    saved.snapshot().save(path, "small" if name == "rounded" else "exact")
    model = saved.core.model
    original = path.read_bytes()
    assert take_apart(assemble(take_apart(original))) == take_apart(original)
    path.write_bytes(assemble(take_apart(original)))
    Session.restored(model, Snapshot.load(path))  # the assembled file itself is valid

    def read(random: Random) -> None:
        path.write_bytes(mutate(original, random))
        session = Session.restored(model, Snapshot.load(path))
        session.feed(TEXT[:3])
        session.rewind(1)
        if session.checkpoints:
            session.fork(session.checkpoints[0])
            session.beginning(session.checkpoints[-1])
        session.next_token()
        session.snapshot().save(tmp_path / "b.kvkeep")
        Session.restored(model, Snapshot.load(tmp_path / "b.kvkeep"))

    outcomes = fuzz(read, 20 + list(SESSIONS).index(name), share=len(SESSIONS))
    assert outcomes["CorruptFile"]
