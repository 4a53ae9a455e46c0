"""Chromium's traces: what each frame took on the renderer's main thread, by kind of work."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]  # of Chromium's trace format: name, ph, ts and dur in microseconds, ...

CATEGORIES = (
    "-*",
    "devtools.timeline",
    "disabled-by-default-devtools.timeline",
    "disabled-by-default-devtools.timeline.frame",
)
_KINDS = {
    "script": "FunctionCall EvaluateScript EventDispatch FireAnimationFrame TimerFire RunMicrotasks"
    " V8.GC_MARK_COMPACTOR MajorGC MinorGC",
    "layout": "UpdateLayoutTree Layout HitTest ScheduleStyleRecalculation ParseHTML"
    " IntersectionObserverController::computeIntersections",
    "paint": "PrePaint Paint Layerize Commit UpdateLayer UpdateLayerTree CompositeLayers",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


@dataclass(frozen=True)
class Frame:
    """Milliseconds of the main thread from the beginning of one frame to that of the next.

    parts: by kind of work; what is none of script, layout and paint is "other".
    """

    milliseconds: float
    parts: Mapping[str, float]


def frames_of(events: Sequence[Event]) -> Iterator[Frame]:
    """Yield the frames of the renderer that drew most of them, without the last, unfinished one.

    Times are of the thread's CPU clock where the trace has them.
    """
    begun = [event for event in events if event["name"] == "BeginMainThreadFrame"]
    if not begun:
        return
    ((process, thread), _) = Counter((e["pid"], e["tid"]) for e in begun).most_common(1)[0]
    own = [e for e in events if (e.get("pid"), e.get("tid")) == (process, thread)]
    starts = sorted(e["ts"] for e in own if e["name"] == "BeginMainThreadFrame")
    parts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event, microseconds in _self_times(e for e in own if e.get("ph") == "X"):
        number = bisect_right(starts, event["ts"]) - 1
        parts[number][_KIND_OF.get(event["name"], "other")] += microseconds / 1000
    for number in range(len(starts) - 1):
        yield Frame(sum(parts[number].values()), dict(parts[number]))


def drawn_per_second(events: Sequence[Event]) -> float:
    """Return how many frames the compositor drew in a second, from the first to the last."""
    times = sorted(event["ts"] for event in events if event["name"] == "DrawFrame")
    return 1e6 * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def _self_times(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each event of a thread with the microseconds that are not those of an event inside."""
    stack: list[tuple[Event, float]] = []  # with its own microseconds so far
    for event in sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0))):
        while stack and stack[-1][0]["ts"] + stack[-1][0].get("dur", 0) <= event["ts"]:
            yield stack.pop()
        duration = float(event.get("tdur", event.get("dur", 0)))
        if stack:
            outer, own = stack.pop()
            stack.append((outer, own - duration))
        stack.append((event, duration))
    yield from stack
