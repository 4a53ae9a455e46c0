"""The benchmark of users of a server with faults, at small sizes."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.soak_faults.__main__ import soak_faults
from benchmarks.soak_faults.checks import Checker
from benchmarks.soak_faults.deployment import deployment
from benchmarks.soak_faults.faults import KINDS, Fault, schedule
from benchmarks.soak_faults.records import Change, Content, Record, SessionPoint, UserSession
from benchmarks.soak_faults.server import KEYS
from kvkeep import Client
from kvkeep.client.remote import RemoteSession


@dataclass(frozen=True)
class Killed:
    """A server that is killed. kill: with the points of the session that its user knows."""

    remote: RemoteSession
    checker: Checker
    record: Record
    kill: Callable[[list[SessionPoint], int], UserSession]


def test_a_schedule_is_that_of_its_seed_and_has_all_kinds() -> None:
    count = 2 * len(KINDS)
    operations = 100 * (count + 1)
    faults = schedule(1, operations, 100)
    assert faults == schedule(1, operations, 100)
    assert faults != schedule(2, operations, 100)
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(KINDS, 2)
    assert [fault.at // 100 for fault in faults] == list(range(1, count + 1))


def test_users_find_their_sessions_as_they_left_them(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--model", str(tiny_folder), "--operations", "260", "--fault-every", "18"]
    result = CliRunner().invoke(soak_faults, [*arguments, "--users", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["violations"] == []
    assert sum(report["operations"].values()) >= 260
    assert report["faults"]["kill"] >= 1
    assert report["faults"]["cut"] >= 1
    assert report["recovery_seconds"] < 60


@pytest.mark.parametrize("store", [[], ["--object-store"]])
def test_users_of_a_fleet_find_their_sessions_at_each_server(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: list[str]
) -> None:
    pytest.importorskip("moto")
    # Clocks are not moved here; without memory a server may hang, which takes long.
    kinds = tuple(kind for kind in KINDS if kind not in ("clock", "memory"))
    monkeypatch.setattr("benchmarks.soak_faults.deployment.KINDS", kinds)
    out = tmp_path / "out.json"
    arguments = ["--model", str(tiny_folder), "--operations", "180", "--fault-every", "20"]
    arguments += ["--users", "3", "--out", str(out), "--fleet", *store]
    result = CliRunner().invoke(soak_faults, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["violations"] == []
    assert report["went_back_after_kill"] == 0


@pytest.fixture
def killed(tiny_folder: Path, tmp_path: Path) -> Iterator[Killed]:
    """A server with an empty session that is saved, and a function that kills it and compares."""
    record = Record(10)
    with deployment(tmp_path, str(tiny_folder), "60MB", None, False, False) as servers:
        client = Client(servers.urls[0], KEYS[0])
        checker = Checker("user", [client], servers, record)
        remote = client.create("s", policy="sliding")
        remote.save()

        def kill(points: list[SessionPoint], saved: int) -> UserSession:
            held = UserSession("s", "word", "sliding", points, servers.generation, saved)
            checker.sessions.append(held)
            servers.apply(Fault(0, "kill", seconds=0, hours=0))
            checker.compare_unchanged(held)
            return held

        try:
            yield Killed(remote, checker, record, kill)
        finally:
            servers.close()


def test_a_pin_that_a_kill_undid_is_no_change_of_the_session(killed: Killed) -> None:
    """Its tokens are those of the pinned session; a replay with the pin has other bits."""
    killed.remote.feed("The cache holds the cells of a window.")
    killed.remote.save()
    fed, _ = killed.checker.read("s")
    assert fed is not None
    content = Content(fed.content.tokens, ("pinned",) * 4 + fed.content.status[4:], 4)
    points = [
        SessionPoint(fed.content, fed.revision, Change("feed")),
        SessionPoint(content, fed.revision + 1, Change("pin", 0, 4)),
    ]
    held = killed.kill(points, 0)
    assert (killed.record.lost, killed.record.violations) == (1, [])
    assert [point.change.kind for point in held.points] == ["feed"]


@pytest.mark.parametrize("saved", [-1, 0])
def test_only_a_session_that_was_not_saved_may_be_empty_after_a_kill(
    killed: Killed, saved: int
) -> None:
    point = SessionPoint(Content((5,), ("window",), 1), 1, Change("feed"))
    killed.kill([point], saved)
    assert bool(killed.record.violations) == (saved == 0)
    assert killed.checker.sessions == []
