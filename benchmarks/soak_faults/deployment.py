"""One server, or two over one store, which may be an object store behind a network with faults."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from benchmarks.fleet.servers import object_store
from benchmarks.soak_faults.faults import KINDS, Fault
from benchmarks.soak_faults.network import Network
from benchmarks.soak_faults.server import FaultyServer

STORE_KINDS = ("store cut", "store slow")
_OF_FOLDERS = ("full disk", "read only")


class Deployment:
    """The servers that users reach, each at its own address.

    store_network: before the object store, if there is one. ready: set while an answer can be
    expected; of two servers, one is enough. is_shared: whether each change is in the store before
    it is acknowledged.
    """

    def __init__(self, servers: list[FaultyServer], store_network: Network | None) -> None:
        self._servers, self._store_network = servers, store_network
        self.urls, self.is_shared = [server.url for server in servers], servers[0].is_shared
        self.ready = servers[0].ready if len(servers) == 1 else threading.Event()
        self.ready.set()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of faults that are possible here."""
        if self._store_network is None:
            return KINDS
        return (*(kind for kind in KINDS if kind not in _OF_FOLDERS), *STORE_KINDS)

    @property
    def generation(self) -> int:
        """The number of kills that may have lost changes: with a shared store, none does."""
        return 0 if self.is_shared else sum(server.generation for server in self._servers)

    @property
    def skipped(self) -> set[str]:
        return set[str]().union(*(server.skipped for server in self._servers))

    @property
    def hung(self) -> int:
        return sum(server.hung for server in self._servers)

    @property
    def resident_bytes(self) -> int:
        return sum(server.look() for server in self._servers)

    def apply(self, fault: Fault) -> None:
        """Let a fault happen to the store, or to one of the servers, and end it after its time."""
        if fault.kind in STORE_KINDS:
            assert self._store_network is not None
            part = self._store_network
            (part.cut if fault.kind == "store cut" else part.slow)(fault.seconds)
        else:
            self._servers[fault.at % len(self._servers)].apply(fault)

    def ended(self) -> int | None:
        """Return the status of a server that has ended by itself."""
        statuses = (server.ended() for server in self._servers)
        return next((status for status in statuses if status is not None), None)

    def close(self) -> int:
        """Stop all; return the status of one that failed, or 0."""
        return next(filter(None, [server.close() for server in self._servers]), 0)


@contextmanager
def object_store_behind_network() -> Iterator[tuple[str, Network]]:
    """Run an S3 server; yields a URL for stores of this process and its children, and a network."""
    with patch.dict(os.environ), object_store() as url:
        port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
        network = Network(port)
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{network.port}"
        try:
            yield url, network
        finally:
            network.close()


@contextmanager
def deployment(
    folder: Path,
    model: str,
    memory: str,
    clock_library: Path | None,
    is_fleet: bool,
    uses_objects: bool,
) -> Iterator[Deployment]:
    """Start servers; arguments as of `FaultyServer`. Stopping them is left to the caller."""

    def servers(store: str | None) -> list[FaultyServer]:
        names = ("first", "second") if is_fleet else ("",)
        return [FaultyServer(folder, model, memory, clock_library, store, name) for name in names]

    if uses_objects:
        with object_store_behind_network() as (url, network):
            yield Deployment(servers(url), network)
    else:
        yield Deployment(servers((folder / "store").as_uri() if is_fleet else None), None)
