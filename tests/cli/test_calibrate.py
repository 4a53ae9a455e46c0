"""`kvkeep calibrate` writes a usable calibration file, or none."""

from pathlib import Path

import pytest
from cli.durable import refused
from full_disk import small_files_only

from kvkeep import load_model
from kvkeep.compression.calibration.calibration import load_calibration
from kvkeep.evaluate import basis, haystack

TEXT = "The sea is wide and the night is long; nobody knows how long. " * 110  # 1,761 tokens
CALIBRATION_STEPS, BASIS_STEPS = 13, 37  # of the model, with that text and short passages


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(invoke, tiny, tmp_path: Path) -> Path:
    path = tmp_path / "a.kvcal"
    assert invoke("calibrate", "-", "-o", path, "-q", *tiny, input=TEXT).exit_code == 0
    return path


def test_the_library_can_read_the_file(invoke, tiny, tiny_folder, tmp_path: Path) -> None:
    text, output = tmp_path / "text", tmp_path / "a.kvcal"
    text.write_text(TEXT)
    result = invoke("calibrate", text, "-o", output, *tiny)
    assert result.exit_code == 0
    assert result.stdout == ""
    model = load_model(str(tiny_folder), dtype="float32")
    tokens = len(model.text.encode(TEXT))
    found = load_calibration(output, model)
    assert result.stderr == (
        f"{output}: 0.0 MB, from {tokens} tokens; R² of the surrogate on held-out text: "
        f"{found.r_squared:.2f}\n"
        "no basis for the codecs small and smaller: a basis needs 8960 tokens or more; found "
        f"{tokens}\n"
    )
    assert found.tokens == tokens
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kvcal", "text"]
    first = output.read_bytes()
    assert invoke("calibrate", text, "-o", output, "-q", *tiny).stderr == ""
    assert output.read_bytes() == first


@pytest.mark.parametrize(
    ("output", "text", "said"),
    [
        ("a", "", "- is empty"),
        ("no-such-folder/a", "x", "cannot be written"),
        ("/dev/null", "x", "device or a pipe"),
        (".", "x", "is a folder"),
        ("text", "x", "exists and is not a calibration"),
    ],
)
def test_cheap_checks_run_before_the_model_loads(
    invoke, tmp_path: Path, monkeypatch, output: str, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text(TEXT)
    asked = ("calibrate", "-", "-o", output, "-m", "no-such-model")
    refused(invoke(*asked, input=text), said)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    assert Path("text").read_text() == TEXT


def test_too_little_text_leaves_the_file_unchanged(invoke, tiny, file: Path) -> None:
    before = file.read_bytes()
    refused(invoke("calibrate", "-", "-o", file, *tiny, input="Too short."), "1536 tokens")
    assert file.read_bytes() == before


def test_ctrl_c_leaves_no_file(invoke, tiny, ctrl_c_at, tmp_path: Path) -> None:
    ctrl_c_at(2)
    result = invoke("calibrate", "-", "-o", tmp_path / "a.kvcal", *tiny, input=TEXT)
    assert result.exit_code == 130
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_one_line_error_and_loses_no_existing_file(
    invoke, tiny, file: Path
) -> None:
    before = file.read_bytes()
    with small_files_only():
        failed = invoke("calibrate", "-", "-o", file, *tiny, input=TEXT * 2)
    refused(failed, f"{file}.unfinished could not be written (File too large)")
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_after_ctrl_c_the_same_command_resumes(
    invoke, tiny, file: Path, ctrl_c_at, tmp_path: Path
) -> None:
    output, finished = tmp_path / "b.kvcal", file.read_bytes()
    ctrl_c_at(7)  # the text was measured in four steps, and is being repeated
    asked = ("calibrate", "-", "-o", output, "-q", *tiny)
    assert invoke(*asked, input=TEXT).exit_code == 130
    assert not output.exists()
    assert (tmp_path / "b.kvcal.unfinished").exists()
    assert invoke(*asked, input=TEXT).exit_code == 0
    assert output.read_bytes() == finished
    assert not (tmp_path / "b.kvcal.unfinished").exists()


@pytest.mark.parametrize("command", ["calibrate", "pull"])
def test_after_ctrl_c_in_the_basis_only_that_is_measured_again(
    invoke, tiny_folder: Path, ctrl_c_at, home: Path, monkeypatch, command: str
) -> None:
    monkeypatch.setattr(basis, "PASSAGE_TOKENS", 128)
    monkeypatch.setattr(basis, "FOLLOWING_TOKENS", 32)
    monkeypatch.setattr(haystack, "manual_text", lambda: TEXT)
    commands = {
        "calibrate": ("calibrate", "-", "-m", tiny_folder),
        "pull": ("pull", tiny_folder, "--calibrate"),
    }
    asked = commands[command]
    ctrl_c_at(CALIBRATION_STEPS + 2)
    assert invoke(*asked, input=TEXT).exit_code == 130
    (calibration,) = (home / "calibrations").glob("*.kvcal")
    finished = calibration.read_bytes()
    assert not (home / "bases").exists()
    ctrl_c_at(BASIS_STEPS + 1)
    resumed = invoke(*asked, input=TEXT)
    assert resumed.exit_code == 0, resumed.stderr
    assert "basis of the codecs" in resumed.stderr.splitlines()[-1]
    assert calibration.read_bytes() == finished
    assert list((home / "calibrations").iterdir()) == [calibration]
    assert len(list((home / "bases").iterdir())) == 1


def test_a_basis_is_made_alone(invoke, tiny, home: Path, monkeypatch, tmp_path: Path) -> None:
    basis_only = ("calibrate", "-", "--basis-only", *tiny)
    refused(invoke(*basis_only, input=TEXT), "a basis needs 8960 tokens or more")
    refused(invoke(*basis_only, "-o", tmp_path / "a.kvcal", input=TEXT), "leave --output out")
    monkeypatch.setattr(basis, "PASSAGE_TOKENS", 128)
    monkeypatch.setattr(basis, "FOLLOWING_TOKENS", 32)
    result = invoke(*basis_only, input=TEXT)
    assert result.exit_code == 0, result.stderr
    (file,) = (home / "bases").iterdir()
    assert result.stderr == f"{file}: basis of the codecs small and smaller\n"
    assert not (home / "calibrations").exists()


def test_a_session_continues_with_its_original_calibration(
    invoke, tiny, file: Path, home: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.kvcal"
    invoke("calibrate", "-", "-o", other, "-q", *tiny, input=TEXT[::-1])
    asked = ("generate", "--session", "s", "-n", 4, "--ignore-eos", "--temperature", 0)
    archive = ("--policy", "archive", "--max-kv-size", 48)
    begun = invoke(*asked, *archive, "--calibration", file, "-p", TEXT[:600], *tiny)
    assert begun.exit_code == 0, begun.stderr
    saved = home / "sessions" / "s.kvkeep"
    before = saved.read_bytes()
    refused(invoke(*asked, "-m", "no-such-model"), str(saved), "as --calibration")
    refused(invoke(*asked, "--calibration", other), "created with")
    fork = ("sessions", "fork", "s", "s2", "--at", 130)
    refused(invoke(*fork), "as --calibration")
    assert saved.read_bytes() == before
    assert invoke(*fork, "--calibration", file).exit_code == 0
    assert invoke(*asked, "--calibration", file).exit_code == 0


def test_a_superfluous_calibration_is_refused(invoke, tiny, file: Path, home: Path) -> None:
    asked = ("generate", "-p", "One two", "-n", 0, "--calibration", file)
    refused(invoke(*asked, *tiny), 'policy "sliding" does not use a calibration')
    refused(invoke(*asked, "--policy", "full", "-m", "no-such-model"), 'policy "full" does not use')
    invoke("generate", "-p", "One two", "-n", 0, "--session", "s", *tiny)
    refused(invoke(*asked, "--session", "s"), "created without a calibration")


def test_a_file_that_is_not_a_calibration_is_named(invoke, tiny, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text(TEXT)
    asked = ("perplexity", file, "--policy", "archive", "--calibration")
    refused(invoke(*asked, file, *tiny), "is not a kvkeep calibration", str(file))
    refused(invoke(*asked, tmp_path / "none", *tiny), "none", "does not exist")
