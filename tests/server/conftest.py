"""A server over the default model, in this process, for tests of its APIs."""

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from kvkeep.engine import Engine, Limits
from kvkeep.model import Model
from kvkeep.server.app import application
from kvkeep.server.connections import connection_config
from kvkeep.server.keys import ApiKeys
from kvkeep.server.service import Service
from kvkeep.types import ContextPolicy
from tests.scripted_model import ScriptedEngine, model_with_text_of


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
    origins: Collection[str] = (),
) -> Iterator[RunningServer]:
    """Serve an engine, and close it. origins: allowed; the rest as of `running_server`."""
    service = Service(engine, "smollm2", keys or ApiKeys(), allow_edit=edits)
    service.context_policy = context_policy
    config = connection_config(application(service, origins=origins), port=0)
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


class ScriptedServer(RunningServer):
    """A server whose model writes given answers, and has the default model's text."""

    def __init__(
        self, url: str, service: Service, answers: list[str], prompts: list[str] | None = None
    ):
        super().__init__(url, service)
        self._answers, self.prompts = answers, [] if prompts is None else prompts

    def write(self, *texts: str, output_format: str = "hermes") -> None:
        """From now on, make each generation write the next of the texts, again and again.

        output_format: that the model is taken to write. Its markers are plain text. `prompts` are
        those of the generations since then.
        """
        self.service.model.renderer.choose_output_format(output_format)
        self._answers[:] = texts
        self.prompts.clear()


@pytest.fixture(scope="module")
def scripted(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """Run one scripted server for a module."""
    model = model_with_text_of(tmp_path_factory.mktemp("model"), smollm2.text.folder)
    answers: list[str] = []
    prompts: list[str] = []

    def next_answer(prompt: str) -> str:
        prompts.append(prompt)
        answers.append(answers.pop(0))
        return answers[-1]

    engine = ScriptedEngine(model, next_answer, settings={"max_kv_size": 2048})
    with serving(engine) as running:
        yield ScriptedServer(running.url, running.service, answers, prompts)


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run one server for a module; its tests leave nothing behind that others see."""
    with running_server(smollm2, tmp_path_factory.mktemp("server")) as running:
        yield running
