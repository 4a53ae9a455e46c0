"""A calibration without a file name is stored where every command finds it."""

from pathlib import Path

import pytest

from kvkeep import Snapshot, load_model
from kvkeep.evaluate import basis, haystack

TEXT = "The sea is wide and the night is long; nobody knows how long. " * 110  # 1,651 tokens
ARCHIVE = ["--policy", "archive", "--max-kv-size", "48"]
CALM = ["-n", 4, "--no-progress", "--ignore-eos", "--temperature", 0]
WRITE = ["generate", "-p", TEXT[:900], *CALM, *ARCHIVE]
GAIN = "kvkeep pull --calibrate"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def kept(invoke, tiny, home: Path) -> Path:
    result = invoke("calibrate", "-", *tiny, input=TEXT)
    assert result.exit_code == 0, result.stderr
    (file,) = (home / "calibrations").iterdir()
    assert result.stderr.startswith(f"{file}: ")
    return file


def policy_of(home: Path, name: str) -> dict[str, object]:
    return Snapshot.load(home / "sessions" / f"{name}.kvkeep").policy


def test_a_stored_calibration_belongs_to_one_model(kept: Path, tiny_folder: Path) -> None:
    model = load_model(str(tiny_folder), dtype="float32")
    found = model.calibration
    assert found is not None
    assert kept.stem.endswith(f"-{found.digest[:32]}")
    session = model.session(48, policy="archive", calibration=found)
    assert session.settings["method"] == "kvzap"
    assert load_model(str(tiny_folder), dtype="bfloat16").calibration is None


def test_an_archive_uses_the_stored_calibration(
    invoke, tiny, tiny_folder: Path, home: Path, kept: Path
) -> None:
    result = invoke(*WRITE, "--session", "s", *tiny)
    assert result.exit_code == 0, result.stderr
    assert GAIN not in result.stderr
    found = load_model(str(tiny_folder), dtype="float32").calibration
    assert found is not None
    assert policy_of(home, "s")["calibrated_by"] == found.digest
    by_file = invoke(*WRITE, "--calibration", kept, *tiny)
    assert by_file.stdout == result.stdout
    count = len(Snapshot.load(home / "sessions" / "s.kvkeep").tokens)
    forked = invoke("sessions", "fork", "s", "t", "--at", count - 2)
    assert forked.exit_code == 0, forked.stderr
    assert policy_of(home, "t")["calibrated_by"] == found.digest
    again = invoke("generate", "--session", "s", *CALM, *tiny)
    assert again.exit_code == 0, again.stderr


def test_a_session_resumes_after_another_calibration(invoke, tiny, home: Path, kept: Path) -> None:
    assert invoke(*WRITE, "--session", "old", *tiny).exit_code == 0
    assert invoke("calibrate", "-", *tiny, input=TEXT[::-1]).exit_code == 0
    assert invoke(*WRITE, "--session", "new", *tiny).exit_code == 0
    digests = [policy_of(home, name)["calibrated_by"] for name in ("old", "new")]
    assert digests[0] != digests[1]
    for name in ("old", "new"):
        again = invoke("generate", "--session", name, *CALM, *tiny)
        assert again.exit_code == 0, again.stderr
    assert [policy_of(home, name)["calibrated_by"] for name in ("old", "new")] == digests
    assert kept.exists()


def test_an_explicit_method_ignores_the_stored_calibration(
    invoke, tiny, home: Path, kept: Path
) -> None:
    result = invoke(*WRITE, "--method", "fitted", "--session", "s", *tiny)
    assert result.exit_code == 0, result.stderr
    assert GAIN not in result.stderr
    assert not policy_of(home, "s")["calibrated_by"]
    assert kept.exists()


def test_without_a_calibration_a_hint_names_its_benefit(invoke, tiny, home: Path) -> None:
    result = invoke(*WRITE, "--session", "s", *tiny)
    assert result.exit_code == 0, result.stderr
    assert GAIN in result.stderr.splitlines()[-1]
    assert not policy_of(home, "s")["calibrated_by"]
    assert GAIN not in invoke(*WRITE, "--quiet", *tiny).stderr
    sliding = invoke("generate", "-p", "The sea", *CALM, *tiny)
    assert GAIN not in sliding.stderr


def test_a_session_created_with_it_needs_it(invoke, tiny, kept: Path) -> None:
    assert invoke(*WRITE, "--session", "s", *tiny).exit_code == 0
    elsewhere = kept.rename(kept.parent.parent / "elsewhere.kvcal")
    refused = invoke("generate", "--session", "s", *CALM, *tiny)
    assert refused.exit_code == 2
    assert "--calibration" in refused.stderr.splitlines()[-1]
    asked = ("generate", "--session", "s", *CALM, "--calibration", elsewhere)
    assert invoke(*asked, *tiny).exit_code == 0


def test_a_damaged_calibration_is_an_error_before_generation(invoke, tiny, kept: Path) -> None:
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    refused = invoke(*WRITE, *tiny)
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert "is corrupt" in refused.stderr.splitlines()[-1]


def test_pull_makes_a_missing_basis_beside_a_calibration(
    invoke, tiny_folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haystack, "manual_text", lambda: TEXT)
    pull = ("pull", tiny_folder, "--calibrate")
    assert "no basis for the codecs small and smaller" in invoke(*pull).stderr
    (calibration,) = (home / "calibrations").iterdir()
    made = calibration.stat().st_mtime_ns
    monkeypatch.setattr(basis, "PASSAGE_TOKENS", 128)
    monkeypatch.setattr(basis, "FOLLOWING_TOKENS", 32)
    again = invoke(*pull)
    assert again.exit_code == 0, again.stderr
    (file,) = (home / "bases").iterdir()
    assert "keeps its existing calibration" in again.stderr
    assert f"{file}: basis of the codecs" in again.stderr
    assert calibration.stat().st_mtime_ns == made
    assert "basis" not in invoke(*pull).stderr


def test_pull_calibrates_once(
    invoke, tiny_folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haystack, "manual_text", lambda: TEXT)
    first = invoke("pull", tiny_folder, "--calibrate")
    assert first.exit_code == 0, first.stderr
    (file,) = (home / "calibrations").iterdir()
    assert str(file) in first.stderr
    made = file.stat().st_mtime_ns
    again = invoke("pull", tiny_folder, "--calibrate")
    assert "existing calibration" in again.stderr
    assert file.stat().st_mtime_ns == made
    assert invoke("pull", tiny_folder, "-q").stderr == ""
