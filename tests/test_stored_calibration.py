"""The stored calibration of a model: sessions are made, compressed and restored by it."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from server.conftest import running_server
from small_models import small_model

from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.calibration.stored import add_calibration, find_calibration
from kvkeep.errors import CorruptFile, InvalidArgument
from kvkeep.evaluate.calibrate import calibrate
from kvkeep.policies import Archive
from kvkeep.session.session import Session

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(1536)]
ARCHIVE: dict[str, Any] = {"policy": "archive", "max_kv_size": 64}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))


@pytest.fixture
def other() -> Calibration:
    return calibrate(MODEL, TEXT[::-1])


@pytest.fixture
def stored() -> Calibration:
    calibration = calibrate(MODEL, TEXT)
    add_calibration(calibration)
    return calibration


def fed(session: Session, count: int = 200) -> Session:
    session.feed(TEXT[:count])
    return session


@pytest.mark.parametrize(
    "settings",
    [
        ARCHIVE,
        {**ARCHIVE, "method": "kvzap"},
        {"policy": Archive(64)},
        {"policy": Archive(64, method="kvzap")},
    ],
)
def test_an_archive_uses_it(stored: Calibration, settings: dict[str, Any]) -> None:
    session = MODEL.session(**settings)
    assert session.settings["method"] == "kvzap"
    assert session.settings["calibrated_by"] == stored.digest


def test_other_methods_and_policies_do_not_use_it(stored: Calibration, other: Calibration) -> None:
    fitted = MODEL.session(**ARCHIVE, method="fitted")
    assert not fitted.settings["calibrated_by"]
    assert "calibrated_by" not in MODEL.session(64).settings
    passed = MODEL.session(**ARCHIVE, calibration=other)
    assert passed.settings["calibrated_by"] == other.digest


def test_compress_by_kvzap_uses_it(stored: Calibration) -> None:
    by_default, by_argument = (fed(MODEL.session(policy="full")) for _ in range(2))
    by_default.compress(2.0, "kvzap")
    by_argument.compress(2.0, "kvzap", calibration=stored)
    assert by_default.logits.equal(by_argument.logits)
    assert by_default.cache.serials() == by_argument.cache.serials()


def test_without_one_kvzap_is_refused() -> None:
    for call in (
        lambda: MODEL.session(**ARCHIVE, method="kvzap"),
        lambda: fed(MODEL.session(policy="full")).compress(2.0, "kvzap"),
    ):
        with pytest.raises(InvalidArgument, match="kvkeep pull --calibrate"):
            call()


def test_a_session_is_restored_by_it(stored: Calibration, other: Calibration) -> None:
    snapshot = fed(MODEL.session(**ARCHIVE)).snapshot()
    for calibration in (None, other, stored):
        restored = MODEL.restore(snapshot, calibration=calibration)
        assert restored.settings["calibrated_by"] == stored.digest
    needs_other = fed(MODEL.session(**ARCHIVE, calibration=other)).snapshot()
    assert MODEL.restore(needs_other, calibration=other).logits is not None
    with pytest.raises(InvalidArgument, match="pass the one that the session was created with"):
        MODEL.restore(needs_other)


@pytest.mark.parametrize("is_named_by_digest", [True, False])
def test_sessions_keep_their_calibration_when_another_is_added(
    stored: Calibration, other: Calibration, is_named_by_digest: bool
) -> None:
    path = add_calibration(stored)
    if not is_named_by_digest:  # as in older versions, which had one for each model
        path = path.rename(path.with_name(f"{path.stem.partition('-')[0]}.kvcal"))
    snapshot = fed(MODEL.session(**ARCHIVE)).snapshot()
    os.utime(path, (1, 1))
    add_calibration(other)
    assert MODEL.session(**ARCHIVE).settings["calibrated_by"] == other.digest
    restored = MODEL.restore(snapshot)
    assert restored.settings["calibrated_by"] == stored.digest
    path.unlink()
    with pytest.raises(InvalidArgument, match=rf"copy \*-{stored.digest[:32]}.kvcal from"):
        MODEL.restore(snapshot)


def test_a_copy_that_the_advice_asks_for_is_not_the_default_of_new_sessions(
    stored: Calibration, other: Calibration, tmp_path: Path
) -> None:
    snapshot = fed(MODEL.session(**ARCHIVE)).snapshot()
    path = add_calibration(stored)
    os.utime(path, (1, 1))
    add_calibration(other)
    there = path.rename(tmp_path / path.name)
    with pytest.raises(InvalidArgument, match=r"modification time \(cp -p\): new sessions use"):
        MODEL.restore(snapshot)
    shutil.copy2(there, path)
    assert MODEL.restore(snapshot).settings["calibrated_by"] == stored.digest
    assert MODEL.session(**ARCHIVE).settings["calibrated_by"] == other.digest


def test_a_calibration_that_is_measured_again_is_the_newest(
    stored: Calibration, other: Calibration
) -> None:
    for path in (add_calibration(other), add_calibration(stored)):
        os.utime(path, (1, 1))
    add_calibration(stored)
    newest = MODEL.calibration
    assert newest is not None
    assert newest.digest == stored.digest


def test_a_calibration_is_found_by_its_own_digest_only(
    stored: Calibration, other: Calibration
) -> None:
    for digest in ("*", "../" * 20, "\0", stored.digest[:32] + "*" * 32):
        assert find_calibration(digest, MODEL) is None
    add_calibration(stored).rename(add_calibration(other))
    with pytest.raises(CorruptFile, match="differs from its name: replace it by a copy"):
        find_calibration(other.digest, MODEL)


def test_a_damaged_one_is_reported(stored: Calibration) -> None:
    path = add_calibration(stored)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match="is corrupt"):
        MODEL.session(**ARCHIVE)
    assert MODEL.session(64).max_kv_size == 64


@pytest.fixture(params=["stored", "passed"])
def settings(
    request: pytest.FixtureRequest, stored: Calibration, other: Calibration
) -> dict[str, Any]:
    """Return settings of a server with the model's stored calibration, or with another one."""
    return {**ARCHIVE, "calibration": stored if request.param == "stored" else other}


def test_a_server_loads_its_calibrated_sessions_again(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    for turn in range(2):
        with (
            running_server(MODEL, tmp_path / "sessions", settings=settings) as server,
            server.client() as client,
        ):
            if not turn:
                client.post("/v1/sessions", json={"name": "diary"}).raise_for_status()
            fed = client.post("/v1/sessions/diary/feed", json={"tokens": TEXT[:200]})
            assert fed.status_code == 200, fed.text
            label = client.post("/v1/sessions/diary/snapshot", json={"name": f"label{turn}"})
            assert label.status_code == 201, label.text
            restored = client.post("/v1/snapshots/label0/restore", json={"name": f"copy{turn}"})
            assert restored.status_code == 201, restored.text


def test_a_server_with_a_calibration_creates_sessions_of_every_policy(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with running_server(MODEL, tmp_path, settings=settings) as server, server.client() as client:
        for policy in ("sliding", "shift", "self_extend", "full", "archive"):
            body = {"name": policy, "policy": policy, "max_kv_size": 64}
            if policy == "self_extend":
                body["window"] = 16
            created = client.post("/v1/sessions", json=body)
            assert created.status_code == 201, created.text
        engine = server.service.engine
        archive = engine.run(lambda operations: operations.find("archive").session).result()
        assert archive.settings["calibrated_by"] == settings["calibration"].digest
