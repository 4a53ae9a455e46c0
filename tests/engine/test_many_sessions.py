"""Order, limits and totals of an owner's sessions are found in few steps."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.engine import Limits, SessionRecord, scheduler
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.scheduler import SchedulingPolicy
from kvkeep.errors import NoRoom


def records_of(*owners: str) -> list[SessionRecord]:
    return [SessionRecord(f"s{i}", owner, True, None, None) for i, owner in enumerate(owners)]


@pytest.mark.parametrize("seed", range(3))
def test_sessions_come_in_the_order_of_their_use_behind_that_of_the_key(seed: int) -> None:
    random = Random(seed)
    disk: Any = SimpleNamespace(recover=lambda: records)
    for _ in range(20):
        records = records_of(*(random.choice("ab") for _ in range(20)))
        for record in records:
            record.last_used = float(random.randrange(8))  # several at the same time
        registry = SessionRegistry(disk, SchedulingPolicy(Limits()))
        preferred = random.choice([None, *records])
        pins: Any = SimpleNamespace(session_with_key=lambda owner, key, found=preferred: found)
        registry.pins = pins
        for owner in "abc":
            expected = [record for record in records if record.owner == owner]
            ranks = {id(record): (record is preferred, record.last_used) for record in expected}
            expected.sort(key=lambda record, ranks=ranks: ranks[id(record)], reverse=True)
            assert registry.owned_by(owner, "key") == expected


def test_named_sessions_are_counted_only_if_the_limit_may_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, matches = 0, scheduler.is_response_name

    def counted(name: str) -> bool:
        nonlocal count
        count += 1
        return matches(name)

    monkeypatch.setattr(scheduler, "is_response_name", counted)
    policy = SchedulingPolicy(Limits(sessions_per_owner=10))
    policy.require_session_slot(records_of(*"a" * 9))
    assert count == 0
    with pytest.raises(NoRoom, match="the limit of 10 sessions"):
        policy.require_session_slot(records_of(*"a" * 10))
    policy.require_session_slot([*records_of(*"a" * 9), SessionRecord("x", "a", False, None, None)])
