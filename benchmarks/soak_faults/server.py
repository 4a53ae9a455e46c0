"""A server with faults."""

import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from benchmarks.soak_faults.faults import Fault
from benchmarks.soak_faults.network import Network
from kvkeep.errors import KvkeepError

KEYS = ("the-first-key-of-two", "the-second-key-of-two")
START_SECONDS = 600
_NO_SIZE = 1  # bytes that files may have while the disk is full
_HUNG_SECONDS = 30  # without a response
_SPARE_BYTES = 2**20  # by which the server's memory may grow while there is little


class FaultyServer:
    """`kvkeep serve` on a folder, at one port whenever it runs, behind a network with faults.

    url: the network's. generation: how often it was killed. hung: how often because it hung after a
    lack of memory. ready: set while it should answer. skipped: kinds of faults that this machine
    does not allow. memory: the server's limit for sessions. clock_library: libfaketime's, if there
    is one. store_url: of a store in place of the folder's, which others share (is_shared). name:
    of this server among those.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        memory: str,
        clock_library: Path | None,
        store_url: str | None = None,
        name: str = "",
    ) -> None:
        self.folder, self.store = folder, folder / "store"
        self.store.mkdir(parents=True, exist_ok=True)
        self.is_shared = store_url is not None
        self._store_arguments = ["--store", store_url or str(self.store)]
        self._keys, self._clock = folder / "keys", folder / f"clock{name}"
        self._keys.write_text("\n".join(KEYS))
        if self.is_shared:
            secret = folder / "secret"
            secret.write_text(secrets.token_hex(32) if not secret.exists() else secret.read_text())
            self._store_arguments += ["--secret-file", str(secret)]
        self._clock.write_text("+0")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{self._port}"
        self._network = Network(self._port)
        self.url = f"http://127.0.0.1:{self._network.port}"
        self._model, self._memory, self._clock_library = model, memory, clock_library
        self.generation, self.hung, self.ready = 0, 0, threading.Event()
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
            case "memory":
                with self._little_memory():
                    time.sleep(fault.seconds)
                self._replace_unless_alive()
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

    def ended(self) -> int | None:
        """Return the status of a process that has ended by itself."""
        return self._process.poll()

    def close(self) -> int:
        """Stop the server; return its status."""
        self._network.close()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_HUNG_SECONDS)
        self._process.kill()
        return self._process.wait()

    def _end(self, number: signal.Signals) -> None:
        self.ready.clear()
        self._process.send_signal(number)
        status = self._process.wait()
        if number == signal.SIGTERM and status != 0:
            raise KvkeepError(f"the server ended with status {status} on SIGTERM; expected 0")
        self.generation += number == signal.SIGKILL
        self._process = self._started()

    def _replace_unless_alive(self) -> None:
        """Start the server again if it has ended or its engine hangs, which counts as a kill.

        A thread that has no memory to start in makes the one that starts it wait forever (CPython's
        issue 140746), with all locks that this one holds.
        """
        headers, sessions = {"Authorization": f"Bearer {KEYS[0]}"}, f"{self._address}/v1/sessions"
        with suppress(httpx.TransportError):
            httpx.get(sessions, headers=headers, timeout=_HUNG_SECONDS)
            return
        self.hung += self._process.poll() is None
        self._end(signal.SIGKILL)

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
        arguments += ["-m", self._model, *self._store_arguments]
        arguments += ["--api-key-file", str(self._keys)]
        program = [sys.executable, "-c", "from kvkeep.cli.start import run; run()"]
        with (self.folder / "server.log").open("ab") as log:
            process = subprocess.Popen([*program, *arguments], stderr=log, env=environment)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise KvkeepError(f"the server ended with status {process.returncode} at its start")
            try:
                if httpx.get(f"{self._address}/health").is_success:
                    self.ready.set()
                    return process
            except httpx.TransportError:
                time.sleep(0.1)
        raise KvkeepError(f"the server did not answer within {START_SECONDS} seconds")

    def _full_disk(self) -> AbstractContextManager[None]:
        return self._limited(resource.RLIMIT_FSIZE, _NO_SIZE)

    def _little_memory(self) -> AbstractContextManager[None]:
        """Limit the process to the writable memory that it has, so that allocations fail."""
        data = psutil.Process(self._process.pid).memory_info().data
        return self._limited(resource.RLIMIT_DATA, data + _SPARE_BYTES)

    @contextmanager
    def _limited(self, kind: int, limit: int) -> Iterator[None]:
        """Limit a resource of the process, which may end meanwhile."""
        process = self._process.pid
        _, hard = resource.prlimit(process, kind)
        resource.prlimit(process, kind, (limit, hard))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(process, kind, (hard, hard))

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
