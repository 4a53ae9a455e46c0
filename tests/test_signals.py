"""Ctrl-C within a block that defers it."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from kvkeep.runtime.signals import interrupts_deferred


@pytest.fixture
def interrupts() -> Iterator[list[int]]:
    """Signals that the program's SIGINT handler has received; it raises KeyboardInterrupt."""
    received = list[int]()

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    yield received
    signal.signal(signal.SIGINT, previous)


def interrupt_in_block(times: int, only_first: bool) -> int:
    """Press Ctrl-C so often in a block; return how many times the block went on after one."""
    survived = 0
    try:
        with interrupts_deferred(only_first):
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
                survived += 1
    except KeyboardInterrupt:
        return survived
    pytest.fail("no interrupt was delivered")


@pytest.mark.parametrize("only_first", [False, True])
def test_one_interrupt_waits_for_the_end_of_the_block(
    interrupts: list[int], only_first: bool
) -> None:
    assert interrupt_in_block(1, only_first) == 1
    assert len(interrupts) == 1


def test_a_second_interrupt_ends_the_block_and_both_are_delivered_once(
    interrupts: list[int],
) -> None:
    assert interrupt_in_block(3, only_first=True) == 1
    assert len(interrupts) == 1
