"""The files of `kvkeep batch`: nothing in them is lost, and no answer gets another request's id."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Invoke

REQUESTS = [{"prompt": "Once upon a time"}, {"prompt": "There was"}]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "in.jsonl", REQUESTS)


@pytest.fixture
def answered(invoke: Invoke, tiny: list[str], source: Path, tmp_path: Path) -> Path:
    """The answers to the requests of `source`."""
    out = tmp_path / "out.jsonl"
    assert invoke("batch", source, "-o", out, *tiny, "-n", 2).exit_code == 0
    return out


@pytest.mark.parametrize(
    "options", [("-m", "nowhere"), ("--memory-bytes", "5KB", "--prefill-step", 16)]
)
def test_starting_over_keeps_the_earlier_answers_until_there_is_a_new_one(
    invoke: Invoke, tiny: list[str], source: Path, answered: Path, options: tuple[object, ...]
) -> None:
    before = answered.read_bytes()
    refused = invoke("batch", source, "-o", answered, *tiny, *options, "--again")
    assert refused.exit_code == 2
    assert answered.read_bytes() == before
    assert invoke("batch", source, "-o", answered, *tiny, "-n", 3, "--again").exit_code == 0
    assert [entry["usage"]["completion_tokens"] for entry in results(answered)] == [3, 3]


@pytest.mark.parametrize("again", [(), ("--again",)])
def test_the_requests_are_not_overwritten_by_their_answers(
    invoke: Invoke, tiny: list[str], source: Path, again: tuple[str, ...]
) -> None:
    before = source.read_bytes()
    link = source.with_name("link")
    link.symlink_to(source)
    for path in (source, link):
        refused = invoke("batch", source, "-o", path, *tiny, *again)
        assert refused.exit_code == 2
        assert "the file with the requests" in refused.stderr
    assert source.read_bytes() == before


@pytest.mark.parametrize("again", [(), ("--again",)])
@pytest.mark.parametrize(
    "content", ["a text\n", "a text", '{"prompt": "x"}\n', '{"prompt": "x"}', '{"request": "GET"}']
)
def test_a_file_that_holds_no_results_is_left_unchanged(
    invoke: Invoke, source: Path, tmp_path: Path, content: str, again: tuple[str, ...]
) -> None:
    other = tmp_path / "other"
    other.write_text(content)
    refused = invoke("batch", source, "-o", other, "-m", "nowhere", *again)
    assert refused.exit_code == 2
    assert "not the results file of a batch" in refused.stderr
    assert other.read_text() == content


@pytest.mark.parametrize("name", ["-", "/dev/null"])
def test_results_go_to_a_regular_file(
    invoke: Invoke, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = invoke("batch", source, "-o", name, "-m", "nowhere", "--again")
    assert refused.exit_code == 2
    assert f"-o {name} is not a regular file" in refused.stderr
    assert not os.path.exists("-")


def test_requests_may_come_from_standard_input(
    invoke: Invoke, tiny: list[str], source: Path, answered: Path, tmp_path: Path
) -> None:
    out = tmp_path / "piped"
    piped = source.read_bytes()
    assert invoke("batch", "-", "-o", out, *tiny, "-n", 2, input=piped).exit_code == 0
    assert {entry["text"] for entry in results(out)} == {e["text"] for e in results(answered)}
    assert "standard input, line 1: not JSON" in invoke("batch", "-", "-o", out, input="{").stderr


def test_ids_come_back_as_they_were(invoke: Invoke, tiny: list[str], tmp_path: Path) -> None:
    """Also 0, the empty text, and text that is not valid Unicode; without one, the line number."""
    ids: list[Any] = [0, 1, "two", "", "a\ud83db"]
    lines = [*({"prompt": f"Hi {n}", "id": name} for n, name in enumerate(ids)), {"prompt": "Hi"}]
    out = tmp_path / "out"
    done = invoke("batch", written(tmp_path / "in", lines), "-o", out, *tiny, "-n", 1)
    assert done.exit_code == 0, done.stderr
    assert {entry["id"] for entry in results(out)} == {*ids, "6"}
    body = {"prompt": "Hi"}
    openai = [{"custom_id": n, "url": "/v1/completions", "body": body} for n in (0, "1")]
    out = tmp_path / "out2"
    done = invoke("batch", written(tmp_path / "in2", openai), "-o", out, *tiny, "-n", 1)
    assert done.exit_code == 0, done.stderr
    assert {entry["custom_id"] for entry in results(out)} == {0, "1"}


def test_files_of_a_folder_may_have_any_name(
    invoke: Invoke, tiny: list[str], tmp_path: Path
) -> None:
    folder, out = tmp_path / "docs", tmp_path / "out"
    folder.mkdir()
    (Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt"))).write_text("Coffee.")
    asked = ("batch", "--each", folder, "--ask", "What is this?", "-o", out, *tiny, "-n", 1)
    assert invoke(*asked).exit_code == 0
    assert [entry["id"] for entry in results(out)] == [os.fsdecode(b"caf\xe9.txt")]
    assert "1 of 1 answer" in invoke(*asked).stderr


def test_a_folder_may_hold_the_files_of_the_batch(
    invoke: Invoke, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results and its report are no documents of the folder."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("This is a.")
    files = ("-o", "about.jsonl", "--report", "report.json")
    asked = ("batch", "--each", ".", "--ask", "What is this?", *files, *tiny, "-n", 1)
    for _ in range(3):
        done = invoke(*asked)
        assert done.exit_code == 0
        assert "1 of 1 answer" in done.stderr
    assert [entry["id"] for entry in results(Path("about.jsonl"))] == ["a.txt"]


@pytest.mark.parametrize(
    "changed",
    [
        ("-m", "nowhere"),
        ("--temperature", 0.5),
        ("-n", 3),
        ("--seed", 1),
        ("--kv-bits", 4),
        ("--dtype", "bfloat16"),
        ("--weights", "int8"),
        ("--policy", "full"),
        ("--max-kv-size", 64),
        ("--keep", 8),
    ],
    ids=lambda changed: changed[0],
)
def test_answers_by_other_options_are_not_taken_for_these(
    invoke: Invoke, tiny: list[str], source: Path, answered: Path, changed: tuple[object, ...]
) -> None:
    before = answered.read_bytes()
    refused = invoke("batch", source, "-o", answered, *tiny, "-n", 2, *changed)
    assert refused.exit_code == 2
    assert "answers by another model" in refused.stderr
    assert "--again" in refused.stderr
    assert answered.read_bytes() == before


def test_answers_by_other_files_of_the_model_are_not_taken_for_these(
    invoke: Invoke, tiny_folder: Path, source: Path, tmp_path: Path
) -> None:
    """A complete batch is not touched, either: its answers are not those of the new file."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_folder, model)
    command = ("batch", source, "-o", out, "-m", model, "--dtype", "float32", "-n", 1)
    assert invoke(*command).exit_code == 0
    assert "2 of 2 answers" in invoke(*command).stderr
    os.utime(model / "model.safetensors", (1, 1))
    refused = invoke(*command)
    assert refused.exit_code == 2
    assert "answers by another model" in refused.stderr


def test_a_complete_batch_needs_no_model(
    invoke: Invoke, tiny_folder: Path, source: Path, tmp_path: Path
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.symlink_to(tiny_folder)
    asked = ("batch", source, "-o", out, "-m", model, "--dtype", "float32", "-n", 1)
    assert invoke(*asked).exit_code == 0
    model.unlink()
    for _ in range(2):
        assert "2 of 2 answers" in invoke(*asked).stderr


def test_results_of_earlier_versions_are_resumed(
    invoke: Invoke, tiny: list[str], source: Path, answered: Path
) -> None:
    """Their lines do not say by which options they are."""
    lines = [{k: v for k, v in entry.items() if k != "options"} for entry in results(answered)]
    written(answered, lines[:1])
    assert invoke("batch", source, "-o", answered, *tiny, "-n", 2).exit_code == 0
    assert sorted(entry["id"] for entry in results(answered)) == ["1", "2"]


def test_resuming_never_overwrites_answers_in_place(
    invoke: Invoke, tiny: list[str], source: Path, answered: Path
) -> None:
    """A process that is killed while it drops failed lines leaves the earlier file whole."""
    first, second = answered.read_bytes().splitlines(keepends=True)
    failed = json.dumps({**json.loads(first), "error": {"code": "ContextFull"}}) + "\n"
    answered.write_bytes(failed.encode() + second + b'{"half": "a li')
    before, same_file = answered.read_bytes(), answered.with_name("same file")
    same_file.hardlink_to(answered)
    link = answered.with_name("link")
    link.symlink_to(answered)
    assert invoke("batch", source, "-o", link, *tiny, "-n", 2).exit_code == 0
    assert same_file.read_bytes() == before
    assert answered.read_bytes() == second + first
    assert link.is_symlink()
