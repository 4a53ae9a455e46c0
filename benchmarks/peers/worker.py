"""The worker process of a peer: serves calls until its connection is closed."""

import gc
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.peers.base import Setup, TokenPeer, Variant
from kvkeep.runtime.memory import trim_heap


def serve(connection: Connection, setup: Setup, variant: Variant) -> None:
    """Run in the worker process. Each answer is `(status, value)`.

    The first status is "ready", "missing" (an import failed) or "failed"; then "done" or "failed"
    for each call `(method, arguments)`.
    """
    # Ctrl-C reaches all processes of a terminal: the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # tqdm's default lock is a system-wide semaphore, which a killed worker would leak.
    tqdm.set_lock(threading.RLock())
    try:
        peer = make_peer(setup, variant)
        connection.send(("ready", peer.about()))
    except ImportError as error:
        connection.send(("missing", str(error)))
        return
    except Exception as error:
        connection.send(("failed", _error_text(error)))
        return
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("done", _answer(peer, setup, method, arguments)))
        except Exception as error:
            connection.send(("failed", _error_text(error)))


def make_peer(setup: Setup, variant: Variant) -> TokenPeer:
    """Create the peer of a variant. Raises ImportError if its package is not installed."""
    if variant.peer == "llama.cpp":
        from benchmarks.peers.llama_cpp_peer import LlamaCppPeer

        return LlamaCppPeer(setup, _file(variant), variant.libraries)
    if variant.peer == "ik_llama.cpp":
        from benchmarks.peers.ik_llama_peer import IkLlamaPeer

        return IkLlamaPeer(setup, _file(variant))
    if variant.peer == "openvino":
        from benchmarks.peers.openvino_peer import OpenVinoPeer

        return OpenVinoPeer(setup, _file(variant))
    if variant.peer == "transformers":
        from benchmarks.peers.transformers_peer import TransformersPeer

        return TransformersPeer(setup)
    if variant.peer == "mlx-lm":
        from benchmarks.peers.mlx_peer import MlxPeer

        return MlxPeer(setup)
    from benchmarks.peers.kvkeep_peer import KvkeepPeer

    return KvkeepPeer(setup)


def _file(variant: Variant) -> Path:
    assert variant.file is not None, f"{variant.peer} reads a file"
    return variant.file


def _answer(peer: TokenPeer, setup: Setup, method: str, arguments: tuple[Any, ...]) -> Any:
    if method == "held":
        return _held(setup.device)
    if method == "settle":
        return _settle()
    return getattr(peer, method)(*arguments)


def _held(device: str) -> int:
    """Return bytes held by this process, and by it on another device.

    Excludes file pages if the system reports them: mapped weights are read on demand.
    """
    info = psutil.Process().memory_info()
    held: int = info.rss - getattr(info, "shared", 0)
    if device != "cpu":
        import torch

        held += torch.get_device_module(device).memory_allocated(device)
    return held


def _settle() -> None:
    """Return freed memory to the system, so that new contexts show in resident memory."""
    gc.collect()
    trim_heap()


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"
