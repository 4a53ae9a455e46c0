"""A fleet as people start it: `kvkeep fleet` over an object store, and a server that is killed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet.test_keeper import STORY, alone
from object_server import ObjectServer
from patience import PATIENCE

from kvkeep.model import Model
from kvkeep.storage.objects import open_object_store
from kvkeep.storage.sessions.shared import SharedSessions

pytest.importorskip("ray.serve", reason="a fleet needs kvkeep[fleet]")
PROMPT = {"text": STORY, "max_tokens": 200, "ignore_eos": True}


@contextmanager
def fleet(url: str, environment: dict[str, str], *more: str) -> Iterator[tuple[str, Any]]:
    """Where it answers, and its process."""
    options = ["--store", url, "--port", "0", "--max-kv-size", "512", "--keep", "0", *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvkeep", "fleet", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, line + (process.stderr.read() if process.stderr else "")
        yield line.split()[-1], process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE)
        except BaseException:
            process.kill()
            raise


@pytest.fixture(scope="module")
def running(_s3: ObjectServer, smollm2_folder: Path) -> Iterator[tuple[str, str]]:
    """Two servers, for all tests here: where they answer, and the URL of their store."""
    url = f"s3://kvkeep/fleet-{os.getpid()}"
    with fleet(url, _s3.environment, "--prefix-cache") as (at, _):
        yield at, url


def client(at: str, session: str, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=at, headers={"x-session-id": session, **headers}, timeout=PATIENCE)


def test_sessions_and_chats_are_answered(running: tuple[str, str]) -> None:
    at, _ = running
    with client(at, "plain") as asks:
        assert asks.get("/health").json() == {"status": "ok"}
        made = asks.post("/v1/sessions", json={"name": "plain"})
        assert made.status_code == 201, made.text
        body = {"content": "Name a colour.", "max_tokens": 5, "stream": True}
        with asks.stream("POST", "/v1/sessions/plain/turns", json=body) as answer:
            assert [line for line in answer.iter_lines() if line.startswith("event: done")]
        messages = [{"role": "user", "content": "Say hello."}]
        chat = {"model": "any", "messages": messages, "max_tokens": 4}
        assert asks.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"]
        assert [entry["name"] for entry in asks.get("/v1/sessions").json()["data"]] == ["plain"]


def test_who_says_nothing_comes_to_the_server_that_knows(running: tuple[str, str]) -> None:
    """Requests without `x-session-id`: about one session, and turns of one conversation."""
    at, _ = running
    servers = set[str]()
    with httpx.Client(base_url=at, timeout=PATIENCE) as asks:
        assert asks.post("/v1/sessions", json={"name": "unsaid"}).status_code == 201
        found = [asks.get("/v1/sessions/unsaid") for _ in range(6)]
        assert len({answer.headers["x-kvkeep-server"] for answer in found}) == 1
        for begins in range(32):
            if begins >= 4 and len(servers) == 2:
                break
            messages = [{"role": "user", "content": f"{begins}: say hello."}]
            of_turns = set[str]()
            for _ in range(2):
                chat = {"model": "any", "messages": messages, "max_tokens": 2}
                answer = asks.post("/v1/chat/completions", json=chat)
                of_turns.add(answer.headers["x-kvkeep-server"])
                message = answer.json()["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "Go on."}]
            assert len(of_turns) == 1
            servers |= of_turns
    assert len(servers) == 2, "conversations are spread"


def test_a_server_is_killed_in_the_middle_of_an_answer(
    running: tuple[str, str], smollm2: Model
) -> None:
    """The same request with the same key goes on at another server, as if nothing had been: of
    each of the two that there are now. Who takes the place of a killed one may take the other's
    sessions, too."""
    at, url = running
    for server in _servers(at):
        for number in range(100):
            if _killed(at, url, f"killed-{server}-{number}".replace(":", "-"), smollm2, server):
                break
        else:
            raise AssertionError(f"no session went to {server}")


def _killed(at: str, url: str, name: str, model: Model, server: str) -> bool:
    """A session whose server is killed while it writes; False if that is not the one to kill."""
    body, key = {**PROMPT, "stream": True}, {"Idempotency-Key": f"kill {name}"}
    with client(at, name) as asks:
        made = asks.post("/v1/sessions", json={"name": name})
        assert made.status_code == 201, made.text
    with client(at, name, **key) as asks:
        killed, before = 0.0, 0
        with (
            suppress(httpx.HTTPError),
            asks.stream("POST", f"/v1/sessions/{name}/generate", json=body) as answer,
        ):
            if answer.headers["x-kvkeep-server"] != server:
                return False
            for number, _ in enumerate(answer.iter_lines()):
                if number == 60:
                    before = _gen(url, name)
                    killed = time.monotonic()
                    os.kill(int(server.split(":")[1]), signal.SIGKILL)
        assert killed
        found, by = _until_done(asks, name, body)
        print(f"{time.monotonic() - killed:.2f} s from the kill to the end of the answer")
    assert by != server
    assert [found["tokens"]] == alone(model, PROMPT)
    assert _gen(url, name) == before + 1
    return True


def _gen(url: str, name: str) -> int:
    """How many have written the session."""
    version = SharedSessions(open_object_store(url)).objects_of(name).head()
    assert version is not None
    return version.head.gen


def _until_done(asks: httpx.Client, name: str, body: dict[str, Any]) -> tuple[Any, str]:
    """As a client does that was told nothing: the same once more, until it is answered; by whom."""
    last = time.monotonic() + PATIENCE
    while time.monotonic() < last:
        try:
            answer = asks.post(f"/v1/sessions/{name}/generate", json=body)
        except httpx.HTTPError:
            continue
        if answer.status_code == 200 and "event: done" in answer.text:
            done = json.loads(answer.text.rpartition("event: done\ndata: ")[2])
            return done, answer.headers["x-kvkeep-server"]
        time.sleep(0.05)
    raise AssertionError(answer.text)


def _servers(at: str) -> list[str]:
    """The two."""
    found = list[str]()
    with httpx.Client(base_url=at, timeout=PATIENCE) as asks:
        for number in range(100):
            answer = asks.get("/v1/models", headers={"x-session-id": f"asked-{number}"})
            server = answer.headers["x-kvkeep-server"]
            if server not in found:
                found.append(server)
            if len(found) == 2:
                return found
    raise AssertionError("all requests went to one server")


def test_a_cluster_that_is_there_is_joined_by_one_fleet(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    at = f"127.0.0.1:{free_port()}"
    store = (tmp_path / "store").as_uri()
    with head(at), fleet(store, {}, "--address", at, "--replicas", "1") as (url, _):
        second = refused("--store", store, "--address", at)
        assert second.endswith("already serves: run `serve shutdown`")
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200, answer.text


def test_a_cluster_that_is_not_there_is_told_at_once(smollm2_folder: Path, tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    told = refused("--store", (tmp_path / "store").as_uri(), "--address", at)
    assert told.startswith(f"kvkeep: error: no Ray cluster answers at {at}")


def refused(*options: str) -> str:
    """What is said last by a fleet that does not start."""
    run = subprocess.run(
        [sys.executable, "-m", "kvkeep", "fleet", "--port", "0", *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 2
    return run.stderr.splitlines()[-1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def head(at: str) -> Iterator[None]:
    """A cluster's first machine, as `ray start` makes it."""
    host, port = at.split(":")
    folder = tempfile.mkdtemp(dir="/tmp")  # short; in Ray's own, others would find this cluster
    options = f"--head --block --node-ip-address={host} --port={port} --temp-dir={folder}"
    ray = Path(sys.executable).with_name("ray")
    process = subprocess.Popen(
        [ray, "start", *options.split(), "--include-dashboard=false", "--disable-usage-stats"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not answers(host, int(port)):
            assert process.poll() is None
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)
        shutil.rmtree(folder, ignore_errors=True)


def answers(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port), timeout=1).close()
        return True
    return False
