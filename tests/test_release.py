"""The tools that make a release."""

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    for name in ("wheels", "release"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def archive(names: list[str], seconds: int, user: str, mode: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as target:
        for name in names:
            member = tarfile.TarInfo(name)
            member.mtime, member.uname, member.mode, member.size = seconds, user, mode, len(name)
            target.addfile(member, io.BytesIO(name.encode()))
    return file.getvalue()


def test_a_source_archive_has_the_same_bytes_by_any_user_at_any_time(tools: None) -> None:
    from wheels import dated_archive

    first = dated_archive(archive(["a/b", "a/c"], 10, "one", 0o644), 1_000_000)
    second = dated_archive(archive(["a/c", "a/b"], 20, "two", 0o600), 1_000_000)
    assert first == second
    with tarfile.open(fileobj=io.BytesIO(first)) as opened:
        members = opened.getmembers()
        assert [(m.name, m.mtime, m.mode) for m in members] == [
            ("a/b", 1_000_000, 0o644),
            ("a/c", 1_000_000, 0o644),
        ]
        assert opened.extractfile(members[1]).read() == b"a/c"


def test_the_sbom_names_each_library_that_is_copied_into_the_page(tools: None) -> None:
    from release import page_components

    names = {component["name"].rpartition("/")[2] for component in page_components()}
    assert names == {"cdn-assets", "dompurify", "marked"}
    vendored = {
        file.name.partition(".")[0]
        for file in (ROOT / "kvkeep/server/page/files/vendor").glob("*.LICENSE.txt")
    }
    assert vendored == {"highlight", "marked", "purify"}
    assert all(json.dumps(component).count("pkg:npm/") == 1 for component in page_components())
