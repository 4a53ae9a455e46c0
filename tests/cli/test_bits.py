"""`--kv-bits` and `--far-bits`: quantised cells from the command line."""

import json
from pathlib import Path

import pytest


@pytest.mark.parametrize(("bits", "size"), [("8", 18), ("8/4", 15), ("4", 12)])
def test_cells_take_the_requested_bits(invoke, tiny, tmp_path: Path, bits: str, size: int) -> None:
    file = tmp_path / "report.json"
    asked = ("generate", "-p", "one two three four five", "-n", 20, "--max-kv-size", 12)
    result = invoke(*asked, "--kv-bits", bits, "--ignore-eos", "--report", file, *tiny)
    assert result.exit_code == 0
    report = json.loads(file.read_text())
    assert (report["kv_bits"], report["far_bits"]) == (bits, None)
    assert report["kv_bytes"] == 12 * 2 * 2 * 2 * size  # cells, k and v, layers, heads


def test_the_prefix_cache_is_not_used(invoke, tiny) -> None:
    asked = ("generate", "-p", "one two three", "-n", 2, "--prefix-cache", *tiny)
    assert "without the prefix cache" in invoke(*asked, "--far-bits", "4").stderr
    assert "without the prefix cache" not in invoke(*asked).stderr


def test_a_saved_session_keeps_its_bits(invoke, tiny, tmp_path: Path) -> None:
    file, report = tmp_path / "a.kvkeep", tmp_path / "report.json"
    asked = ("generate", "-p", "one two three", "-n", 3, "--ignore-eos", *tiny)
    first = invoke(*asked, "--far-bits", "4", "--cache-prompt", file)
    assert first.exit_code == 0
    again = (*asked, "--restore-prompt", file)
    assert invoke(*again, "--report", report).exit_code == 0
    assert json.loads(report.read_text())["far_bits"] == "4"
    other = invoke(*again, "--kv-bits", "8")
    assert other.exit_code == 2
    assert "--kv-bits is 8, but" in other.stderr
    assert "in 4 bits, except in the window" in invoke("sessions", "show", file).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kv-bits", "5"), "'5' is not one of '8', '8/4', '4'"),
        (("--kv-bits", "8", "--far-bits", "4"), "use only one of them"),
        (("--policy", "full", "--far-bits", "4"), "use kv_bits"),
    ],
)
def test_bits_that_do_not_apply_are_refused(
    invoke, tiny, options: tuple[str, ...], message: str
) -> None:
    result = invoke("generate", "-p", "one", *options, *tiny)
    assert result.exit_code == 2
    assert message in result.stderr
