"""When an engine looks at its sessions for one to save."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.engine import SessionRecord, saving
from kvkeep.engine.saving import SessionSaver
from kvkeep.engine.session_files import SessionFile, SessionFolder


class CountedRecords(list[SessionRecord]):
    """Records, and how often all of them were looked at."""

    looks = 0

    def __iter__(self) -> Iterator[SessionRecord]:
        self.looks += 1
        return super().__iter__()


@pytest.mark.parametrize(("seconds", "pause"), [(2.0, 0.5), (0.5, 0.125), (60.0, 0.5)])
def test_a_look_that_finds_nothing_to_save_is_followed_by_a_pause(
    seconds: float, pause: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may run a thousand steps a second, beside thousands of sessions."""
    clock, saved = SimpleNamespace(now=1000.0), list[SessionRecord]()
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(SessionSaver, "save", lambda self, record: saved.append(record))
    session: Any = object()
    file = SessionFile(SessionFolder(tmp_path), "a")
    records = CountedRecords(SessionRecord(name, "0", True, file, session) for name in "ab")
    for record in records:
        record.saved_revision, record.last_changed = record.revision, clock.now
    saver = SessionSaver(records, lambda function: None)  # type: ignore[arg-type]
    records.looks = 0
    for _ in range(1000):
        saver.save_idle(seconds)
    assert (records.looks, saved) == (1, [])

    for record in records:
        record.revision += 1
    clock.now += seconds + pause / 2
    saver.save_idle(seconds)  # a save is followed by no pause: both are due
    assert saved == [records[0]]
    records[0].saved_revision = records[0].revision
    saver.save_idle(seconds)
    assert saved == [records[0], records[1]]
    records[1].saved_revision = records[1].revision

    saver.save_idle(seconds)
    records[0].revision += 1
    clock.now += pause * 0.99
    saver.save_idle(seconds)
    assert len(saved) == 2
    clock.now += pause * 0.02
    saver.save_idle(seconds)
    assert saved[2:] == [records[0]]
