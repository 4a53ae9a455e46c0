"""Concurrent conversations under two keys do not leak into each other."""

import asyncio
import gc
import random
from pathlib import Path
from typing import Any

import httpx
import psutil
from server.conftest import RunningServer, running_server

from kvkeep.engine import Limits
from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys

KEYS = ("one-key-of-sixteen", "two-key-of-sixteen")
CONVERSATIONS, TURNS = 10, 2
SHARED = "You answer in a few words. " * 8


def marker(number: int) -> str:
    """Return a word that no other conversation has."""
    draw = random.Random(number)
    return "".join(draw.choice("bcdfghjklmnpqrstvwxz") for _ in range(12))


async def post_with_retry(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Post a chat request, and again while the server has no room (429)."""
    while True:
        response = await client.post("/v1/chat/completions", json=body)
        if response.status_code != 429:
            assert response.status_code == 200, response.text
            results: dict[str, Any] = response.json()
            return results
        assert int(response.headers["Retry-After"]) >= 1
        await asyncio.sleep(0.2)


async def converse(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """Take turns, some of them after a streamed request that is cancelled."""
    draw, word = random.Random(1000 + number), marker(number)
    messages = [{"role": "system", "content": SHARED}]
    texts: list[str] = []
    reused = 0
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Turn {turn}: repeat the word {word}."})
        body = {"messages": messages, "max_tokens": 6, "temperature": 0.8, "seed": number}
        if draw.random() < 0.25:
            async with client.stream(
                "POST", "/v1/chat/completions", json={**body, "stream": True, "max_tokens": 100}
            ) as response:
                async for line in response.aiter_lines():
                    texts.append(line)
                    if len(texts) > draw.randrange(3, 9):
                        break
        results = await post_with_retry(client, body)
        texts.append(results["choices"][0]["message"]["content"])
        reused = max(reused, results["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages.append({"role": "assistant", "content": texts[-1]})
    return {"number": number, "said": "\n".join(texts), "reused": reused}


async def converse_concurrently(
    server: RunningServer, first: int, count: int
) -> list[dict[str, Any]]:
    clients = [
        httpx.AsyncClient(
            base_url=server.url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=None,
            limits=httpx.Limits(max_connections=None),
        )
        for key in KEYS
    ]
    numbers = range(first, first + count)
    results = await asyncio.gather(*(converse(clients[n % 2], n) for n in numbers))
    for client in clients:
        await client.aclose()
    return results


def test_concurrent_conversations_do_not_leak_into_each_other(
    smollm2: Model, tmp_path: Path
) -> None:
    """Memory holds a few conversations, so sessions are evicted and forked constantly."""
    cell = smollm2.session(64).cache.layout.cell_bytes
    limits = Limits(memory=6 * 500 * cell)
    with running_server(smollm2, tmp_path, ApiKeys(KEYS), limits) as server:
        engine = server.service.engine
        results = asyncio.run(converse_concurrently(server, 0, CONVERSATIONS))
        for result in results:
            other_markers = [marker(n) for n in range(CONVERSATIONS) if n != result["number"]]
            assert not [word for word in other_markers if word in result["said"]]
        assert sum(result["reused"] > 0 for result in results) > CONVERSATIONS // 2
        while engine.totals().result().running:
            pass
        assert engine.totals().result().nbytes <= limits.memory
        gc.collect()
        before = psutil.Process().memory_info().rss
        asyncio.run(converse_concurrently(server, 1000, 5))
        gc.collect()
        assert psutil.Process().memory_info().rss - before < 150_000_000
