"""Frames of Chromium's traces, in a trace that is written here."""

from typing import Any

import pytest

from benchmarks.trace import drawn_per_second, frames_of

PAGE, OTHER = {"pid": 7, "tid": 1}, {"pid": 7, "tid": 2}


def event(name: str, start: float, duration: float | None = None, **fields: Any) -> dict[str, Any]:
    """Return an event of the page's main thread. Times in milliseconds."""
    times = {"ts": 1000 * start}
    if duration is None:
        return {"name": name, "ph": "I", **times, **PAGE, **fields}
    times |= {"dur": 1000 * duration, "tdur": 1000 * duration}
    return {"name": name, "ph": "X", **times, **PAGE, **fields}


def test_a_frame_is_the_work_from_its_beginning_to_the_next_one() -> None:
    events = [
        event("RunTask", 0, 3),  # before the first frame
        event("BeginMainThreadFrame", 10),
        event("RunTask", 11, 5),
        event("FunctionCall", 11, 2),
        event("Layout", 12, 0.5),  # forced by the script
        event("Paint", 14, 1),
        event("RunTask", 18, 2),
        event("BeginMainThreadFrame", 30),
        event("RunTask", 30, 9, tdur=1000),  # another program had the core for 8 ms
        event("RunTask", 30, 9, **OTHER),
        event("BeginMainThreadFrame", 50),
        event("RunTask", 50, 30),  # of the frame that is not complete
        event("BeginMainThreadFrame", 0, **OTHER),
    ]
    first, second = frames_of(events)
    assert first.milliseconds == pytest.approx(7)
    expected = {"script": 1.5, "layout": 0.5, "paint": 1.0, "other": 4.0}
    assert dict(first.parts) == pytest.approx(expected)
    assert second.milliseconds == pytest.approx(1)


def test_a_trace_without_frames_has_none() -> None:
    assert list(frames_of([event("RunTask", 0, 1)])) == []
    assert drawn_per_second([event("DrawFrame", 0)]) == 0


def test_drawn_frames_are_counted_over_their_time() -> None:
    assert drawn_per_second([event("DrawFrame", 20 * n) for n in range(11)]) == pytest.approx(50)
