"""kvkeep: a KV cache for language models that can be bounded, saved, edited and compressed."""

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("kvkeep runs on Linux and macOS; on Windows it runs in WSL 2")

from kvkeep.errors import *  # noqa: F403
from kvkeep.errors import KvkeepError
from kvkeep.version import __version__

if TYPE_CHECKING:
    from kvkeep.cache import Bits
    from kvkeep.client import AsyncClient, Client
    from kvkeep.compression.calibration.calibration import Calibration, load_calibration
    from kvkeep.evaluate.calibrate import calibrate
    from kvkeep.integrations.transformers import from_transformers
    from kvkeep.loader import load_model
    from kvkeep.model import Model
    from kvkeep.policies import Archive, Full, SelfExtend, Shift, Sliding
    from kvkeep.session.compaction import CompactionReport
    from kvkeep.session.compression import CompressionReport
    from kvkeep.session.conversation import Conversation
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
    "CompactionReport",
    "CompressionReport",
    "Conversation",
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

_EXPORTS = {  # names by the module that defines them
    "kvkeep.cache": ("Bits",),
    "kvkeep.client": ("AsyncClient", "Client"),
    "kvkeep.compression.calibration.calibration": ("Calibration", "load_calibration"),
    "kvkeep.evaluate.calibrate": ("calibrate",),
    "kvkeep.integrations.transformers": ("from_transformers",),
    "kvkeep.loader": ("load_model",),
    "kvkeep.model": ("Model",),
    "kvkeep.policies": ("Archive", "Full", "SelfExtend", "Shift", "Sliding"),
    "kvkeep.session.compaction": ("CompactionReport",),
    "kvkeep.session.compression": ("CompressionReport",),
    "kvkeep.session.conversation": ("Conversation",),
    "kvkeep.session.feeding": ("Feeding", "FeedReport", "FeedStep"),
    "kvkeep.session.group": ("SessionGroup",),
    "kvkeep.session.sampling": ("Sampling",),
    "kvkeep.session.session": ("Session",),
    "kvkeep.storage.prefixes.store": ("PrefixStore",),
    "kvkeep.storage.snapshots.fingerprint": ("Exactness",),
    "kvkeep.storage.snapshots.snapshot": ("Snapshot",),
}


def __getattr__(name: str) -> Any:
    """Import an exported name on first use: `kvkeep --help` must not wait for torch."""
    for module, names in _EXPORTS.items():
        if name in names:
            value = globals()[name] = getattr(_import_without_gc(module), name)
            return value
    raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")


def _import_without_gc(module: str) -> Any:
    """Import a module with garbage collection off, which takes 0.1 s over torch's objects."""
    import gc
    from importlib import import_module

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if was_enabled:
            gc.enable()
