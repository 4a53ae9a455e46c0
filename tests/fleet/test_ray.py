"""`kvkeep fleet` over an object store, with a server that is killed."""

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
from fleet.test_shared_sessions import STORY, generate_locally
from object_server import ObjectServer
from timeouts import PATIENCE

from kvkeep.model import Model
from kvkeep.storage.objects import open_object_store
from kvkeep.storage.sessions.shared import SharedSessions

pytest.importorskip("ray.serve", reason="a fleet needs kvkeep[fleet]")
PROMPT = {"temperature": 0, "text": STORY, "max_tokens": 200, "ignore_eos": True}


@contextmanager
def start_fleet(
    url: str, environment: dict[str, str], *arguments: str
) -> Iterator[tuple[str, Any]]:
    """Start a fleet; return its address and its process."""
    options = ["--store", url, "--port", "0", "--max-kv-size", "512", "--keep", "0", *arguments]
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
    """Run two servers for all tests here; return their address and their store's URL."""
    url = f"s3://kvkeep/fleet-{os.getpid()}"
    with start_fleet(url, _s3.environment, "--prefix-cache") as (at, _):
        yield at, url


def client(at: str, session: str, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=at, headers={"x-session-id": session, **headers}, timeout=PATIENCE)


def test_sessions_and_chats_work(running: tuple[str, str]) -> None:
    at, _ = running
    with client(at, "plain") as http:
        assert http.get("/health").json() == {"status": "ok"}
        created = http.post("/v1/sessions", json={"name": "plain"})
        assert created.status_code == 201, created.text
        body = {"content": "Name a colour.", "max_tokens": 5, "stream": True}
        with http.stream("POST", "/v1/sessions/plain/turns", json=body) as response:
            assert [line for line in response.iter_lines() if line.startswith("event: done")]
        messages = [{"role": "user", "content": "Say hello."}]
        chat = {"model": "any", "messages": messages, "max_tokens": 4}
        assert http.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"]
        assert "plain" in [entry["name"] for entry in http.get("/v1/sessions").json()["data"]]


def test_requests_without_a_session_header_reach_the_server_with_the_prefix(
    running: tuple[str, str],
) -> None:
    """Requests for one session, and turns of one conversation, reach one server."""
    at, _ = running
    servers = set[str]()
    with httpx.Client(base_url=at, timeout=PATIENCE) as http:
        assert http.post("/v1/sessions", json={"name": "unsaid"}).status_code == 201
        result = [http.get("/v1/sessions/unsaid") for _ in range(6)]
        assert len({response.headers["x-kvkeep-server"] for response in result}) == 1
        for begins in range(32):
            if begins >= 4 and len(servers) == 2:
                break
            messages = [{"role": "user", "content": f"{begins}: say hello."}]
            of_turns = set[str]()
            for _ in range(2):
                chat = {"model": "any", "messages": messages, "max_tokens": 2, "temperature": 0}
                response = http.post("/v1/chat/completions", json=chat)
                of_turns.add(response.headers["x-kvkeep-server"])
                message = response.json()["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "Go on."}]
            assert len(of_turns) == 1
            servers |= of_turns
    assert len(servers) == 2, "conversations are spread"


def test_a_changed_prompt_is_aligned_in_place_by_the_server_that_has_it(
    running: tuple[str, str],
) -> None:
    """Without a header that names the server, for several chats; pins are listed by each."""
    at, _ = running
    with httpx.Client(base_url=at, timeout=PATIENCE) as http:
        for chat in range(4):
            for day in ("Monday", "Tuesday"):
                system = f"Today is {day}. {STORY}"
                messages = [{"role": "system", "content": system}]
                messages.append({"role": "user", "content": f"Tell me about colour {chat}."})
                body = {"messages": messages, "max_tokens": 1, "prompt_cache_key": f"chat-{chat}"}
                body["alignment"] = {"mode": "in_place", "min_saved": 20}
                answer = http.post("/v1/chat/completions", json=body).json()
            report = answer["x_kvkeep"]
            assert report["reuse"] == "in_place", report
            assert report["moved"] > report["evaluated"]
        deadline = time.monotonic() + PATIENCE
        keys = set[str]()
        while len(keys) < 4:  # each server lists its own, and soon those of others
            assert time.monotonic() < deadline
            keys = {pin["prompt_cache_key"] for pin in http.get("/v1/prefix/pins").json()["data"]}
            keys = {key for key in keys if key and key.startswith("chat-")}


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_retry_continues_after_a_server_was_killed(
    running: tuple[str, str], smollm2: Model, kills: int
) -> None:
    """The same request with the same key succeeds at the other server, for one or for each.

    The replacement of a killed server may take over sessions of the other server, too.
    """
    at, url = running
    for server in _servers(at)[:kills]:
        for number in range(100):
            if _kill_during_generation(
                at, url, f"killed-{server}-{number}".replace(":", "-"), smollm2, server
            ):
                break
        else:
            raise AssertionError(f"no session went to {server}")


def _kill_during_generation(at: str, url: str, name: str, model: Model, server: str) -> bool:
    """Kill the server of a session while it generates; return False if it is another server."""
    body, key = {**PROMPT, "stream": True}, {"Idempotency-Key": f"kill {name}"}
    with client(at, name) as http:
        created = http.post("/v1/sessions", json={"name": name})
        assert created.status_code == 201, created.text
    with client(at, name, **key) as http:
        killed, before = 0.0, 0
        with (
            suppress(httpx.HTTPError),
            http.stream("POST", f"/v1/sessions/{name}/generate", json=body) as response,
        ):
            if response.headers["x-kvkeep-server"] != server:
                return False
            for number, _ in enumerate(response.iter_lines()):
                if number == 60:
                    before = _commit_count(url, name)
                    killed = time.monotonic()
                    os.kill(int(server.split(":")[1]), signal.SIGKILL)
        assert killed
        result, by = _retry_until_done(http, name, body)
        print(f"{time.monotonic() - killed:.2f} s from the kill to the end of the response")
    assert by != server
    assert [result["tokens"]] == generate_locally(model, PROMPT)
    assert _commit_count(url, name) == before + 1
    return True


def _commit_count(url: str, name: str) -> int:
    """Return the generation number in the session's head: one for each commit."""
    version = SharedSessions(open_object_store(url)).objects_of(name).head()
    assert version is not None
    return version.head.gen


def _retry_until_done(http: httpx.Client, name: str, body: dict[str, Any]) -> tuple[Any, str]:
    """Repeat a request, as after a lost response, until it succeeds; return its server."""
    last = time.monotonic() + PATIENCE
    while time.monotonic() < last:
        try:
            response = http.post(f"/v1/sessions/{name}/generate", json=body)
        except httpx.HTTPError:
            continue
        if response.status_code == 200 and "event: done" in response.text:
            done = json.loads(response.text.rpartition("event: done\ndata: ")[2])
            return done, response.headers["x-kvkeep-server"]
        time.sleep(0.05)
    raise AssertionError(response.text)


def _servers(at: str) -> list[str]:
    """Return the names of the two servers."""
    result = list[str]()
    with httpx.Client(base_url=at, timeout=PATIENCE) as http:
        for number in range(100):
            response = http.get("/v1/models", headers={"x-session-id": f"asked-{number}"})
            server = response.headers["x-kvkeep-server"]
            if server not in result:
                result.append(server)
            if len(result) == 2:
                return result
    raise AssertionError("all requests went to one server")


@pytest.mark.slow  # two Ray clusters after one another
def test_one_fleet_joins_an_existing_cluster(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    at = f"127.0.0.1:{free_port()}"
    store = (tmp_path / "store").as_uri()
    with ray_head(at), start_fleet(store, {}, "--address", at, "--replicas", "1") as (url, _):
        second = last_error("--store", store, "--address", at)
        assert second.endswith("is in use: run `serve shutdown`")
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert response.status_code == 200, response.text


def test_an_unreachable_cluster_fails_fast(smollm2_folder: Path, tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    reported = last_error("--store", (tmp_path / "store").as_uri(), "--address", at)
    assert reported.startswith(f"kvkeep: error: no Ray cluster responds at {at}")


def last_error(*options: str) -> str:
    """Return the last line of a fleet that does not start."""
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
def ray_head(at: str) -> Iterator[None]:
    """Start a cluster's head node by `ray start`."""
    host, port = at.split(":")
    folder = tempfile.mkdtemp(
        dir="/tmp"
    )  # short; in Ray's default folder other tests would find this cluster
    options = f"--head --block --node-ip-address={host} --port={port} --temp-dir={folder}"
    ray = Path(sys.executable).with_name("ray")
    process = subprocess.Popen(
        [ray, "start", *options.split(), "--include-dashboard=false", "--disable-usage-stats"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not is_listening(host, int(port)):
            assert process.poll() is None
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)
        shutil.rmtree(folder, ignore_errors=True)


def is_listening(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port), timeout=1).close()
        return True
    return False
