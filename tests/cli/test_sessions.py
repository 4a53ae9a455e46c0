"""`kvkeep sessions`: list, show, verify, copy and remove."""

import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest
import torch
from lossy_basis import random_basis

from kvkeep import Snapshot, load_model
from kvkeep.session.turn_spans import turn_numbers
from kvkeep.storage.files import atomic
from kvkeep.storage.lossy.basis import add_basis, forget_cached
from kvkeep.storage.snapshots.snapshot import read_snapshot_document

TEXT = "One two three four five six seven eight nine ten big small."
GREEDY = ["--temperature", "0", "--ignore-eos"]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(invoke, tiny, home) -> Path:
    """Session `s`: 13 + 20 tokens, of which 24 are remembered."""
    result = invoke(
        *("generate", "--session", "s", "-p", TEXT, "-n", 20, "--max-kv-size", 24, "--keep", 3),
        *(*GREEDY, *tiny),
    )
    assert result.exit_code == 0
    return home / "sessions" / "s.kvkeep"


def _damage(file: Path) -> bytes:
    content = bytearray(file.read_bytes())
    content[-3000] ^= 1
    file.write_bytes(content)
    return bytes(content)


def test_list_prints_all_sessions(invoke, file, tiny, tiny_folder) -> None:
    invoke("chat", "--session", "c", "-n", 3, *tiny, input="Hi\n")
    rows = json.loads(invoke("sessions", "list", "--json").stdout)
    assert [(row["name"], row["kind"]) for row in rows] == [("c", "chat"), ("s", "text")]
    assert (rows[1]["tokens"], rows[1]["cells"], rows[1]["max_kv_size"]) == (33, 24, 24)
    assert (rows[1]["model"], rows[1]["policy"]) == (str(tiny_folder), "sliding")
    assert rows[1]["bytes"] == file.stat().st_size
    lines = invoke("sessions", "list").stdout.splitlines()
    assert lines[0].split()[:2] == ["NAME", "SAVED"]
    assert lines[2].split()[0] == "s"
    assert "24 of 24" in lines[2]


def test_list_continues_after_a_damaged_file(invoke, file) -> None:
    file.with_name("bad.kvkeep").write_bytes(b"nothing of ours")
    result = invoke("sessions", "list")
    assert result.exit_code == 0
    assert "bad.kvkeep is not a kvkeep snapshot" in result.stdout
    assert "24 of 24" in result.stdout


def test_texts_of_a_file_do_not_control_the_terminal(invoke, file) -> None:
    escape = "\x1b]0;owned\x07"
    forged = replace(
        Snapshot.load(file), model=f"tiny{escape}\x9b2J\nsecond line", rounded=f"int8{escape}"
    )
    forged.save(file.with_name("forged.kvkeep"))
    for command in (["list"], ["show", "forged"], ["verify"], ["copy", "forged", "f", "--keep", 1]):
        result = invoke("sessions", *command)
        assert not set(result.stdout + result.stderr) & {"\x1b", "\x07", "\x9b"}, command
    listed = invoke("sessions", "list").stdout.splitlines()
    assert len(listed) == 3
    assert "rounded: int8]0;owned" in listed[1]


def test_without_sessions_the_list_is_empty(invoke, home) -> None:
    assert invoke("sessions", "list").stdout == ""
    assert invoke("sessions", "list", "--json").stdout == "[]\n"
    assert invoke("sessions", "verify").exit_code == 0
    assert "0 files removed" in invoke("sessions", "gc").stdout
    assert not home.exists()


def test_show_marks_what_is_forgotten(invoke, file) -> None:
    shown = invoke("sessions", "show", "s").stdout
    assert "tokens   33, 24 of them in the cache" in shown
    assert "\n\nOne two three[... 9 forgotten tokens ...]." in shown
    everything = invoke("sessions", "show", file, "--forgotten").stdout
    forgotten = " four five six seven eight nine ten big small"
    assert f"\n\nOne two three[9 forgotten tokens: {forgotten}]." in everything


def test_show_marks_what_is_compressed(invoke, tiny) -> None:
    archive = ("--policy", "archive", "--max-kv-size", 24, "--method", "keydiff")
    asked = ("generate", "--session", "c", "-p", "One two three. " * 12, "-n", 0)
    assert invoke(*asked, *archive, *tiny).exit_code == 0
    shown = invoke("sessions", "show", "c").stdout
    assert "tokens   49, 20 of them in the cache, the others compressed to 3 cells" in shown
    assert "\n\nOne two three.[... 29 compressed tokens ...]" in shown


def test_show_refuses_another_tokenizer(invoke, tiny_folder, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    invoke("generate", "--session", "s", "-p", TEXT, "-n", 1, "-m", model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["One"], vocabulary["Two"] = vocabulary["Two"], vocabulary["One"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = invoke("sessions", "show", "s")
    assert result.exit_code == 2
    assert "the tokenizer of" in result.stderr


def test_verify_reads_every_byte_and_changes_nothing(invoke, file, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere.kvkeep"
    shutil.copy(file, other)
    result = invoke("sessions", "verify", "s", other)
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [
        "OK   s",
        f"OK   {other}",
    ]
    bad = _damage(file)
    result = invoke("sessions", "verify", other, "s")
    assert result.exit_code == 2
    assert result.stdout.splitlines()[0].startswith("OK ")
    assert result.stdout.splitlines()[1].startswith("BAD  s: ")
    assert "corrupt" in result.stdout
    assert file.read_bytes() == bad
    assert invoke("sessions", "verify").exit_code == 2


def test_a_fork_is_independent_of_its_source(invoke, file) -> None:
    before = file.read_bytes()
    assert "t has the first 33 tokens of s" in invoke("sessions", "fork", "s", "t").stdout
    assert file.with_name("t.kvkeep").read_bytes() == before
    invoke("generate", "--session", "t", "-n", 5, *GREEDY)
    assert file.read_bytes() == before
    assert len(Snapshot.load(file.with_name("t.kvkeep")).tokens) == 38


def test_a_fork_at_an_earlier_token_equals_the_session_then(invoke, tiny, home) -> None:
    asked = ["generate", "--session", "s", *GREEDY, *tiny]
    invoke(*asked, "-p", TEXT, "-n", 10)
    invoke("generate", "--session", "then", *GREEDY, *tiny, "-p", TEXT, "-n", 6)
    forked = invoke("sessions", "fork", "s", "t", "--at", 19)
    assert "t has the first 19 tokens of s" in forked.stdout
    one, other = (Snapshot.load(home / "sessions" / f"{name}.kvkeep") for name in ("t", "then"))
    assert one.tokens.tolist() == other.tokens.tolist()
    torch.testing.assert_close(one.logits, other.logits)
    assert one.notes == other.notes


def test_a_fork_of_a_chat_keeps_its_turns(invoke, tiny, home) -> None:
    invoke("chat", "--session", "s", "-n", 5, *tiny, input="One?\nTwo?\n")
    saved = Snapshot.load(home / "sessions" / "s.kvkeep")
    first, _ = saved.settings["spans"]["turn 2"]
    invoke("sessions", "fork", "s", "t", "--at", first)
    forked = Snapshot.load(home / "sessions" / "t.kvkeep")
    assert forked.notes["chat"] == saved.notes["chat"]
    assert turn_numbers(forked.settings["spans"]) == [1]
    assert "0 turns left" in invoke("chat", "-c", input="/undo\n").stderr


def test_export_and_import_round_trip(invoke, file, tmp_path: Path) -> None:
    expected = invoke("generate", "--restore-prompt", file, "-n", 9, *GREEDY).stdout
    plain, small = tmp_path / "plain", tmp_path / "small"
    invoke("sessions", "export", "s", plain)
    assert plain.read_bytes() == file.read_bytes()
    invoke("sessions", "export", "s", small, "--codec", "zstd")
    assert (read_snapshot_document(plain)["codec"], read_snapshot_document(small)["codec"]) == (
        "none",
        "zstd",
    )
    assert "t has 33 tokens" in invoke("sessions", "import", small, "t").stdout
    assert invoke("generate", "--session", "t", "-n", 9, *GREEDY).stdout == expected


def test_an_exported_file_is_replaced_by_force_only(invoke, file, tmp_path: Path) -> None:
    invoke("sessions", "fork", "s", "t", "--at", 32)
    target = tmp_path / "backup"
    assert invoke("sessions", "export", "s", target).exit_code == 0
    refused = invoke("sessions", "export", "t", target)
    assert refused.exit_code == 2
    assert "--force replaces it" in refused.stderr
    assert target.read_bytes() == file.read_bytes()
    assert invoke("sessions", "export", "t", target, "--force").exit_code == 0
    assert target.read_bytes() == file.with_name("t.kvkeep").read_bytes()


@pytest.mark.parametrize("command", ["fork", "export", "import"])
def test_a_copy_is_of_what_was_verified(
    invoke, file: Path, tmp_path: Path, monkeypatch, command
) -> None:
    """Another writer replaces the file before each access of the command in turn."""
    target = tmp_path / "t" if command == "export" else file.with_name("t.kvkeep")
    given = {"fork": ["s", "t"], "export": ["s", target], "import": [file, "t"]}[command]
    content, opened, opens, exit_codes = file.read_bytes(), io.open, [1], []
    damaged = _damage(file)

    def open_(path: object, *given: object, **options: object) -> object:
        if str(path) == str(file):
            opens[0] -= 1
            if opens[0] == 0:
                atomic.write_atomic(file, damaged)
        return opened(path, *given, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(io, "open", open_)
    for number in (1, 2, 3):
        target.unlink(missing_ok=True)
        atomic.write_atomic(file, content)
        opens[0] = number
        exit_codes.append(invoke("sessions", command, *given).exit_code)
        if exit_codes[-1] == 0:
            assert target.read_bytes() == content
    assert exit_codes[0] == 2
    assert exit_codes[-1] == 0


def test_a_session_is_saved_by_a_rounding_codec_listed_and_generated_on(
    invoke, tiny, tiny_folder, home
) -> None:
    basis = add_basis(random_basis(load_model(str(tiny_folder), dtype="float32")))
    start = ["generate", "--session", "s", "-p", TEXT, "-n", 20, "--codec", "small", *GREEDY, *tiny]
    assert invoke(*start).exit_code == 0
    path = home / "sessions" / "s.kvkeep"
    for tokens in (33, 42):
        assert "sliding, rounded: small" in invoke("sessions", "list").stdout
        assert json.loads(invoke("sessions", "list", "--json").stdout)[0]["rounded"] == "small"
        assert "rounded  by codec small" in invoke("sessions", "show", "s").stdout
        snapshot = Snapshot.load(path)
        assert (snapshot.codec, len(snapshot.tokens)) == ("small", tokens)
        result = invoke("generate", "--session", "s", "-n", 9, *GREEDY)
        assert (result.exit_code, len(result.stdout) > 9) == (0, True)
    saved = _damage(basis) and path.read_bytes()
    forget_cached()
    for arguments in (["generate", "--session", "s", "-n", 9], [*start[:2], "t", *start[3:]]):
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert f"{basis} is corrupt" in refused.stderr
        assert "kvkeep calibrate" in refused.stderr
    assert path.read_bytes() == saved


def test_rm_prints_what_it_removed(invoke, file) -> None:
    invoke("sessions", "fork", "s", "t")
    result = invoke("sessions", "rm", "t", "x")
    assert result.exit_code == 2
    assert "there is no session 'x'; expected one of: s, t" in result.stderr
    assert file.with_name("t.kvkeep").exists(), "all, or none"
    result = invoke("sessions", "rm", "t", "s")
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == ["removed t", "removed s"]
    assert list(file.parent.iterdir()) == []


def test_gc_removes_what_killed_writers_left(invoke, file, home) -> None:
    prefixes = home / "prefixes"
    prefixes.mkdir()
    left = [folder / ".kvkeep-writing-0123456789abcdef.x" for folder in (file.parent, prefixes)]
    for path in left:
        path.write_bytes(b"half")
    result = invoke("sessions", "gc")
    assert all(f"removed {path}" in result.stdout for path in left)
    assert not any(path.exists() for path in left)
    assert invoke("sessions", "verify", "s").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "nope"], "there is no session 'nope'; expected one of: s"),
        (["verify", "nope"], "there is no session 'nope'"),
        (["verify", "./nope"], "there is no file ./nope"),
        (["fork", "s", "s"], "session 's' already exists"),
        (["fork", "nope", "t"], "there is no session 'nope'"),
        (["fork", "s", "a/b"], "name must be"),
        (["fork", "s", "t", "--at", 34], "--at must be 0 to 33"),
        (["fork", "s", "t", "--at", 5], "rewind takes"),
        (["export", "nope", "/tmp/never"], "there is no session 'nope'"),
        (["export", "s", "/no/such/folder/x"], "cannot be written"),
        (["import", "no-such-file", "t"], "no-such-file cannot be read"),
        (["import", __file__, "t"], "is not a kvkeep snapshot"),
        (["rm"], "Missing argument"),
    ],
)
def test_invalid_requests_are_one_line_errors(invoke, file, arguments, said) -> None:
    before = file.read_bytes()
    result = invoke("sessions", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr
    assert [path.name for path in file.parent.glob("*.kvkeep")] == ["s.kvkeep"]
    assert file.read_bytes() == before


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_import_refuses_damaged_files(invoke, file, tmp_path: Path, force) -> None:
    copy = tmp_path / "copy"
    shutil.copy(file, copy)
    refused = invoke("sessions", "import", copy, "s")
    assert refused.exit_code == 2
    assert "session 's' already exists" in refused.stderr
    _damage(copy)
    before = file.read_bytes()
    assert invoke("sessions", "import", copy, "s", *force).exit_code == 2
    assert file.read_bytes() == before


def test_import_replaces_a_session_with_force(invoke, tiny, file, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt"
    invoke("generate", "-p", "Hello", "--cache-prompt", prompt, *tiny)
    assert invoke("sessions", "import", prompt, "s", "--force").exit_code == 0
    assert file.read_bytes() == prompt.read_bytes()


@pytest.mark.parametrize("command", [["list"], ["verify"], ["verify", "s", "t"], ["show", "s"]])
def test_sessions_removed_meanwhile_are_skipped(
    invoke, file: Path, monkeypatch, smollm2_folder, command
) -> None:
    """The file is removed before each access of the command in turn."""
    other, looks = file.with_name("t.kvkeep"), [1]
    shutil.copy(file, other)
    content, look, opened = file.read_bytes(), os.stat, io.open

    def gone(path: object) -> None:
        if str(path) == str(file):
            looks[0] -= 1
            if looks[0] == 0:
                file.unlink()

    def stat(path: object, *given: object, **options: object) -> os.stat_result:
        gone(path)
        return look(path, *given, **options)  # type: ignore[arg-type]

    def open_(path: object, *given: object, **options: object) -> object:
        gone(path)
        return opened(path, *given, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(io, "open", open_)
    removed = 0
    for number in range(1, 100):
        file.write_bytes(content)
        looks[0] = number
        result = invoke("sessions", *command)  # any exception but an exit is raised here
        if file.exists():
            break
        removed += 1
        assert result.exit_code == 0 or "s" in command
        assert "s" in command or ("t" in result.stdout and "BAD" not in result.stdout)
    assert 2 <= removed < 99


def test_sessions_are_in_the_user_data_folder(invoke, tiny, tmp_path: Path, monkeypatch) -> None:
    """Sessions in the cache folder of older versions are found, and move when saved."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    asked = ["generate", *GREEDY, "-n", 2, *tiny]
    monkeypatch.setenv("KVKEEP_HOME", str(platformdirs.user_cache_path("kvkeep")))
    invoke(*asked, "-p", TEXT, "--session", "before")
    monkeypatch.delenv("KVKEEP_HOME")
    cache = platformdirs.user_cache_path("kvkeep") / "sessions"
    data = platformdirs.user_data_path("kvkeep") / "sessions"
    assert tmp_path in data.parents
    invoke(*asked, "-p", TEXT, "--session", "new")
    assert [file.name for file in data.glob("*.kvkeep")] == ["new.kvkeep"]
    rows = json.loads(invoke("sessions", "list", "--json").stdout)
    assert [row["name"] for row in rows] == ["new", "before"]
    assert "OK   before" in invoke("sessions", "verify").stdout
    assert (cache / "before.kvkeep").exists(), "looking moves nothing"
    assert invoke(*asked, "--session", "before").exit_code == 0
    assert not (cache / "before.kvkeep").exists()
    assert len(Snapshot.load(data / "before.kvkeep").tokens) == 17
    assert invoke("sessions", "rm", "before", "new").exit_code == 0
    assert invoke("sessions", "list").stdout == ""


@pytest.mark.parametrize(
    "notes",
    [{"chat": 5}, {"chat": {"system": [1]}}, {"unread": 7}, {"first_prompt": "all"}],
    ids=str,
)
def test_invalid_notes_are_a_one_line_error(invoke, file, tiny, notes) -> None:
    replace(Snapshot.load(file), notes=notes).save(file)
    commands = [
        ("sessions", "show", "s"),
        ("sessions", "fork", "s", "t", "--at", 20),
        ("generate", "--session", "s", "-n", 1, *tiny),
        ("chat", "--session", "s", "-n", 1, *tiny),
    ]
    for command in commands:
        result = invoke(*command, input="Hi\n")
        assert result.exit_code != 0
        assert "its notes were not written by kvkeep" in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert "s" in invoke("sessions", "list").stdout
