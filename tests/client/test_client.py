"""kvkeep's clients against a server: results as in Python, and typed errors."""

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, running_server
from topics import topic_text

import kvkeep
from kvkeep import AsyncClient, Client, errors
from kvkeep.engine import Limits
from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys

TEXT = topic_text()
SETTINGS = {"policy": "sliding", "max_kv_size": 100, "keep": 4}
names = (f"client-{number}" for number in count())


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder, limits = tmp_path_factory.mktemp("server"), Limits(memory=200_000_000)
    with running_server(smollm2, folder, limits=limits) as output:
        yield output


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.url) as created:
        yield created


GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def test_a_remote_session_equals_a_local_one(client: Client, smollm2: Model) -> None:
    """The same calls on a remote and on a local session give the same results."""
    remote, session = client.create(next(names), **SETTINGS), smollm2.session(100, prefill_step=128)
    remote.feed(TEXT[:800], span="text")
    session.feed(TEXT[:800])
    assert remote.memory()["spans"]["text"]["end"] == len(session.tokens)
    generated = remote.generate(max_tokens=6, **GREEDY)
    assert generated["tokens"] == [session.next_token() for _ in range(6)]
    at = len(session.tokens)
    remote.pin(at - 60, at - 50)
    session.pin(at - 60, at - 50)
    remote.replace(at - 20, at - 10, " other words")
    session.replace(at - 20, at - 10, " other words")
    remote.insert(at - 30, [5, 6], recompute="suffix")
    session.insert(at - 30, [5, 6], "suffix")
    remote.delete(at - 40, at - 38)
    session.delete(at - 40, at - 38)
    remote.unpin(at - 60, at - 50)
    session.unpin(at - 60, at - 50)
    assert remote.rewind(2)["result"] == session.rewind(2)
    pieces = remote.text(at - 30)["pieces"]
    assert [item["id"] for item in pieces] == session.tokens[at - 30 :]
    for _, reported in remote.stream(max_tokens=5, **GREEDY):
        last = reported
    assert last["tokens"] == [session.next_token() for _ in range(5)]


def test_forks_and_restored_snapshots_continue_the_session(client: Client) -> None:
    name, label = next(names), next(names)
    remote = client.create(name, policy="full", max_kv_size=1024)
    remote.feed([5, 6, 7, 8] * 20)
    fork = remote.fork(at=60)
    assert fork.info()["tokens"] == 60
    assert fork.info()["parent"] == name
    remote.rewind(1)
    remote.revert(remote.fork(at=60).name)
    assert remote.info()["tokens"] == 60
    remote.feed([5, 6, 7, 8] * 5)
    remote.snapshot(label)
    assert {"name": label, "session": name}.items() <= client.snapshots()[0].items()
    again = client.restore(label)
    continued = again.generate(max_tokens=8, temperature=0)["tokens"]
    assert continued == remote.generate(max_tokens=8, temperature=0)["tokens"]
    cells = remote.info()["cells"]
    result = remote.compress(2)["result"]
    assert result["cells_after"] < result["cells_before"] == cells
    assert remote.heads(1, 2)["positions"]
    assert remote.save()["saved_revision"] == remote.info()["revision"]
    assert remote.set_resident()["resident"]
    with pytest.warns(DeprecationWarning, match="use RemoteSession.set_resident"):
        assert not remote.stay(False)["resident"]
    client.delete_snapshot(label)
    assert label not in [item["name"] for item in client.snapshots()]
    client.delete(name)
    assert name not in [item["name"] for item in client.sessions(unnamed=True)]
    assert client.operations()[0]["what"] == "delete"


def test_chat_turns_generate_and_stream_replies(client: Client) -> None:
    remote = client.create(next(names), max_kv_size=512)
    first = remote.say("What is the capital of France?", system="You are terse.", temperature=0)
    assert "Paris" in first["text"]
    events = list(remote.stream_turn("And of Italy?", temperature=0))
    assert events[-1][0] == "done"
    text = "".join(reported["text"] for name, reported in events if name == "token")
    assert text == events[-1][1]["text"]
    assert "Rome" in text
    spans = remote.memory()["spans"]
    assert {"system text", "turn 1 question", "turn 2 answer"} <= set(spans)
    with pytest.raises(errors.InvalidArgument, match="system prompt"):
        remote.say("More.", system="You are not terse.")


def test_the_async_client_equals_the_sync_client(server: RunningServer) -> None:
    async def use_async_client() -> None:
        async with AsyncClient(server.url) as client:
            remote = await client.create(next(names), **SETTINGS)
            await remote.feed(TEXT[:300])
            fork = await remote.fork()
            reported = [item async for item in fork.stream(max_tokens=5, **GREEDY)]
            assert [name for name, _ in reported] == ["token"] * 5 + ["done"]
            output = await remote.generate(max_tokens=5, **GREEDY)
            assert output["tokens"] == reported[-1][1]["tokens"]
            with pytest.raises(errors.NoSuchSession):
                await client.session("nobody").info()
            seen = client.events()
            received = asyncio.create_task(anext(seen))
            while not received.done():  # nothing tells when the stream has started
                await remote.generate(max_tokens=1, ignore_eos=True)
            assert received.result()[1]["session"] == remote.name
            await seen.aclose()

    asyncio.run(use_async_client())


def test_client_errors_have_the_types_of_the_engine(client: Client) -> None:
    remote = client.create(next(names), **SETTINGS)
    revision = remote.feed("A few words.")["revision"]
    with pytest.raises(errors.WrongRevision):
        remote.rewind(1, revision=revision + 1)
    remote.rewind(1, revision=revision)
    with pytest.raises(errors.NoSuchSession):
        client.session("nobody").memory()
    with pytest.raises(errors.InvalidArgument):
        remote.rewind(10_000)
    for text in (3, {"role": "user", "content": "x"}, b"x"):
        with pytest.raises(errors.InvalidArgument, match="list of messages"):
            remote.align(text)
    with pytest.raises(errors.NoRoom) as output:
        client.create(max_kv_size=8192).generate([5], max_tokens=8000)
    assert output.value.retry_after == float("inf")
    streaming = remote.stream("More words.", max_tokens=400, ignore_eos=True)
    next(streaming)
    with pytest.raises(errors.Busy):
        remote.pin(0, 1)
    streaming.close()


def test_unreachable_servers_and_wrong_keys_raise_server_errors(
    smollm2: Model, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("a-key-that-is-long-enough\n")
    with running_server(smollm2, tmp_path / "server", ApiKeys.read(file, tmp_path)) as server:
        with Client(server.url) as client, pytest.raises(errors.ServerError, match="key"):
            client.sessions()
        with Client(server.url, "a-key-that-is-long-enough") as client:
            assert client.sessions() == []
    with Client(server.url) as client, pytest.raises(kvkeep.KvkeepError, match="no response"):
        client.sessions()


def test_a_request_is_repeated_if_its_response_is_lost(server: RunningServer) -> None:
    """The server makes the change once though it is sent twice."""
    lost = []

    class Losing(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if request.url.path.endswith("/feed") and not lost:
                response.read()
                lost.append(response)
                raise httpx.ReadError("the line is down")
            return response

    with Client(server.url, transport=Losing()) as client:
        remote = client.create(next(names), **SETTINGS)
        fed = remote.feed([5, 6, 7])
        assert lost
        assert fed == lost[0].json()
        assert remote.info()["tokens"] == 3


def test_a_request_is_repeated_while_its_first_try_is_running(server: RunningServer) -> None:
    """The client waits for the response to the first try, and does not report it as refused."""

    class Impatient(httpx.HTTPTransport):
        tries = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/generate"):
                self.tries += 1
            if self.tries == 1:
                request.extensions["timeout"] = {"read": 0.05}  # then the connection is closed
            return super().handle_request(request)

    transport = Impatient()
    with Client(server.url, transport=transport) as client:
        remote = client.create(next(names), max_kv_size=512)
        generated = remote.generate([5], max_tokens=100, **GREEDY)
        assert len(generated["tokens"]) == 100
        assert transport.tries > 1
        assert remote.info()["tokens"] == 101
