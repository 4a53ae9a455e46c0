"""One engine, many users: a thread that computes for all, and keeps their sessions."""

from kvkeep.engine.cache_misses import Differing, Missed, differing
from kvkeep.engine.engine import Engine
from kvkeep.engine.events import Event, Failed, Finished, Likely, Read, Reuse, Usage, Written
from kvkeep.engine.generation import Answer, Ask
from kvkeep.engine.limits import Limits, Operation, Totals
from kvkeep.engine.record import Kept
from kvkeep.engine.turn import turn

__all__ = [
    "Answer",
    "Ask",
    "Differing",
    "Engine",
    "Event",
    "Failed",
    "Finished",
    "Kept",
    "Likely",
    "Limits",
    "Missed",
    "Operation",
    "Read",
    "Reuse",
    "Totals",
    "Usage",
    "Written",
    "differing",
    "turn",
]
