"""A server with faults."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks.soak_faults.faults import Fault
from benchmarks.soak_faults.network import Network
from kvkeep.errors import KvkeepError

KEYS = ("the-first-key-of-two", "the-second-key-of-two")
START_SECONDS = 600
_NO_SIZE = 1  # bytes that files may have while the disk is full


class FaultyServer:
    """`kvkeep serve` on a folder, at one port whenever it runs, behind a network with faults.

    url: the network's. generation: how often it was killed. ready: set while it should answer.
    skipped: kinds of faults that this machine does not allow. memory: the server's limit for
    sessions. clock_library: libfaketime's, if there is one.
    """

    def __init__(self, folder: Path, model: str, memory: str, clock_library: Path | None) -> None:
        self.folder, self.store = folder, folder / "store"
        self.store.mkdir(parents=True, exist_ok=True)
        self._keys, self._clock = folder / "keys", folder / "clock"
        self._keys.write_text("\n".join(KEYS))
        self._clock.write_text("+0")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._network = Network(self._port)
        self.url = f"http://127.0.0.1:{self._network.port}"
        self._model, self._memory, self._clock_library = model, memory, clock_library
        self.generation, self.ready = 0, threading.Event()
        self.skipped, self.peak_bytes = set[str](), 0
        self._process = self._started()

    def apply(self, fault: Fault) -> None:
        """Do what a fault says, and end it after its time."""
        match fault.kind:
            case "kill":
                self._end(signal.SIGKILL)
            case "restart":
                self._end(signal.SIGTERM)
            case "stop":
                self._process.send_signal(signal.SIGSTOP)
                time.sleep(fault.seconds)
                self._process.send_signal(signal.SIGCONT)
            case "full disk":
                with self._full_disk():
                    time.sleep(fault.seconds)
            case "read only":
                with self._read_only():
                    time.sleep(fault.seconds)
            case "cut":
                self._network.cut(fault.seconds)
            case "slow":
                self._network.slow(fault.seconds)
            case "clock":
                if self._clock_library is None:
                    self.skipped.add("clock")
                self._clock.write_text(f"{fault.hours:+.3f}h")

    def look(self) -> int:
        """Return the resident bytes of the process."""
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def close(self) -> int:
        """Stop the server; return its status."""
        self._network.close()
        self._process.terminate()
        return self._process.wait()

    def _end(self, number: signal.Signals) -> None:
        self.ready.clear()
        self._process.send_signal(number)
        status = self._process.wait()
        if number == signal.SIGTERM and status != 0:
            raise KvkeepError(f"the server ended with status {status} on SIGTERM; expected 0")
        self.generation += number == signal.SIGKILL
        self._process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        environment = dict(os.environ)
        if self._clock_library is not None:
            environment |= {
                "LD_PRELOAD": str(self._clock_library),
                "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        arguments = f"serve -q --max-kv-size 512 --memory {self._memory}".split()
        arguments += ["--port", str(self._port)]
        arguments += ["-m", self._model, "--store", str(self.store)]
        arguments += ["--api-key-file", str(self._keys)]
        program = [sys.executable, "-c", "from kvkeep.cli.start import run; run()"]
        with (self.folder / "server.log").open("ab") as log:
            process = subprocess.Popen([*program, *arguments], stderr=log, env=environment)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise KvkeepError(f"the server ended with status {process.returncode} at its start")
            try:
                if httpx.get(f"http://127.0.0.1:{self._port}/health").is_success:
                    self.ready.set()
                    return process
            except httpx.TransportError:
                time.sleep(0.1)
        raise KvkeepError(f"the server did not answer within {START_SECONDS} seconds")

    @contextmanager
    def _full_disk(self) -> Iterator[None]:
        _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (_NO_SIZE, hard))
        try:
            yield
        finally:
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (hard, hard))

    @contextmanager
    def _read_only(self) -> Iterator[None]:
        """Mount a read-only view of the store over it. Files that are open stay writable."""
        view = self.folder / "view"
        view.mkdir(exist_ok=True)
        store, mount = str(self.store), ["mount", "--bind", str(self.store), str(view)]
        if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
            self.skipped.add("read only")
            yield
            return
        with ExitStack() as mounts:
            mounts.callback(subprocess.run, ["umount", "--lazy", str(view)], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
            subprocess.run(["mount", "--bind", str(view), store], check=True)
            mounts.callback(subprocess.run, ["umount", "--lazy", store], check=True)
            yield
