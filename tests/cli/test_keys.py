"""`kvkeep keys`: API keys whose hashes alone are stored."""

from pathlib import Path

import pytest
from cli.conftest import Invoke

from kvkeep.server.keys import ApiKeys


def test_the_key_that_is_printed_is_accepted_and_not_stored(invoke, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = [invoke("keys", "new", file, "--note", "Anna").stdout.strip() for _ in range(2)]
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().count("# Anna\nsha256:") == 2
    accepted = ApiKeys.read(file, tmp_path)
    assert len({accepted.owner(key) for key in keys} - {None}) == 2
    assert not any(key in file.read_text() for key in keys)
    refused = invoke("keys", "new", file, "--note", "a\nplain-key-of-mine-1")
    assert (refused.exit_code, "in one line" in refused.stderr) == (2, True)


def test_keys_in_a_file_are_replaced_by_their_hashes(invoke, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\none-key-of-sixteen\n")
    file.chmod(0o640)
    owner = ApiKeys.read(file, tmp_path).owner("one-key-of-sixteen")
    assert "1 key replaced" in invoke("keys", "hash", file).stderr
    assert "only hashes" in invoke("keys", "hash", file).stderr
    assert "one-key" not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640
    assert ApiKeys.read(file, tmp_path).owner("one-key-of-sixteen") == owner


@pytest.mark.parametrize(
    "text",
    [
        "DATABASE_URL=postgres://user:password@host/db\n",
        "ANTHROPIC_API_KEY=abcdefgh\nOPENAI_API_KEY=x\n",
        '{"prompt_and_more":"What is the capital of France?"}\n',
        "https://example.org/a/page\n",
        "d41d8cd98f00b204e9800998ecf8427e  file.txt\n",
        "internationalisation is a long word\n",
        "cl\u00e9-de-seize-lettres\n",
    ],
)
def test_files_of_another_kind_are_left_as_they_are(
    invoke: Invoke, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "file"
    file.write_text(text, encoding="utf-8")
    for command in ("new", "hash"):
        refused = invoke("keys", command, file)
        assert (refused.exit_code, "not a key file" in refused.stderr) == (2, True)
        assert file.read_text(encoding="utf-8") == text


def test_keys_of_other_makers_are_hashed_with_their_settings(
    invoke: Invoke, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    keys = ["sk-proj-a_b.c~d+e/f0", "MDEyMzQ1Njc4OWFiY2RlZg=="]
    file.write_text(f"{keys[0]} alignment=in_place reread=64\n{keys[1]}\n")
    owners = [ApiKeys.read(file, tmp_path).owner(key) for key in keys]
    assert None not in owners
    assert "2 keys replaced" in invoke("keys", "hash", file).stderr
    assert "alignment=in_place reread=64\n" in file.read_text()
    assert [ApiKeys.read(file, tmp_path).owner(key) for key in keys] == owners
