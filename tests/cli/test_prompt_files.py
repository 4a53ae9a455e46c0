"""Evaluated prompts in files and in the prefix cache."""

import json
from pathlib import Path

import pytest
from cli.durable import GREEDY, TEXT, refused


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_restored_prompt_equals_an_evaluated_one(invoke, tiny, tmp_path: Path) -> None:
    file, report = tmp_path / "prompt.kvkeep", tmp_path / "report.json"
    cached = invoke("generate", "-p", "One two three", "--cache-prompt", file, *tiny)
    assert cached.stdout == ""
    assert f"{file} saved" in cached.stderr
    whole = invoke("generate", "-p", "One two three four five", "-n", 20, *GREEDY, *tiny).stdout
    asked = ["generate", "--restore-prompt", file, "-n", 20, *GREEDY, "--report", report]
    assert invoke(*asked, "-p", " four five").stdout == whole
    figures = json.loads(report.read_text())
    assert (figures["prompt_tokens"], figures["reused_tokens"]) == (2, 3)
    before = file.read_bytes()
    assert invoke(*asked, input=" four five").stdout == whole
    assert invoke(*asked).stdout not in ("", whole)
    assert json.loads(report.read_text())["prompt_tokens"] == 0
    assert file.read_bytes() == before


def test_a_codec_without_a_basis_is_refused_before_the_prompt_is_evaluated(
    invoke, tiny, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.kvkeep"
    options = [*tiny, "--prompt", "Hello there.", "--cache-prompt", file, "--codec", "small"]
    result = invoke("generate", *options)
    assert result.exit_code == 2
    assert "need a basis of this model" in result.stderr
    assert "tok/s" not in result.stderr
    assert not file.exists()


def test_codecs_trade_size_for_exactness(invoke, tiny, tmp_path: Path) -> None:
    sizes, texts, report = {}, {}, tmp_path / "report.json"
    for codec in ("exact", "none", "zstd", "int8"):
        file = tmp_path / codec
        options = ["--codec", codec, "--report", report]
        invoke("generate", "-p", TEXT * 40, "--cache-prompt", file, *options, *tiny)
        sizes[codec] = json.loads(report.read_text())["saved_bytes"]
        assert sizes[codec] == file.stat().st_size
        texts[codec] = invoke("generate", "--restore-prompt", file, "-n", 20, *GREEDY).stdout
    assert sizes["none"] > sizes["zstd"] > sizes["int8"]
    assert texts["none"] == texts["zstd"] == texts["exact"]


def test_a_file_that_is_not_a_snapshot_is_not_overwritten(invoke, tiny, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT)
    refused(invoke("generate", "-f", file, "--cache-prompt", file, *tiny), "is not a snapshot")
    assert file.read_text() == TEXT


def test_the_prefix_cache_is_used_and_the_first_difference_reported(
    invoke, tiny, tmp_path: Path
) -> None:
    report, words = tmp_path / "report.json", [f"word{n}" for n in range(300)]
    asked = ["generate", "-n", 8, "--prefix-cache", "--report", report, *GREEDY, *tiny]

    def run(text: str) -> tuple[str, str, dict]:
        result = invoke(*asked, "-p", text)
        return result.stdout, result.stderr, json.loads(report.read_text())

    text = " ".join(words)
    first, _, figures = run(text)
    total = figures["prompt_tokens"]
    assert (figures["reused_tokens"], figures["prefix_differs_at"]) == (0, 0)
    again, said, figures = run(text)
    stored = total // 256 * 256
    assert again == first
    assert (figures["reused_tokens"], figures["prompt_tokens"]) == (stored, total - stored)
    assert figures["prefix_differs_at"] is None
    assert f"reused {stored} tokens |" in said
    words[200] = "another"
    _, said, figures = run(" ".join(words))
    differs = figures["prefix_differs_at"]
    assert 256 <= figures["reused_tokens"] <= differs < total
    assert f"reused {figures['reused_tokens']} tokens, first differs at token {differs}" in said
    words[200] = "third"
    why = invoke("why", "-p", " ".join(words), *tiny)
    assert f"at token {differs:,}:" in why.stdout
    assert "word199>>> third word201" in " ".join(why.stdout.split("\n")).replace(" >>>", ">>> ")
    found = json.loads(invoke("why", "-p", " ".join(words), "--json", *tiny).stdout)
    assert found["differs_at"] == differs
    assert found["stored_tokens"] == figures["reused_tokens"]
    assert "begins with its first token" in invoke("why", "-p", "!" * 4000, *tiny).stdout
    assert "less than a block" in invoke("why", "-p", "Hello", *tiny).stdout


def test_a_failing_prefix_cache_is_one_warning_and_costs_no_answer(
    invoke, tiny, tmp_path: Path, monkeypatch
) -> None:
    text = " ".join(f"word{n}" for n in range(300))
    asked = ["generate", "-n", 8, "-p", text, *GREEDY, *tiny]
    plain = invoke(*asked)
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    (tmp_path / "prefixes").write_text("in the way")
    unusable = invoke(*asked, "--prefix-cache")
    (tmp_path / "prefixes").unlink()
    (tmp_path / "prefixes" / "lock").mkdir(parents=True)
    unwritable = invoke(*asked, "--prefix-cache")
    for result in (unusable, unwritable):
        assert (result.exit_code, result.stdout) == (0, plain.stdout)
        assert result.stderr.count("continuing without the prefix cache") == 1
