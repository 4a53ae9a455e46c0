"""A server that is killed while it aligns, compacts and saves a session: nothing is half done.

The killed server is a process that a fork server starts, as in `engine.killed`.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine.killed import MODEL, PROCESSES, start_process
from server.conftest import running_server

PROCESSES.set_forkserver_preload(["engine.killed", "server.conftest"])

SETTINGS = {"max_kv_size": 512, "policy": "full", "prefill_step": 16}
TEXT = [7 + number * number % 199 for number in range(120)]
CHANGED = [*TEXT[:9], *range(50, 80), *TEXT[20:], 5]
GREEDY = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
PATH = "/v1/sessions/a"
OPERATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("feed", {"tokens": TEXT}),
    ("fork", {"name": "before"}),
    ("save", {}),
    ("align", {"tokens": CHANGED, "min_saved": 9}),
    ("generate", GREEDY),
    ("save", {}),
    ("compact", {"target": 64, "keep_recent": 0}),
    ("generate", GREEDY),
    ("save", {}),
)
# In which operation, after which share of its events.
KILLED_AT = {3: (0.5, 1.0), 5: (0.5,), 6: (0.5, 1.0), 8: (1.0,)}
KILLED_IN_CI = {3: (0.5,), 6: (0.5,), 8: (1.0,)}


@dataclass(frozen=True)
class State:
    """A session: its revision, what it holds, and what it generates next."""

    revision: int
    held: list[tuple[str, int, int]]
    tokens: list[int]
    next_tokens: list[int]

    @classmethod
    def of(cls, client: httpx.Client, name: str) -> "State":
        path = f"/v1/sessions/{name}"
        memory, text = (client.get(f"{path}/{view}").json() for view in ("memory", "text"))
        client.post(f"{path}/fork", json={"name": "probe"}).raise_for_status()
        probed = client.post("/v1/sessions/probe/generate", json=GREEDY).json()
        client.delete("/v1/sessions/probe").raise_for_status()
        tokens = [piece["id"] for piece in text["pieces"]]
        return cls(memory["revision"], memory["runs"], tokens, probed["tokens"])


def serve(folder: Path, pipe: Connection) -> None:
    """Serve until the process is killed: at the event whose number comes through the pipe.

    An event is a turn that a long change gives to others, or a file that is opened for writing,
    renamed or removed. None in place of a number: the count of events since the last message.
    """
    remaining = sys.maxsize

    def count() -> None:
        nonlocal remaining
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        remaining -= 1

    def audited(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and str(arguments[1])[:1] != "r"
        changes = writes or event in ("os.rename", "os.remove", "os.link", "os.mkdir")
        if changes and str(folder) in str(arguments[0]):
            count()

    with running_server(MODEL, folder, settings=SETTINGS) as server:
        engine = server.service.engine
        yield_turn = engine.yield_turn

        def counted(tokens: int = 0) -> None:
            count()
            yield_turn(tokens)

        engine.yield_turn = counted  # type: ignore[method-assign]
        sys.addaudithook(audited)
        pipe.send(server.url)
        while True:
            number = pipe.recv()
            pipe.send(sys.maxsize - remaining)
            remaining = sys.maxsize if number is None else number


@contextmanager
def killed_server(folder: Path) -> Iterator[tuple[httpx.Client, Connection]]:
    pipe, process = start_process(serve, folder)
    try:
        with httpx.Client(base_url=pipe.recv(), timeout=60) as client:
            yield client, pipe
    finally:
        process.kill()
        process.join()


def send(client: httpx.Client, number: int, revision: int) -> int:
    """Send an operation once, for the session's revision; return the revision after it."""
    kind, body = OPERATIONS[number]
    headers = {"If-Match": f'"{revision}"'}
    client.post(f"{PATH}/{kind}", json=body, headers=headers).raise_for_status()
    if kind == "fork":
        client.post("/v1/sessions/before/save").raise_for_status()
    return int(client.get(PATH).json()["revision"])


@pytest.mark.parametrize(
    "killed_at",
    [
        pytest.param(KILLED_IN_CI, id="some"),
        pytest.param(KILLED_AT, marks=pytest.mark.slow, id="all"),
    ],
)
def test_a_killed_server_leaves_no_change_half_done(
    tmp_path: Path, killed_at: dict[int, tuple[float, ...]]
) -> None:
    """Killed in an alignment, a compaction and the saves after them, halfway or at their ends.

    The session is as it was after an operation, none before the last acknowledged save. What was
    not done is done then, and each word is there once, with the bits of a server that ran on.
    """
    counts, states = list[int](), list[State]()
    with killed_server(tmp_path / "counted") as (client, pipe):
        client.post("/v1/sessions", json={"name": "a"}).raise_for_status()
        revision = 0
        for number in range(len(OPERATIONS)):
            pipe.send(None)
            pipe.recv()
            revision = send(client, number, revision)
            pipe.send(None)
            counts.append(pipe.recv())
            states.append(State.of(client, "a"))
        before = State.of(client, "before")
    by_revision = {state.revision: state for state in states}
    assert [len(state.tokens) for state in states] == [120] * 3 + [140, 144, 144, 144, 148, 148]
    assert all(counts[number] >= 3 for number in killed_at)
    moments = [
        (number, int(share * (counts[number] - 1)))
        for number, shares in killed_at.items()
        for share in shares
    ]
    for number, moment in moments:
        folder = tmp_path / f"{number}-{moment}"
        with killed_server(folder) as (client, pipe):
            client.post("/v1/sessions", json={"name": "a"}).raise_for_status()
            revision = 0
            for earlier in range(number):
                revision = send(client, earlier, revision)
            pipe.send(moment)
            pipe.recv()
            with pytest.raises(httpx.TransportError):
                send(client, number, revision)
        saved = max(n for n in range(number) if OPERATIONS[n][0] == "save")
        with running_server(MODEL, folder, settings=SETTINGS) as server, server.client() as client:
            state = State.of(client, "a")
            assert state == by_revision[state.revision]
            assert states[saved].revision <= state.revision <= states[number].revision
            assert State.of(client, "before") == before
            revision = state.revision
            done = max(n for n in range(number + 1) if states[n].revision == revision)
            for later in range(done + 1, len(OPERATIONS)):
                revision = send(client, later, revision)
            assert State.of(client, "a") == states[-1]
            assert State.of(client, "before") == before
