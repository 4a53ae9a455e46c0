"""`kvkeep generate`: the same text as from a library session, and a report."""

import json
from pathlib import Path

import pytest

from kvkeep import Sampling, load_model
from kvkeep.session.streaming import TextStream

GREEDY = ["--temperature", "0", "--repetition-penalty", "1"]


def test_output_equals_the_librarys(invoke, tiny, tiny_folder) -> None:
    model = load_model(str(tiny_folder), dtype="float32")
    session = model.session(max_kv_size=16)
    session.feed("Once upon a time there was")
    expected = "".join(session.stream(40, Sampling(), ignore_eos=True))
    result = invoke(
        *("generate", "-p", "Once upon a time there was", "-n", 40, "--max-kv-size", 16),
        *("--ignore-eos", *GREEDY, *tiny),
    )
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == expected.rstrip("\n")
    assert result.stdout.endswith("\n")


def test_the_report_has_the_closing_numbers(invoke, tiny, tiny_folder, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = invoke(
        *("generate", "-p", "one two three four five six", "-n", 20, "--max-kv-size", 12),
        *("--ignore-eos", "--report", file, *tiny),
    )
    report = json.loads(file.read_text())
    assert list(report) == [
        *("command", "model", "policy", "max_kv_size", "keep", "settings"),
        *("kv_bits", "far_bits", "seed"),
        *("prompt_tokens", "prefill_tokens_per_s", "generated_tokens", "decode_tokens_per_s"),
        *("accepted_tokens", "drafted_tokens"),
        *("peak_rss_bytes", "kv_cells", "kv_bytes", "reused_tokens"),
        *(
            "prefix_differs_at",
            "prefix_unusable_tokens",
            "saved_bytes",
            "perplexity",
            "finish_reason",
        ),
    ]
    assert report["command"] == "generate"
    assert report["model"] == str(tiny_folder)
    assert (report["prompt_tokens"], report["generated_tokens"]) == (6, 20)
    assert (report["kv_cells"], report["max_kv_size"], report["keep"]) == (12, 12, 4)
    assert report["kv_bytes"] == 12 * 2 * 2 * 2 * 16 * 4  # cells, k and v, layers, heads, dim, fp32
    assert report["prefill_tokens_per_s"] > 0
    assert report["decode_tokens_per_s"] > 0
    assert report["peak_rss_bytes"] > 50e6
    assert report["perplexity"] is None
    assert report["finish_reason"] == "length"
    assert "prompt 6 at" in result.stderr
    assert "generated 20 at" in result.stderr
    assert "cells 12 of 12" in result.stderr


def test_special_tokens_need_the_special_option(invoke, tiny, tmp_path: Path) -> None:
    file, prompt = tmp_path / "report.json", "<|im_start|>user\nYes<|im_end|>\n"
    counts = []
    for special in ([], ["--special"]):
        asked = ["-n", 0, "--report", file, *special, *tiny]
        assert invoke("generate", *asked, input=prompt).exit_code == 0
        counts.append(json.loads(file.read_text())["prompt_tokens"])
    assert counts == [18, 6]


def test_the_reported_seed_reproduces_the_text(invoke, tiny, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    asked = ["generate", "-p", "Tell me", "-n", 30, "--ignore-eos", "--temperature", 1.5, *tiny]
    first = invoke(*asked, "--report", file).stdout
    seed = json.loads(file.read_text())["seed"]
    assert invoke(*asked, "--seed", seed).stdout == first
    assert invoke(*asked, "--seed", seed + 1).stdout != first


def test_prompt_comes_from_file_then_argument_or_else_from_stdin(
    invoke, tiny, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Une été\n", encoding="utf-8")
    asked = ["generate", "-n", 12, *GREEDY, *tiny]
    whole = invoke(*asked, "-p", "Une été\nand a winter").stdout
    assert invoke(*asked, "-f", file, "-p", "and a winter").stdout == whole
    assert invoke(*asked, input="Une été\nand a winter").stdout == whole
    assert invoke(*asked, "-f", "-", input="Une été\nand a winter").stdout == whole
    assert invoke(*asked, "-f", file).stdout != whole


def test_keep_minus_one_keeps_the_prompt(invoke, tiny, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    invoke("generate", "-p", "a b c d e f g", "--keep", -1, "-n", 3, "--report", file, *tiny)
    assert json.loads(file.read_text())["keep"] == 7


def test_stop_ends_before_its_text(invoke, tiny, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    asked = ["generate", "-p", "Hello", "-n", 40, "--ignore-eos", *GREEDY, *tiny]
    whole = invoke(*asked).stdout
    stop = whole[10:14]
    stopped = invoke(*asked, "--stop", stop, "--report", file).stdout
    assert stopped.rstrip("\n") == whole[: whole.index(stop)].rstrip("\n")
    assert json.loads(file.read_text())["finish_reason"] == "stop"


def test_quiet_writes_nothing_but_the_text(invoke, tiny) -> None:
    result = invoke("generate", "-p", "Hello", "-n", 5, "-q", *GREEDY, *tiny)
    assert result.stdout
    assert result.stderr == ""


def test_a_full_memory_ends_with_text_and_report(invoke, tiny, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = invoke(
        *("generate", "-p", "one two", "-n", 40, "--policy", "full", "--max-kv-size", 10),
        *("--ignore-eos", "--report", file, *tiny),
    )
    assert result.exit_code == 2
    assert result.stdout.strip()
    assert 'policy "full" holds at most 10 tokens' in result.stderr.splitlines()[-1]
    report = json.loads(file.read_text())
    assert (report["generated_tokens"], report["finish_reason"]) == (8, "error")


@pytest.mark.parametrize("model", ["smollm2-135m-instruct"])
def test_the_default_model_knows_the_capital_of_france(invoke, smollm2_folder, model) -> None:
    result = invoke("generate", "-p", "The capital of France is", "-n", 4, *GREEDY)
    assert result.exit_code == 0
    assert result.stdout.startswith(" Paris")


def test_a_character_split_between_two_runs_is_complete_in_the_second(tiny_folder: Path) -> None:
    """Its bytes are separate tokens, and the first run ends between them."""
    model = load_model(str(tiny_folder), dtype="float32")
    ids = model.text.encode("so \U0001f339 it")
    cut = next(n for n in range(len(ids)) if model.text.decode(ids[:n]).endswith("\ufffd"))
    stream = TextStream(model.text, (), ids[:cut])
    rest = "".join(piece for token in ids[cut:] for piece in stream.push(token))
    assert rest + "".join(stream.flush()) == "\U0001f339 it"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--policy", "shift", "--discard", 61], "discard must be 1 to 60"),
        (["--policy", "shift", "--discard", -1], "expected 1 or more"),
        (["--policy", "self_extend", "--group", 3, "--window", 64], "group 3 and window 64"),
        (["--policy", "sliding", "--discard", 2], "no setting 'discard'"),
        (["--policy", "full", "--window", 2], "no setting 'window'"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "-p", "Hi"], ["chat"], ["perplexity", __file__]])
def test_options_that_a_policy_does_not_support_are_refused(
    invoke, tiny, command, options, why
) -> None:
    if command == ["chat"] and options[1] in ("shift", "sliding"):
        options = [*options, "--keep", 4]
    result = invoke(*command, "--max-kv-size", 64, *options, *tiny)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert why in result.stderr


@pytest.mark.parametrize(
    "policy",
    [
        ["sliding", "--max-kv-size", 32],
        ["shift", "--discard", 9, "--max-kv-size", 32],
        ["self_extend", "--group", 2, "--window", 16],
        ["full"],
    ],
)
def test_each_policy_generates_and_scores(invoke, tiny, tmp_path: Path, policy) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sea is wide and the night is long. " * 4)
    asked = ["--policy", *policy, *tiny]
    written = invoke("generate", "-f", text, "-n", 9, "--ignore-eos", *asked)
    assert written.exit_code == 0, written.stderr
    assert "generated 9 at" in written.stderr
    scored = invoke("perplexity", text, *asked)
    assert scored.exit_code == 0, scored.stderr
    assert scored.stdout.startswith("perplexity ")


def test_speculation_prints_the_same_text_and_counts_drafts(
    invoke, tiny_folder: Path, tmp_path: Path
) -> None:
    file, texts = tmp_path / "report.json", []
    for more in (("--no-speculate",), ()):
        asked = ("generate", "-p", "one two three " * 20, "-n", 30, "--ignore-eos", *GREEDY)
        result = invoke(*asked, *more, "--report", file, "--model", tiny_folder)
        assert result.exit_code == 0
        texts.append(result.stdout)
        report = json.loads(file.read_text())
        assert 0 <= report["accepted_tokens"] <= report["drafted_tokens"]
        assert not more or not report["drafted_tokens"]
    assert texts[0] == texts[1]
