"""Streams of generations that fail."""

import asyncio
import gc
import logging
from typing import Any

import pytest
from server.conftest import ScriptedServer

from kvkeep.chat.output_reader import OutputReader
from kvkeep.engine import (
    Finished,
    GeneratedToken,
    Generation,
    GenerationRequest,
    Reuse,
    Usage,
)
from kvkeep.engine.record import SessionRecord
from kvkeep.errors import NoRoom
from kvkeep.server.generation_stream import GenerationStream


def test_a_refused_admission_that_is_not_awaited_is_no_error_of_the_loop() -> None:
    problems: list[dict[str, Any]] = []

    async def refuse() -> list[Generation]:
        await asyncio.sleep(0.02)
        raise NoRoom("too many requests", retry_after=1.0)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, problem: problems.append(problem)
        )
        stream = GenerationStream(1)
        await stream.start(refuse(), patience=0)
        await asyncio.sleep(0.1)
        del stream
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert not problems


class AddedText(str):
    """A text that cannot be appended to another one."""

    def __radd__(self, other: str) -> str:
        raise AssertionError("the text so far is copied for a token")


def test_the_text_so_far_is_not_copied_with_each_token() -> None:
    usage = Usage(1, 3, Reuse(), 0.0, 0.0, 0.0)

    async def run() -> str:
        stream = GenerationStream(1)
        stream.generations = [
            Generation(GenerationRequest((1,)), SessionRecord("a", "", True, None, None))
        ]
        (listener,) = stream.listeners
        for _ in range(3):
            listener(GeneratedToken(1, AddedText("ab")))
        listener(Finished("length", AddedText("c"), usage))
        await stream.wait()
        return stream.results[0].text

    assert asyncio.run(run()) == "abababc"


MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
        ("/v1/responses", {"input": "Hi"}),
        ("/api/chat", {"messages": MESSAGES}),
    ],
)
def test_an_unexpected_error_in_a_stream_is_logged(
    scripted: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
) -> None:
    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError("a fault of the server")

    scripted.write("Hello")
    monkeypatch.setattr(OutputReader, "push", fail)
    with caplog.at_level(logging.ERROR), scripted.client() as client:
        response = client.post(path, json={**body, "stream": True})
    assert "see the server's log" in response.text
    assert "a fault of the server" not in response.text
    (record,) = caplog.records
    assert "failed" in record.message
    assert "ZeroDivisionError: a fault of the server" in caplog.text
