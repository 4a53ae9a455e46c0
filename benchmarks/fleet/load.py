"""Clients that ask a server for as long as it is measured, one request after another each."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Load:
    """seconds: that were measured. tokens: written within them. latencies: seconds of requests."""

    seconds: float
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Work:
    """What each client does: requests of `prompt` tokens that no other has, `written` answered.

    clients: at once. sessions: whether each goes on in a session of its own.
    """

    clients: int
    prompt: int
    written: int
    sessions: bool


async def load(url: str, work: Work, ids: Sequence[int], seconds: float, warm: float) -> Load:
    """What a server makes of the work. ids: tokens of a text, from which prompts are taken. warm:
    seconds before anything is counted."""
    begun = time.perf_counter() + warm
    found = Load(seconds)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        asked = [_client(client, number, work, ids, begun, found) for number in range(work.clients)]
        await asyncio.gather(*asked)
    return found


async def _client(
    client: httpx.AsyncClient,
    number: int,
    work: Work,
    ids: Sequence[int],
    begun: float,
    found: Load,
) -> None:
    name = f"load-{time.time_ns()}-{number}"
    headers = {"x-session-id": name}
    if work.sessions:
        (await client.post("/v1/sessions", json={"name": name}, headers=headers)).raise_for_status()
    turn, end = 0, begun + found.seconds
    while (asked := time.perf_counter()) < end:
        first = (number * 7919 + turn * 1009) % (len(ids) - work.prompt)
        prompt = list(ids[first : first + work.prompt])
        if work.sessions:
            path, body = f"/v1/sessions/{name}/generate", _generate(prompt, work)
        else:
            path, body = "/v1/completions", _completion(prompt, work)
            headers = {"x-session-id": f"{name}-{turn}"}
        answer = await client.post(path, json=body, headers=headers)
        answer.raise_for_status()
        turn += 1
        now = time.perf_counter()
        # Of an answer that lies across an end of what is measured its share within counts.
        within = max(0.0, min(now, end) - max(asked, begun)) / (now - asked)
        found.tokens += round(work.written * within)
        if asked >= begun:
            found.latencies.append(now - asked)


def _generate(prompt: list[int], work: Work) -> dict[str, Any]:
    return {"tokens": prompt, "max_tokens": work.written, "ignore_eos": True}


def _completion(prompt: list[int], work: Work) -> dict[str, Any]:
    return {
        "model": "any",
        "prompt": prompt,
        "max_tokens": work.written,
        "temperature": 0,
        "logit_bias": {"0": -100, "2": -100},  # an answer has all of its tokens
    }
