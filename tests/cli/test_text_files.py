"""Text files are UTF-8, with or without a byte order mark."""

import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import Invoke

from kvkeep import load_model
from kvkeep.cli.batch.requests import read_folder, read_jsonl
from kvkeep.errors import InvalidArgument
from kvkeep.server.keys import ApiKeys
from kvkeep.storage.files.text import decode_text

MARK = b"\xef\xbb\xbf"


def _marked(path: Path, text: str) -> Path:
    path.write_bytes(MARK + text.encode())
    return path


def test_only_a_leading_byte_order_mark_is_dropped() -> None:
    assert decode_text(MARK + "é".encode(), "x") == "é"
    assert decode_text("a\ufeffb".encode(), "x") == "a\ufeffb"
    with pytest.raises(InvalidArgument, match=r"^x is not UTF-8 text: byte 0 is 0xff"):
        decode_text(b"\xff\xfea\0", "x")


def test_a_byte_order_mark_does_not_change_a_prompt(
    invoke: Invoke,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    options = ("-m", tiny_folder, "--temperature", 0, "-n", 4, "-q", "--report")
    plain, marked = tmp_path / "plain", _marked(tmp_path / "marked", "Once upon a time")
    plain.write_text("Once upon a time")
    reports = []
    for number, arguments in enumerate([("-f", plain), ("-f", marked), ("-f", "-")]):
        report = tmp_path / f"{number}.json"
        piped = marked.read_bytes() if arguments[1] == "-" else b""
        result = invoke("generate", *arguments, *options, report, input=piped)
        assert result.exit_code == 0, result.stderr
        reports.append((json.loads(report.read_text())["prompt_tokens"], result.stdout))
    assert reports[0] == reports[1] == reports[2]


def test_batches_and_key_files_accept_a_byte_order_mark(tmp_path: Path) -> None:
    (request,) = read_jsonl(_marked(tmp_path / "lines.jsonl", '{"prompt": "x"}\n'))
    assert request.body == {"prompt": "x"}
    folder = tmp_path / "folder"
    folder.mkdir()
    _marked(folder / "a.txt", "text")
    (chat,) = read_folder(folder, "Why?", None)
    assert chat.body["messages"][0]["content"] == "text\n\nWhy?"
    key = "a-key-of-sixteen-1"
    marked, plain = _marked(tmp_path / "keys", f"{key}\n"), tmp_path / "plain"
    plain.write_text(f"{key}\n")
    owners = {ApiKeys.read(file, b"0" * 32).owner(key) for file in (marked, plain)}
    assert len(owners) == 1
    assert None not in owners
    (tmp_path / "latin").write_bytes(b"schl\xfcssel-von-sechzehn\n")
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        ApiKeys.read(tmp_path / "latin", b"0" * 32)


def test_a_models_files_accept_a_byte_order_mark(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    for name in ("config.json", "chat_template.jinja"):
        if (folder / name).exists():
            (folder / name).write_bytes(MARK + (folder / name).read_bytes())
    said = [{"role": "user", "content": "Hi"}]
    here, there = load_model(str(tiny_folder)), load_model(str(folder))
    assert here.spec == there.spec
    assert here.text.chat(said) == there.text.chat(said)
