"""One engine, many users: a thread that computes for all, and keeps their sessions."""

from kvkeep.engine.answer import Answer, Ask
from kvkeep.engine.engine import Engine
from kvkeep.engine.events import Event, Failed, Finished, Likely, Read, Reuse, Usage, Written
from kvkeep.engine.kept import Kept
from kvkeep.engine.limits import Limits, Operation, Totals

__all__ = [
    "Answer",
    "Ask",
    "Engine",
    "Event",
    "Failed",
    "Finished",
    "Kept",
    "Likely",
    "Limits",
    "Operation",
    "Read",
    "Reuse",
    "Totals",
    "Usage",
    "Written",
]
