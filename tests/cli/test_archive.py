"""`--policy archive` from the command line: tokens older than the window are compressed."""

import json
from pathlib import Path

import pytest
import torch
from cli.durable import refused, saved

from kvkeep import load_model
from kvkeep.evaluate.perplexity import perplexity_points

TEXT = "The sea is wide and the night is long; nobody knows how long. " * 12
ARCHIVE = ["--policy", "archive", "--max-kv-size", "48", "--method", "keydiff", "--ratio", "4"]
QUIET = ["--no-progress", "--ignore-eos", "--temperature", "0"]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_generation_continues_within_the_budget(invoke, tiny, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    asked = ("generate", "-p", TEXT, "-n", 60, *QUIET, *ARCHIVE, "--report", report, *tiny)
    first = invoke(*asked)
    assert first.exit_code == 0, first.stderr
    assert invoke(*asked).stdout == first.stdout
    figures = json.loads(report.read_text())
    assert (figures["policy"], figures["max_kv_size"]) == ("archive", 48)
    assert 40 <= figures["kv_cells"] <= 48


def test_perplexity_equals_the_librarys(invoke, tiny, tiny_folder: Path) -> None:
    model = load_model(str(tiny_folder), dtype="float32")
    session = model.session(48, 4, "archive", method="keydiff", ratio=4.0)
    expected = list(perplexity_points(session, model.text.encode(TEXT)[:150]))[-1].perplexity
    result = invoke("perplexity", "-", "--to", 150, *ARCHIVE, *tiny, input=TEXT)
    assert result.stdout == f"perplexity {expected:.4f} of 149 tokens\n"


@pytest.mark.parametrize("method", ["keydiff", "fitted", "snapkv"])
def test_two_runs_equal_one_long_run(invoke, tiny, home: Path, method: str) -> None:
    asked = ("generate", *QUIET, *ARCHIVE[:4], "--method", method, "--ratio", 4, *tiny)
    first = invoke(*asked, "--session", "s", "-p", TEXT, "-n", 17)
    second = invoke(*asked, "--session", "s", "-n", 23)
    whole = invoke(*asked, "--session", "whole", "-p", TEXT, "-n", 40)
    assert first.stdout[:-1] + second.stdout[:-1] == whole.stdout[:-1]
    one, other = saved(home, "s"), saved(home, "whole")
    assert one.tokens.tolist() == other.tokens.tolist()
    assert torch.equal(one.logits, other.logits)


def test_a_saved_session_keeps_its_compression_settings(invoke, tiny, home: Path) -> None:
    asked = ("generate", "--session", "s", "-n", 2, *QUIET)
    assert invoke(*asked, "-p", TEXT, *ARCHIVE, *tiny).exit_code == 0
    assert invoke(*asked, *ARCHIVE).exit_code == 0
    assert invoke(*asked).exit_code == 0
    before = saved(home, "s").tokens.tolist()
    for option, value, present in (
        *(("--method", "knorm", "keydiff"), ("--ratio", 2, "4.0"), ("--window", 20, "33")),
        *(("--policy", "sliding", "archive"), ("--max-kv-size", 64, "48")),
    ):
        refused(invoke(*asked, option, value), f"{option} is", f"saved with {present}")
    agreeing = ("--max-kv-size", 48, "--method", "keydiff", "--ratio", 4)
    assert invoke(*asked, *agreeing, "-n", 0).exit_code == 0
    assert saved(home, "s").tokens.tolist() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "archive", "--ratio", 1], "expected a number above 1, found 1"),
        (["--policy", "archive", "--ratio", "nan"], "expected 1 or more, found nan"),
        (["--policy", "archive", "--method", "best"], "'best' is not one of 'fitted'"),
        (["--policy", "archive", "--window", 48], "raise max_kv_size"),
        (["--policy", "sliding", "--method", "knorm"], "no setting 'method'"),
        (["--policy", "shift", "--ratio", 2], "no setting 'ratio'"),
        (["--policy", "archive", "--discard", 2], "no setting 'discard'"),
    ],
)
def test_conflicting_options_are_refused_before_the_model_loads(invoke, arguments, said) -> None:
    asked = ("generate", "-p", "x", "--max-kv-size", 48, "-m", "no-such-model")
    refused(invoke(*asked, *arguments), said)
