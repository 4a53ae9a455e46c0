"""How long after a fault the operations of users take a normal time again."""

import pytest

from benchmarks.soak_faults.latency import MAX_RECOVERY_SECONDS, Latencies

INFINITE = float("inf")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list of one number that tests change. Sleeping changes it, too."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("benchmarks.soak_faults.latency.time.monotonic", lambda: now[0])
    monkeypatch.setattr("benchmarks.soak_faults.latency.time.sleep", sleep)
    return now


def test_a_normal_time_is_that_of_the_median(clock: list[float]) -> None:
    latencies = Latencies(1)
    assert latencies.normal_seconds() == 2
    for seconds in (0.1, 0.5, 90):
        latencies.add(0, seconds)
    assert latencies.normal_seconds() == 5


def test_all_users_recover_with_the_last_one(clock: list[float]) -> None:
    latencies = Latencies(2)
    latencies.add(0, 0.1)
    assert latencies.recovery(since=1000.5, normal=2) == INFINITE
    clock[0] = 1001.5
    latencies.add(0, 30)  # it began before the fault's end, a second ago
    assert latencies.recovery(since=1000.5, normal=2) == INFINITE
    clock[0] = 1007.5
    latencies.add(1, 7)  # too long
    clock[0] = 1008.5
    latencies.add(1, 1)
    assert latencies.recovery(since=1000.5, normal=2) == 8


def test_a_user_who_is_not_answered_does_not_recover(clock: list[float]) -> None:
    latencies = Latencies(1)
    assert not latencies.wait_for_recovery(2, lambda: False)
    assert clock[0] >= 1000 + MAX_RECOVERY_SECONDS
    assert latencies.wait_for_recovery(2, lambda: True)
    assert latencies.recoveries == []
