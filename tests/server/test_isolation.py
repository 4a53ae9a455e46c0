"""Many conversations at once, under two keys: nobody's words in another's answers."""

import asyncio
import gc
import random
from pathlib import Path
from typing import Any

import httpx
import psutil
from server.conftest import Running, running

from kvkeep.engine import Limits
from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys

KEYS = ("one-key-of-sixteen", "two-key-of-sixteen")
CONVERSATIONS, TURNS = 64, 2
SHARED = "You answer in a few words. " * 20


def marker(number: int) -> str:
    """A word that no other conversation has."""
    draw = random.Random(number)
    return "".join(draw.choice("bcdfghjklmnpqrstvwxz") for _ in range(12))


async def answered(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Comes back when there was no room."""
    while True:
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 429:
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found
        assert int(answer.headers["Retry-After"]) >= 1
        await asyncio.sleep(0.2)


async def converse(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """Some turns, of which some are streamed, some are broken off, and some begin anew."""
    draw, own = random.Random(1000 + number), marker(number)
    messages = [{"role": "system", "content": SHARED}]
    said: list[str] = []
    reused = 0
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Turn {turn}: repeat the word {own}."})
        body = {"messages": messages, "max_tokens": 6, "temperature": 0.8, "seed": number}
        if draw.random() < 0.25:
            async with client.stream(
                "POST", "/v1/chat/completions", json={**body, "stream": True, "max_tokens": 100}
            ) as answer:
                async for line in answer.aiter_lines():
                    said.append(line)
                    if len(said) > draw.randrange(3, 9):
                        break
        found = await answered(client, body)
        said.append(found["choices"][0]["message"]["content"])
        reused = max(reused, found["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages.append({"role": "assistant", "content": said[-1]})
    return {"number": number, "said": "\n".join(said), "reused": reused}


async def all_at_once(server: Running, first: int, count: int) -> list[dict[str, Any]]:
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
    found = await asyncio.gather(*(converse(clients[n % 2], n) for n in numbers))
    for client in clients:
        await client.aclose()
    return found


def test_no_words_of_one_conversation_come_up_in_another(smollm2: Model, tmp_path: Path) -> None:
    """Room for a few dozen conversations, so that others are dropped, and forked, all the time."""
    cell = smollm2.session(64).cache.layout.cell_bytes
    limits = Limits(memory=40 * 500 * cell)
    with running(smollm2, tmp_path, ApiKeys(KEYS), limits) as server:
        engine = server.service.engine
        found = asyncio.run(all_at_once(server, 0, CONVERSATIONS))
        for each in found:
            others = [marker(n) for n in range(CONVERSATIONS) if n != each["number"]]
            assert not [word for word in others if word in each["said"]]
        assert sum(each["reused"] > 0 for each in found) > CONVERSATIONS // 2
        while engine.totals().result().running:
            pass
        assert engine.totals().result().nbytes <= limits.memory
        gc.collect()
        before = psutil.Process().memory_info().rss
        asyncio.run(all_at_once(server, 1000, 16))
        gc.collect()
        assert psutil.Process().memory_info().rss - before < 150_000_000
