"""Sessions and prompt prefixes of the command line in an object store."""

import json
from pathlib import Path

import pytest
from cli.conftest import Invoke
from stores import _s3, s3, s3_url, store_url

from kvkeep.storage.objects import open_object_store
from kvkeep.storage.sessions.shared import SharedSessions

__all__ = ["_s3", "s3", "s3_url", "store_url"]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))


@pytest.fixture
def at(store_url: str) -> list[str]:
    return ["--store", store_url]


def names(invoke: Invoke, at: list[str]) -> list[str]:
    listed = json.loads(invoke("sessions", "list", "--json", *at).stdout)
    return [row["name"] for row in listed]


def test_a_session_resumes_from_a_store_as_from_a_file(
    invoke: Invoke, tiny: list[str], at: list[str]
) -> None:
    written = []
    for where in (at, []):
        for text in ("one two", " three"):
            asked = ("-p", text, "-n", 6, "--temperature", 0, "--session", "s", *tiny, *where)
            result = invoke("generate", *asked)
            assert result.exit_code == 0, result.output
            written.append(result.stdout)
    assert written[:2] == written[2:]
    assert names(invoke, at) == ["s"]


def test_sessions_are_copied_checked_and_removed_in_a_store(
    invoke: Invoke, tiny: list[str], at: list[str], tmp_path: Path
) -> None:
    invoke("generate", "-p", "one", "-n", 2, "--session", "a", *tiny, *at)
    assert invoke("sessions", "fork", "a", "b", *at).exit_code == 0
    assert invoke("sessions", "fork", "a", "b", *at).exit_code == 2
    file = tmp_path / "a.kvkeep"
    assert invoke("sessions", "export", "a", file, *at).exit_code == 0
    assert invoke("sessions", "rm", "a", *at).exit_code == 0
    assert invoke("sessions", "import", file, "c", *at).exit_code == 0
    assert sorted(names(invoke, at)) == ["b", "c"]
    verified = invoke("sessions", "verify", *at)
    assert verified.exit_code == 0
    assert verified.stdout.count("OK") == 2
    assert "tokens" in invoke("sessions", "show", "c", *at).stdout
    assert "0 files removed" in invoke("sessions", "gc", *at).stdout
    missing = invoke("sessions", "rm", "a", *at)
    assert missing.exit_code == 2
    assert "expected one of: b, c" in missing.stderr


def test_a_prompt_prefix_is_reused_from_the_store(
    invoke: Invoke, tiny: list[str], at: list[str], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    text = " ".join(str(number) for number in range(400))
    asked = ["generate", "-p", text, "-n", 2, "--prefix-cache", "--secret-file", secret]
    for report in ("first", "second"):
        out = tmp_path / f"{report}.json"
        result = invoke(*asked, "--report", out, *tiny, *at)
        assert result.exit_code == 0, result.output
    first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("first", "second"))
    assert (first["reused_tokens"], second["reused_tokens"] >= 256) == (0, True)
    (prompt,) = json.loads(invoke("prefixes", "list", "--json", *at).stdout)
    assert prompt["tokens"] >= 256
    assert "1 prompt, " in invoke("prefixes", "list", *at).stderr
    assert "--text" in invoke("prefixes", "list", "--text", *at).stderr
    assert "--max-bytes" in invoke("prefixes", "gc", *at).stderr, "of all owners, and how much?"
    assert "removed 0.0 MB" in invoke("prefixes", "gc", "--max-bytes", "1GB", *at).stdout
    assert ", 0.0 MB left" in invoke("prefixes", "clear", *at).stdout
    assert json.loads(invoke("prefixes", "list", "--json", *at).stdout) == []
    short = tmp_path / "short"
    short.write_text("too short")
    refused = invoke(*asked[:-1], short, *tiny, *at)
    assert refused.exit_code == 2
    assert "openssl rand" in refused.stderr


def test_a_session_in_use_is_refused(
    invoke: Invoke, tiny: list[str], store_url: str, at: list[str]
) -> None:
    invoke("generate", "-p", "one", "-n", 2, "--session", "a", *tiny, *at)
    with SharedSessions(open_object_store(store_url), writer="laptop:1").lock("a"):
        refused = invoke("generate", "-n", 2, "--session", "a", *tiny, *at)
    assert refused.exit_code == 2
    assert "session 'a' is in use by laptop:1" in refused.stderr


def test_an_invalid_store_is_refused(invoke: Invoke) -> None:
    refused = invoke("sessions", "list", "--store", "ftp://somewhere")
    assert refused.exit_code == 2
    assert "s3://bucket/prefix" in refused.stderr
