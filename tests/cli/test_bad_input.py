"""Bad input is a one-line error with status 2, and changes nothing."""

import shutil
from pathlib import Path

import pytest
import torch
from cli.durable import refused
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-kv-size", 4], "found 4"),
        (["--max-kv-size", 8, "--keep", 8], "found 8"),
        (["--max-kv-size", 0], "expected 1 or more, found 0"),
        (["--max-kv-size", -5], "expected 1 or more, found -5"),
        (["--max-kv-size", "many"], "expected a whole number, found 'many'"),
        (["--keep", -2], "expected -1 or more, found -2"),
        (["--prefill-step", 0], "expected 1 or more, found 0"),
        (["-n", -2], "expected -1 or more, found -2"),
        (["--temperature", -1], "temperature must be 0 or more"),
        (["--temperature", "nan"], "temperature must be a finite number"),
        (["--top-p", 0], "top_p must be above 0"),
        (["--top-k", -1], "top_k must be 0"),
        (["--min-p", 2], "min_p must be 0 to 1"),
        (["--repetition-penalty", 0], "repetition_penalty must be above 0"),
        (["--seed", -1], "seed must be 0 or more"),
        (["--stop", ""], "stop must be"),
        (["--policy", "magic"], "'magic' is not one of 'sliding', 'shift'"),
        (["--policy", "full", "--max-kv-size", 8, "--group", 2], "no setting 'group'"),
        (["--policy", "shift", "--max-kv-size", 8, "--discard", 5], "discard must be 1 to 4"),
        (["--bogus"], "--bogus"),
        (["--checkpoints", "9TB"], "in KB, MB, GB, KiB, MiB or GiB; found '9TB'"),
        (["--report", "-"], "--report needs a file"),
        (["--report", "/no/such/folder/report.json"], "cannot be written"),
        (["-f", "no-such-file.txt"], "no-such-file.txt: No such file"),
    ],
)
def test_cheap_checks_run_before_the_model_loads(invoke, arguments, said) -> None:
    # A model that does not exist would be refused too, if anything asked for it.
    refused(invoke("generate", "-p", "x", *arguments, "-m", "no-such-model"), said)


@pytest.mark.parametrize("command", ["generate", "perplexity"])
def test_a_file_must_hold_utf8_text(invoke, command, tmp_path: Path) -> None:
    file = tmp_path / "text"
    asked = [command, "-f", file] if command == "generate" else [command, file]
    refused(invoke(*asked), "No such file")
    file.write_bytes(b"")
    refused(invoke(*asked), "empty", str(file))
    file.write_bytes("é".encode() + b"x\xff")
    refused(invoke(*asked), "byte 3 is 0xff", str(file))
    file.unlink()
    file.mkdir()
    refused(invoke(*asked), "Is a directory")


def test_standard_input_must_hold_utf8_text(invoke) -> None:
    refused(invoke("generate", input=b""), "empty")
    refused(invoke("generate", input=b"abc\xc3"), "standard input", "byte 3")
    refused(invoke("generate", "-p", ""), "empty")


def test_an_invalid_number_leaves_the_report_unchanged(invoke, tiny, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")
    refused(invoke("generate", "-p", "x", "--max-kv-size", 99999, "--report", file, *tiny), "8192")
    refused(
        invoke(
            "generate", "-p", "a b c d", "--keep", -1, "--max-kv-size", 3, "--report", file, *tiny
        )
    )
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def _without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _emptied(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")


def _cut(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


def _foreign(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"GIF89a" + bytes(range(256)))


@pytest.mark.parametrize("harm", [_without, _emptied, _cut, _foreign])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_model_is_named(invoke, tiny_folder, tmp_path: Path, harm, name) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    harm(folder, name)
    refused(invoke("generate", "-p", "x", "-m", folder), str(folder))


def test_a_file_that_is_not_a_model_is_named(invoke, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for content in (b"", b"GGUF", b"something else altogether"):
        file.write_bytes(content)
        refused(invoke("generate", "-p", "x", "-m", file), str(file))


def test_nan_logits_are_an_error(invoke, tiny_folder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    save_file(tensors, folder / "model.safetensors")
    refused(invoke("generate", "-p", "x", "-m", folder, "--quiet"), "NaN")


def test_an_unknown_command_is_a_one_line_error(invoke) -> None:
    refused(invoke("transmogrify"), "transmogrify", "kvkeep --help")


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        (["generate", "hello", "you"], 'kvkeep generate -p "hello you"'),
        (["chat", "hello"], "kvkeep chat -m hello"),
        (["serve", "llama.gguf"], "kvkeep serve -m llama.gguf"),
        (["run"], "kvkeep chat -m MODEL"),
        (["run", "llama3"], "kvkeep chat -m llama3"),
        (["run", "--verbose", "llama3"], "kvkeep chat -m llama3"),
        (["run", "--help"], "kvkeep chat -m MODEL"),
        (["generate", "-m", "", "-p", "x"], "the name of the model is empty"),
        (["serve", "--grace", "nan"], "'nan' is not a finite number"),
        (["serve", "--reread-share", "nan"], "'nan' is not a finite number"),
        (["chat", "--compact-at", "nan"], "'nan' is not a finite number"),
        (["list"], "`kvkeep models` or `kvkeep sessions list`"),
        (["ps"], "kvkeep sessions list"),
        (["models", "ls"], "`kvkeep models list`"),
        (["Serve"], "serve"),
        (["sessions", "lst"], "list"),
    ],
)
def test_errors_suggest_the_command_or_option_that_was_meant(invoke, arguments, suggested) -> None:
    refused(invoke(*arguments), suggested)


@pytest.mark.parametrize("device", ["mps", "cuda", "cuda:7", "meta", "warp"])
def test_a_missing_device_is_a_one_line_error(invoke, tiny, device) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("has devices of its own")
    result = invoke("generate", "-p", "x", *tiny, "--device", device)
    refused(result, f"device '{device}'", "has cpu")
    assert len(result.stderr) < 120


def test_a_group_without_a_command_shows_its_help_line_by_line(invoke) -> None:
    result = invoke("sessions")
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: kvkeep sessions [OPTIONS] COMMAND [ARGS]...\n")
    assert "error" not in result.stderr


def test_the_folder_of_an_unknown_user_is_no_model(invoke) -> None:
    refused(invoke("generate", "-p", "x", "-m", "~nosuchuser/model"), "no model")
