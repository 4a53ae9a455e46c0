"""Servers over one store, in this process."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from stores import _s3, objects, s3, s3_url

from kvkeep.engine import Engine, Limits
from kvkeep.fleet.leases import SessionLeases
from kvkeep.fleet.middleware import SessionMiddleware
from kvkeep.fleet.pins import SharedPins
from kvkeep.fleet.replica import shared_session_middleware
from kvkeep.model import Model
from kvkeep.server.app import application
from kvkeep.server.connections import connection_config
from kvkeep.server.keys import ApiKeys
from kvkeep.server.service import Service
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.sessions.shared import SharedLabels, SharedSessions

__all__ = ["_s3", "objects", "s3", "s3_url"]


@pytest.fixture(params=["folder", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store. tests/shared has all kinds."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    return (tmp_path / "store").as_uri()


class Replica:
    """A running server, its URL, its engine and its options."""

    def __init__(self, url: str, engine: Engine, leases: SessionLeases, service: Service):
        self.url, self.engine, self.leases, self.service = url, engine, leases, service

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)


@contextmanager
def replica(
    model: Model,
    objects: ObjectStore,
    name: str,
    lease: float = 2.0,
    grace: int | None = None,
    **settings: str,
) -> Iterator[Replica]:
    """Run a server. grace: seconds that requests have at its end; None for as many as they take."""
    engine = Engine(
        model,
        settings={"max_kv_size": 512, **settings},
        limits=Limits(memory=500_000_000),
        snapshots=lambda owner: SharedLabels(objects, owner),
    )
    leases = SessionLeases(
        engine, lambda owner: SharedSessions(objects, owner, writer=name, lease_seconds=lease)
    )
    service = Service(engine, "smollm2", ApiKeys())
    pins = SharedPins(engine, objects, name)
    pins.start()

    def middleware(app: Any) -> SessionMiddleware:
        return shared_session_middleware(app, leases, pins, name)

    app = application(service, middleware=middleware)
    config = connection_config(app, port=0, timeout_graceful_shutdown=grace)
    server = uvicorn.Server(config)

    async def serve_and_drain() -> None:
        await server.serve()
        await leases.drain()

    thread = threading.Thread(target=asyncio.run, args=(serve_and_drain(),), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Replica(f"http://127.0.0.1:{port}", engine, leases, service)
    finally:
        service.closing = server.should_exit = True
        thread.join()
        pins.close()
        engine.close()


@pytest.fixture
def replicas(smollm2: Model, objects: ObjectStore) -> Iterator[Callable[..., Replica]]:
    """Return a function that runs servers over one store, one for each name."""
    running: dict[str, Replica] = {}
    with ExitStack() as stack:

        def make(name: str, lease: float = 2.0, **settings: str) -> Replica:
            if name not in running:
                server = replica(smollm2, objects, name, lease, **settings)
                running[name] = stack.enter_context(server)
            return running[name]

        yield make
