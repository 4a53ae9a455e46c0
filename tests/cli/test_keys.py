"""`kvkeep keys`: API keys whose hashes alone are stored."""

from pathlib import Path

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
