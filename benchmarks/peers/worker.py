"""A peer's own process: it answers one question after another until its connection is closed."""

import gc
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.peers.base import Peer, Setup, Variant
from kvkeep.runtime.memory import trim_heap


def serve(connection: Connection, setup: Setup, variant: Variant) -> None:
    """What a worker's process runs. Each answer is `(status, value)`.

    The first one is "ready", "missing" (it cannot be imported) or "failed"; then "done" or
    "failed" for each question `(method, arguments)`.
    """
    # Ctrl-C reaches all processes of a terminal: the one that asks decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Its usual lock is a system-wide semaphore, which a worker that is ended at once would leave.
    tqdm.set_lock(threading.RLock())
    try:
        peer = make_peer(setup, variant)
        connection.send(("ready", peer.about()))
    except ImportError as error:
        connection.send(("missing", str(error)))
        return
    except Exception as error:
        connection.send(("failed", _words(error)))
        return
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("done", _answer(peer, setup, method, arguments)))
        except Exception as error:
            connection.send(("failed", _words(error)))


def make_peer(setup: Setup, variant: Variant) -> Peer:
    """Raises ImportError where what the peer needs is not installed."""
    if variant.peer == "llama.cpp":
        from benchmarks.peers.llama_cpp_peer import LlamaCppPeer

        assert variant.file is not None, "llama.cpp reads a file"
        return LlamaCppPeer(setup, variant.file)
    if variant.peer == "transformers":
        from benchmarks.peers.transformers_peer import TransformersPeer

        return TransformersPeer(setup)
    if variant.peer == "mlx-lm":
        from benchmarks.peers.mlx_peer import MlxPeer

        return MlxPeer(setup)
    from benchmarks.peers.kvkeep_peer import KvkeepPeer

    return KvkeepPeer(setup)


def _answer(peer: Peer, setup: Setup, method: str, arguments: tuple[Any, ...]) -> Any:
    if method == "held":
        return _held(setup.device)
    if method == "settle":
        return _settle()
    return getattr(peer, method)(*arguments)


def _held(device: str) -> int:
    """Bytes in memory: of this process, and what it has set aside on another device.

    Without pages of files, where they are told apart: a mapped weight is read when it is needed.
    """
    info = psutil.Process().memory_info()
    held: int = info.rss - getattr(info, "shared", 0)
    if device != "cpu":
        import torch

        held += torch.get_device_module(device).memory_allocated(device)
    return held


def _settle() -> None:
    """Gives back what is kept for later: a context made in it would seem to take no memory."""
    gc.collect()
    trim_heap()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"
