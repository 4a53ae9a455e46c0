"""kvkeep: a bounded, durable and editable memory for language models."""

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("kvkeep runs on Linux and macOS; on Windows it runs in WSL 2")

from kvkeep.errors import KvkeepError
from kvkeep.version import __version__

if TYPE_CHECKING:
    from kvkeep.cache import Bits
    from kvkeep.client import AsyncClient, Client
    from kvkeep.compression.calibration.calibration import Calibration, load_calibration
    from kvkeep.compression.calibration.measure import calibrate
    from kvkeep.integrations.transformers import from_transformers
    from kvkeep.loader import load_model
    from kvkeep.model import Model
    from kvkeep.policies import Archive, Full, SelfExtend, Shift, Sliding
    from kvkeep.session.compression import CompressionReport
    from kvkeep.session.feeding import Feeding, FeedReport, FeedStep
    from kvkeep.session.group import SessionGroup
    from kvkeep.session.sampling import Sampling
    from kvkeep.session.session import Session
    from kvkeep.storage.prefixes.store import PrefixStore
    from kvkeep.storage.snapshots.fingerprint import Exactness
    from kvkeep.storage.snapshots.snapshot import Snapshot

__all__ = [
    "Archive",
    "AsyncClient",
    "Bits",
    "Calibration",
    "Client",
    "CompressionReport",
    "Exactness",
    "FeedReport",
    "FeedStep",
    "Feeding",
    "Full",
    "KvkeepError",
    "Model",
    "PrefixStore",
    "Sampling",
    "SelfExtend",
    "Session",
    "SessionGroup",
    "Shift",
    "Sliding",
    "Snapshot",
    "__version__",
    "calibrate",
    "from_transformers",
    "load_calibration",
    "load_model",
]

_HOMES = {
    "Archive": "kvkeep.policies",
    "AsyncClient": "kvkeep.client",
    "Bits": "kvkeep.cache",
    "Calibration": "kvkeep.compression.calibration.calibration",
    "Client": "kvkeep.client",
    "CompressionReport": "kvkeep.session.compression",
    "Exactness": "kvkeep.storage.snapshots.fingerprint",
    "FeedReport": "kvkeep.session.feeding",
    "FeedStep": "kvkeep.session.feeding",
    "Feeding": "kvkeep.session.feeding",
    "Full": "kvkeep.policies",
    "Model": "kvkeep.model",
    "PrefixStore": "kvkeep.storage.prefixes.store",
    "Sampling": "kvkeep.session.sampling",
    "SelfExtend": "kvkeep.policies",
    "Session": "kvkeep.session.session",
    "SessionGroup": "kvkeep.session.group",
    "Shift": "kvkeep.policies",
    "Sliding": "kvkeep.policies",
    "Snapshot": "kvkeep.storage.snapshots.snapshot",
    "calibrate": "kvkeep.compression.calibration.measure",
    "from_transformers": "kvkeep.integrations.transformers",
    "load_calibration": "kvkeep.compression.calibration.calibration",
    "load_model": "kvkeep.loader",
}


def __getattr__(name: str) -> Any:
    """Imports torch only when something that needs it is asked for: help must open at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
    found = globals()[name] = getattr(_imported(_HOMES[name]), name)
    return found


def _imported(module: str) -> Any:
    """Looks for no garbage meanwhile: modules stay, and torch's million objects take 0.1 s."""
    import gc
    from importlib import import_module

    collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collecting:
            gc.enable()
