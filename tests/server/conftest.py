"""A server over the default model, in this process, for tests of its APIs."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from kvkeep.engine import Engine, Limits
from kvkeep.model import Model
from kvkeep.server.app import application
from kvkeep.server.keys import ApiKeys
from kvkeep.server.service import Service
from kvkeep.types import ContextPolicy


class RunningServer:
    """A running server and its URL."""

    def __init__(self, url: str, service: Service):
        self.url, self.service = url, service

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)


def without_saved_revision(entry: dict[str, Any]) -> dict[str, Any]:
    """Drop the field that changes without a request: the server saves sessions by itself."""
    return {name: value for name, value in entry.items() if name != "saved_revision"}


@contextmanager
def running_server(
    model: Model,
    folder: Path,
    keys: ApiKeys | None = None,
    limits: Limits = Limits(memory=1_000_000_000),  # noqa: B008 (frozen)
    edits: bool = False,
    settings: Mapping[str, Any] = {"max_kv_size": 2048},
    context_policy: ContextPolicy = "refuse",
) -> Iterator[RunningServer]:
    """Run a server. keys: accepted keys; None to need none. edits: whether the web UI may edit.

    settings: of its sessions.
    """
    engine = Engine(model, settings=dict(settings), limits=limits, folder=folder)
    with serving(engine, keys, edits, context_policy) as running:
        yield running


@contextmanager
def serving(
    engine: Engine,
    keys: ApiKeys | None = None,
    edits: bool = False,
    context_policy: ContextPolicy = "refuse",
) -> Iterator[RunningServer]:
    """Serve an engine, and close it. Arguments as of `running_server`."""
    service = Service(engine, "smollm2", keys or ApiKeys(), allow_edit=edits)
    service.context_policy = context_policy
    config = uvicorn.Config(application(service), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield RunningServer(f"http://127.0.0.1:{port}", service)
    finally:
        service.closing = server.should_exit = True
        thread.join()
        engine.close()


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run one server for a module; its tests leave nothing behind that others see."""
    with running_server(smollm2, tmp_path_factory.mktemp("server")) as running:
        yield running
