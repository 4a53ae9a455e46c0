"""`kvkeep grid` saves each sample, resumes, and shows its measurements."""

import json
from pathlib import Path

import pytest

from kvkeep.cli.compression import BEST_METHOD, METHOD_NAMES
from kvkeep.cli.evaluate.grid_options import GRID_TASKS
from kvkeep.compression.methods import BEST_UNCALIBRATED, METHODS

SMALL = ("--junk", 16, "--tokens", 600, "--methods", "random,keydiff", "--ratios", "2,4")
PAGE = "Before\n<!-- grid -->\n<!-- /grid -->\n"


def test_names_listed_for_help_are_those_that_exist() -> None:
    assert sorted(METHOD_NAMES) == sorted(METHODS)
    assert BEST_METHOD == BEST_UNCALIBRATED


def test_every_task_is_measured_shown_and_drawn(invoke, tiny, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plot, page = tmp_path / "grid.json", tmp_path / "grid.png", tmp_path / "page.md"
    page.write_text(PAGE)
    measured = invoke("grid", *SMALL, "--ratios", 2, "--samples", 1, "--out", out, *tiny)
    assert measured.exit_code == 0, measured.stderr
    rows = json.loads(out.read_text())["readings"]
    assert len(rows) == len(GRID_TASKS) * (1 + 2)
    for task in GRID_TASKS:
        assert f"| {task} | 2×, " in measured.stdout
    shown = invoke("grid", "--from", out, "--plot", plot, "--into", page)
    assert shown.exit_code == 0
    assert shown.stdout == ""
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert measured.stdout.strip() in page.read_text()


def test_a_method_is_measured_under_both_budgets(invoke, tiny, tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    ways = "keydiff,keydiff:heads,kvzip:uniform"
    asked = ("--methods", ways, "--tasks", "several", "--junk", 16, "--ratios", 4, "--samples", 1)
    measured = invoke("grid", *asked, "--out", out, *tiny)
    assert measured.exit_code == 0, measured.stderr
    rows = json.loads(out.read_text())["readings"]
    assert [row["method"] for row in rows] == ["uncompressed", *ways.split(",")]
    assert len({row["log_probability"] for row in rows}) == 4


def test_a_method_that_needs_a_calibration_is_refused_without(invoke, tiny, tmp_path) -> None:
    out = tmp_path / "grid.json"
    refused = invoke("grid", "--methods", "keydiff,kvzap:uniform", "--out", out, *tiny)
    assert refused.exit_code == 2
    assert "add --calibration" in refused.stderr
    assert not out.exists()


def test_a_grid_resumes(invoke, tiny, tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    asked = ("grid", *SMALL, "--tasks", "several", *tiny)
    assert invoke(*asked, "--samples", 1, "--out", out).exit_code == 0
    first = json.loads(out.read_text())
    first["readings"] = first["readings"][:3]  # as a crash in the middle of a sample leaves it
    first["readings"][0]["cells"] = 12345
    out.write_text(json.dumps(first))
    refused = invoke(*asked, "--samples", 2, "--out", out)
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    assert invoke(*asked, "--samples", 2, "--out", out, "--resume").exit_code == 0
    rows = json.loads(out.read_text())["readings"]
    assert rows[:3] == first["readings"]
    assert len(rows) == 2 * (1 + 2 * 2)
    whole = tmp_path / "whole.json"
    assert invoke(*asked, "--samples", 2, "--out", whole, "--resume").exit_code == 0
    at_once = json.loads(whole.read_text())["readings"]
    assert sorted(rows[1:], key=str) == sorted(at_once[1:], key=str)
    other = invoke(*asked, "--samples", 2, "--out", out, "--resume", "--junk", 17)
    assert other.exit_code == 2
    assert "junk is 16 in one and 17 in the other" in other.stderr


def test_a_grid_has_one_haystack_and_records_it(invoke, tiny, tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    asked = ("grid", *SMALL, "--tasks", "needle-variables", "--samples", 1, "--out", out, *tiny)
    assert invoke(*asked, "--haystack", "docstrings").exit_code == 0
    assert json.loads(out.read_text())["about"]["haystack"] == "docstrings"
    other = invoke(*asked, "--haystack", "manual", "--resume")
    assert other.exit_code == 2
    assert "haystack is 'docstrings' in one and 'manual' in the other" in other.stderr


@pytest.mark.parametrize(
    ("name", "earlier"),
    [
        ("calibration_digest", "0" * 64),
        ("prefill_step", 64),
        ("kvkeep", "0.1.0"),
        ("device", "cuda"),
        ("fingerprint", "0" * 64),
    ],
)
def test_a_grid_of_another_calibration_step_release_device_or_model_is_not_continued(
    invoke, tiny, tmp_path: Path, name: str, earlier: object
) -> None:
    out, calibration = tmp_path / "grid.json", tmp_path / "my.kvcal"
    text = "The sea is wide and the night is long; nobody knows how long. " * 110
    made = invoke("calibrate", "-", "-o", calibration, "-q", *tiny, input=text)
    assert made.exit_code == 0, made.stderr
    asked = ("grid", *SMALL, "--tasks", "several", "--samples", 1, "--calibration", calibration)
    assert invoke(*asked, "--out", out, *tiny).exit_code == 0
    content = json.loads(out.read_text())
    assert content["about"][name]
    content["about"][name] = earlier
    out.write_text(json.dumps(content))
    refused = invoke(*asked, "--out", out, "--resume", *tiny)
    assert refused.exit_code == 2
    assert f"{name} is {earlier!r} in one" in refused.stderr


def test_older_files_without_later_fields_are_continued(invoke, tiny, tmp_path: Path) -> None:
    """Older files do not say which text, and it was the manual."""
    out = tmp_path / "grid.json"
    asked = ("grid", *SMALL, "--tasks", "needle", "--out", out, *tiny)
    assert invoke(*asked, "--samples", 1).exit_code == 0
    earlier = json.loads(out.read_text())
    for name in ("haystack", "kv_bits", "device", "fingerprint"):
        del earlier["about"][name]
    out.write_text(json.dumps(earlier))
    assert invoke(*asked, "--samples", 1, "--resume").exit_code == 0
    assert json.loads(out.read_text())["readings"] == earlier["readings"]


def test_quantised_cells_are_compressed(invoke, tiny, tmp_path: Path) -> None:
    asked = ("grid", *SMALL, "--tasks", "needle", "--samples", 1, *tiny)
    taken = {}
    for name, bits in (("plain", ()), ("fewer", ("--kv-bits", "8"))):
        out = tmp_path / f"{name}.json"
        assert invoke(*asked, *bits, "--out", out).exit_code == 0
        taken[name] = [each["nbytes"] for each in json.loads(out.read_text())["readings"]]
    for plain, fewer in zip(taken["plain"], taken["fewer"], strict=True):
        assert fewer < 0.6 * plain
    other = invoke(*asked, "--kv-bits", "4", "--out", tmp_path / "fewer.json", "--resume")
    assert "kv_bits is '8' in one and '4' in the other" in other.stderr


def test_resume_takes_over_the_earlier_options(invoke, tiny, tmp_path: Path) -> None:
    """Options given again override the earlier ones, here the number of samples."""
    out, whole = tmp_path / "grid.json", tmp_path / "whole.json"
    asked = ("grid", *SMALL, "--tasks", "several,needle", "--seed", 3, "--kv-bits", "8", *tiny)
    assert invoke(*asked, "--samples", 2, "--out", whole).exit_code == 0
    assert invoke(*asked, "--samples", 1, "--out", out).exit_code == 0
    assert invoke("grid", "--samples", 2, "--out", out, "--resume").exit_code == 0
    rows, expected = (json.loads(path.read_text())["readings"] for path in (out, whole))
    assert sorted(rows, key=str) == sorted(expected, key=str)
    again = invoke("grid", "--out", out, "--resume")  # nothing is left
    assert again.exit_code == 0
    assert json.loads(out.read_text())["readings"] == rows


def test_an_interrupt_keeps_finished_measurements(invoke, tiny, tmp_path: Path, ctrl_c_at) -> None:
    out = tmp_path / "grid.json"
    asked = ("grid", *SMALL, "--tasks", "second", "--samples", 5000, "--out", out, *tiny)
    ctrl_c_at(100)
    interrupted = invoke(*asked)
    assert interrupted.exit_code == 130
    assert json.loads(out.read_text())["readings"]
    assert "| second | " in interrupted.stdout


def test_files_of_several_runs_are_merged(invoke, tiny, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    asked = ("grid", *SMALL, "--tasks", "second", "--samples", 1, *tiny)
    assert invoke(*asked, "--out", one).exit_code == 0
    assert invoke(*asked, "--out", other, "--seed", 1).exit_code == 0
    shown = invoke("grid", "--from", one, "--from", other)
    assert shown.exit_code == 0
    assert "Samples: 2." in shown.stdout
    again = invoke("grid", "--from", one, "--from", one)
    assert "Samples: 1." in again.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "random,magic"], "found 'magic'"),
        (["--tasks", "chess"], "found 'chess'"),
        (["--ratios", "2,zero"], "expected a number, found 'zero'"),
        (["--ratios", "0.5"], "expected 1 or more"),
        (["--samples", 0], "expected 1 or more"),
        (["--junk", 3], "found 3 repetitions"),
        (["--resume"], "--resume continues the file of --out"),
        (["--out", "/no/such/folder/grid.json"], "cannot be written"),
        (["--plot", "plot.gif"], "must end in one of .png"),
        (["--into", Path(__file__).with_name("conftest.py")], "must have the lines <!-- grid -->"),
        (["--from", __file__, "--out", "x.json"], "--from measures nothing"),
        (["--from", __file__], "--from shows all results of its files: leave out --model"),
    ],
)
def test_bad_input_is_refused_before_the_model_loads(invoke, arguments, said) -> None:
    result = invoke("grid", *arguments, "-m", "no-such-model")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "was not written by `kvkeep grid --out`"),
        (["--prefill-step", 7], "leave out --prefill-step"),
        (["--dtype", "float32"], "leave out --dtype"),
        (["--weights", "int4"], "leave out --weights"),
        (["--calibration", __file__], "leave out --calibration"),
        (["--samples", 3], "leave out --samples"),
    ],
)
def test_earlier_results_are_shown_without_options_of_a_measurement(
    invoke, arguments, said
) -> None:
    result = invoke("grid", "--from", __file__, *arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr


def test_an_impossible_setting_is_left_out(invoke, tiny, tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    asked = ("grid", "--tasks", "several", "--junk", 8, "--methods", "random", "--samples", 2)
    measured = invoke(*asked, "--ratios", "1.5,16", "--out", out, *tiny)
    assert measured.exit_code == 0, measured.stderr
    rows = json.loads(out.read_text())["readings"]
    assert [(row["sample"], row["ratio"]) for row in rows] == [(0, 1), (0, 1.5), (1, 1), (1, 1.5)]
    assert measured.stderr.count("several, random at ratio 16: left out where") == 1
    assert "| several | 1.5×, " in measured.stdout
    resumed = invoke("grid", "--out", out, "--resume", "--ratios", "1.5,2")
    assert resumed.exit_code == 0, resumed.stderr
    assert {row["ratio"] for row in json.loads(out.read_text())["readings"]} == {1, 1.5, 2}
