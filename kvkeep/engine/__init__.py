"""The engine: one thread that schedules generations for many callers and keeps their sessions."""

import warnings
from typing import TYPE_CHECKING

from kvkeep.engine.engine import Engine
from kvkeep.engine.generation import Generation
from kvkeep.engine.operations import Operation, Totals
from kvkeep.engine.pins import PinRequest, PrefixPin
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.request import (
    Failed,
    Finished,
    GeneratedToken,
    GenerationEvent,
    GenerationRequest,
    PrefillProgress,
    RequestLike,
    SessionRequest,
    TokenLogprob,
)
from kvkeep.engine.reuse import ReuseReport, Seam, TextDifference
from kvkeep.engine.scheduler import Limits
from kvkeep.engine.session_operations import SessionOperations
from kvkeep.engine.usage import LastAnswer, Reuse, Usage

__all__ = [
    "Engine",
    "Failed",
    "Finished",
    "GeneratedToken",
    "Generation",
    "GenerationEvent",
    "GenerationRequest",
    "LastAnswer",
    "Limits",
    "Operation",
    "PinRequest",
    "PrefillProgress",
    "PrefixPin",
    "RequestLike",
    "Reuse",
    "ReuseReport",
    "Seam",
    "SessionOperations",
    "SessionRecord",
    "SessionRequest",
    "TextDifference",
    "TokenLogprob",
    "Totals",
    "Usage",
]

if not TYPE_CHECKING:  # for a type checker the old names do not exist
    _RENAMED = {
        "Answer": "Generation",
        "Ask": "GenerationRequest",
        "Kept": "SessionRecord",
        "Read": "PrefillProgress",
        "Written": "GeneratedToken",
    }

    def __getattr__(name: str) -> object:
        if name not in _RENAMED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        new_name = _RENAMED[name]
        warnings.warn(f"kvkeep.engine.{name} is now {new_name}", DeprecationWarning, stacklevel=2)
        return globals()[new_name]
