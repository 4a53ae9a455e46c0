"""Clients that send requests to a server one after another, for a fixed time."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Load:
    """seconds: measured. tokens: generated in that time. latencies: seconds of requests."""

    seconds: float
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class ClientWork:
    """The requests of clients, each with a unique prompt of `prompt` tokens and `written` answered.

    clients: concurrent. sessions: whether each client uses a session.
    """

    clients: int
    prompt: int
    written: int
    sessions: bool


async def run_load(
    url: str, work: ClientWork, ids: Sequence[int], seconds: float, warm: float
) -> Load:
    """Run the clients. ids: text for prompts. warm: seconds before anything is counted."""
    start = time.perf_counter() + warm
    result = Load(seconds)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        clients = [
            _client(client, number, work, ids, start, result) for number in range(work.clients)
        ]
        await asyncio.gather(*clients)
    return result


async def _client(
    client: httpx.AsyncClient,
    number: int,
    work: ClientWork,
    ids: Sequence[int],
    start: float,
    result: Load,
) -> None:
    name = f"load-{time.time_ns()}-{number}"
    headers = {"x-session-id": name}
    if work.sessions:
        (await client.post("/v1/sessions", json={"name": name}, headers=headers)).raise_for_status()
    turn, end = 0, start + result.seconds
    while (sent := time.perf_counter()) < end:
        first = (number * 7919 + turn * 1009) % (len(ids) - work.prompt)
        prompt = list(ids[first : first + work.prompt])
        if work.sessions:
            path, body = f"/v1/sessions/{name}/generate", _generate_body(prompt, work)
        else:
            path, body = "/v1/completions", _completion_body(prompt, work)
            headers = {"x-session-id": f"{name}-{turn}"}
        answer = await client.post(path, json=body, headers=headers)
        answer.raise_for_status()
        turn += 1
        now = time.perf_counter()
        # Of an answer across the start or end of the measured time, its share within counts.
        share = max(0.0, min(now, end) - max(sent, start)) / (now - sent)
        result.tokens += round(work.written * share)
        if sent >= start:
            result.latencies.append(now - sent)


def _generate_body(prompt: list[int], work: ClientWork) -> dict[str, Any]:
    return {"tokens": prompt, "max_tokens": work.written, "ignore_eos": True}


def _completion_body(prompt: list[int], work: ClientWork) -> dict[str, Any]:
    return {
        "model": "any",
        "prompt": prompt,
        "max_tokens": work.written,
        "temperature": 0,
        "logit_bias": {"0": -100, "2": -100},  # no end of text: answers have their full length
    }
