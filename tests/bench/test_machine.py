"""A result names the machine that it was measured on."""

import dataclasses
import json

from benchmarks.machine import describe_machine


def test_a_machine_is_described_in_full() -> None:
    machine = describe_machine()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.threads >= 1
    assert machine.memory_bytes > 2**28
    assert machine.date.endswith("Z")
    assert json.loads(json.dumps(dataclasses.asdict(machine)))["kvkeep"] == machine.kvkeep
