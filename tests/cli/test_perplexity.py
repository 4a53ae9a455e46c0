"""`kvkeep perplexity` prints, reports and plots what the library measures."""

import json
from pathlib import Path

import pytest

from kvkeep import load_model
from kvkeep.evaluate.perplexity import perplexity_points

TEXT = "The sea is wide and the night is long; nobody knows how long. " * 12


def test_the_measurement_is_printed_reported_and_plotted(
    invoke, tiny, tiny_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    model = load_model(str(tiny_folder), dtype="float32")
    ids = model.text.encode(TEXT)
    session = model.session(max_kv_size=32, prefill_step=50)
    expected = list(perplexity_points(session, ids[:120], first=40))[-1].perplexity
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    result = invoke(
        *("perplexity", "-", "--from", 40, "--to", 120, "--max-kv-size", 32),
        *("--prefill-step", 50, "--report", report, "--plot", plot, *tiny),
        input=TEXT,
    )
    assert result.exit_code == 0
    assert result.stdout == f"perplexity {expected:.4f} of 80 tokens\n"
    figures = json.loads(report.read_text())
    assert figures["perplexity"] == pytest.approx(expected)
    assert (figures["prompt_tokens"], figures["generated_tokens"]) == (120, 0)
    assert figures["decode_tokens_per_s"] is None
    expected_settings = {"from": 40, "to": 120, "token_by_token": False, "prefill_step": 50}
    assert {name: figures[name] for name in expected_settings} == expected_settings
    assert figures["scored_tokens"] == 80
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", 9, "--to", 9], "--from must be below --to"),
        (["--from", 0], "expected 1 or more"),
        (["--to", 99999], "--to must be at most"),
        (["--from", 99999], "found 99999"),
        (["--policy", "full", "--max-kv-size", 8], "holds at most 8 tokens"),
        (["--plot", "plot.gif"], "must end in one of .png"),
        (["--plot", "/no/such/folder/plot.png"], "cannot be written"),
    ],
)
def test_an_invalid_range_or_output_file_is_refused(invoke, tiny, arguments, said) -> None:
    result = invoke("perplexity", "-", *arguments, *tiny, input=TEXT)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr


def test_a_text_can_be_scored_token_by_token(invoke, tiny, tiny_folder: Path) -> None:
    model = load_model(str(tiny_folder), dtype="float32")
    ids = model.text.encode(TEXT)[:60]
    session = model.session(max_kv_size=32)
    expected = list(perplexity_points(session, ids, token_by_token=True))[-1].perplexity
    given = ("perplexity", "-", "--to", 60, "--max-kv-size", 32, "--written", *tiny)
    result = invoke(*given, input=TEXT)
    assert result.stdout == f"perplexity {expected:.4f} of 59 tokens\n"


def test_a_plot_of_one_point_hints_at_a_smaller_step(invoke, tiny, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "short.txt").write_text("The sea is wide and the night is long.")
    asked = ("perplexity", tmp_path / "short.txt", "--plot", tmp_path / "plot.png", *tiny)
    assert "--prefill-step" in invoke(*asked).stderr
    assert "one point" not in invoke(*asked, "--prefill-step", 8).stderr
