r"""Soak test of `kvkeep serve`: thousands of mixed requests under two API keys.

    python -m benchmarks.soak --requests 10000

Concurrent random clients chat, disconnect from streams, fork, edit, branch responses and send
malformed requests, to a server with too little memory for all of them. Resident memory must level
off, and no word of one conversation may appear in another.
"""

import asyncio
import dataclasses
import random
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.machine import describe_machine
from benchmarks.serving import running_server
from kvkeep.errors import KvkeepError
from kvkeep.models.hub.source import resolve
from kvkeep.storage.files.atomic import write_json

KEYS = ("the-first-key-of-two", "the-second-key-of-two")
_SERVER_COMMAND = (
    "-c 'from kvkeep.cli.start import run; run()' serve -m {model} --port {port} -q "
    "--api-key-file {keys} --store {folder} --max-kv-size 512 --memory 200MB"
)
_SYSTEM = "You answer in a few words. " * 12
_MALFORMED: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": "x"},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10**12},
)


@dataclass
class Soak:
    """Results. statuses: of all requests. leaks: words of one conversation seen in another.

    resident: bytes of the server's process, after each twentieth of the requests.
    """

    total: int
    statuses: Counter[int] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    words: dict[str, int] = field(default_factory=dict)
    sent: int = 0

    @property
    def over(self) -> bool:
        return self.sent >= self.total


class RandomClient:
    """A client that runs one conversation after another, each with a unique word."""

    def __init__(self, soak: Soak, client: httpx.AsyncClient, number: int, server: psutil.Process):
        self.soak, self.client, self.number, self.server = soak, client, number, server
        self.draw = random.Random(number)
        self.word = ""
        kinds: tuple[Callable[[], Awaitable[None]], ...]
        kinds = (self.chat, self.hung_up, self.session, self.branches, self.malformed)
        self.kinds = kinds

    async def talk(self) -> None:
        while not self.soak.over:
            self.word = "".join(self.draw.choice("bcdfghjklmnpqrstvwxz") for _ in range(10))
            self.soak.words[self.word] = self.number
            await self.draw.choice(self.kinds)()

    async def chat(self) -> None:
        messages = [{"role": "system", "content": _SYSTEM}]
        for turn in range(self.draw.randrange(1, 4)):
            messages.append({"role": "user", "content": f"Turn {turn}: say {self.word}."})
            body = {"messages": messages, "max_tokens": 4, "temperature": 0.8}
            found = await self.post("/v1/chat/completions", body)
            if found is None:
                return
            said = found["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said})

    async def hung_up(self) -> None:
        body = {"prompt": f"{_SYSTEM} {self.word}", "max_tokens": 200, "stream": True}
        lines = self.draw.randrange(1, 8)
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            self.count(answer.status_code)
            async for line in answer.aiter_lines():
                self.look(line)
                lines -= 1
                if not lines:
                    return

    async def session(self) -> None:
        made = await self.post("/v1/sessions", {"policy": "sliding", "max_kv_size": 96, "keep": 4})
        if made is None:
            return
        names = [made["name"]]
        path = f"/v1/sessions/{made['name']}"
        await self.post(f"{path}/feed", {"text": f"{_SYSTEM} {self.word}", "span": "all"})
        await self.post(f"{path}/pin", {"start": 60, "end": 64})
        fork = await self.post(f"{path}/fork", {})
        names += [fork["name"]] if fork else []
        await self.post(f"{path}/edit", {"op": "delete", "start": 50, "end": 55})
        for name in names:
            await self.post(f"/v1/sessions/{name}/generate", {"max_tokens": 4})
        for name in names:
            answer = await self.client.delete(f"/v1/sessions/{name}")
            self.count(answer.status_code)

    async def branches(self) -> None:
        body = {"input": f"Say {self.word}.", "max_output_tokens": 4}
        first = await self.post("/v1/responses", body)
        if first is None:
            return
        for _ in range(2):
            more = {**body, "previous_response_id": first["id"], "store": False}
            await self.post("/v1/responses", more)
        answer = await self.client.delete(f"/v1/responses/{first['id']}")
        self.count(answer.status_code)

    async def malformed(self) -> None:
        answer = await self.client.post("/v1/chat/completions", json=self.draw.choice(_MALFORMED))
        self.count(answer.status_code)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Post a request, again after each 429; return the answer, or None if it failed."""
        while True:
            answer = await self.client.post(path, json=body)
            self.count(answer.status_code)
            self.look(answer.text)
            if answer.status_code != 429:
                return answer.json() if answer.is_success else None
            await asyncio.sleep(0.2)

    def count(self, status: int) -> None:
        soak = self.soak
        soak.statuses[status] += 1
        soak.sent += 1
        if soak.sent % max(1, soak.total // 20) == 0:
            soak.resident.append(self.server.memory_info().rss)
            click.echo(f"{soak.sent:,} requests, {soak.resident[-1] / 1e6:,.0f} MB", err=True)

    def look(self, text: str) -> None:
        """Record words of other conversations that occur in a text."""
        self.soak.leaks += [word for word in self.soak.words if word != self.word and word in text]
        while len(self.soak.words) > 500:
            self.soak.words.pop(next(iter(self.soak.words)))


async def run_soak(url: str, server: psutil.Process, requests: int, clients: int) -> Soak:
    soak = Soak(requests)
    settings: dict[str, Any] = {"base_url": url, "timeout": None}
    limits = httpx.Limits(max_connections=None)
    heads = [{"Authorization": f"Bearer {key}"} for key in KEYS]
    async with (
        httpx.AsyncClient(headers=heads[0], limits=limits, **settings) as one,
        httpx.AsyncClient(headers=heads[1], limits=limits, **settings) as two,
    ):
        pair = (one, two)
        talkers = [RandomClient(soak, pair[n % 2], n, server) for n in range(clients)]
        await asyncio.gather(*(talker.talk() for talker in talkers))
    return soak


def _newest_child() -> psutil.Process:
    return max(psutil.Process().children(), key=lambda child: child.create_time())


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--requests", default=10_000, type=click.IntRange(20), help="Number of requests.")
@click.option("--clients", default=16, type=click.IntRange(2), help="Concurrent clients.")
@model_option
@out_option
def soak(requests: int, clients: int, name: str, out: Path | None) -> None:
    """Send many mixed requests; report statuses, memory and leaks."""
    check_outputs(out)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("\n".join(KEYS))
        store = Path(folder) / "store"
        values: dict[str, Any] = {
            "model": resolve(name, progress=True),
            "keys": keys,
            "folder": store,
        }
        with running_server(f"{shlex.quote(sys.executable)} {_SERVER_COMMAND}", **values) as url:
            result = asyncio.run(run_soak(url, _newest_child(), requests, clients))
    bad = {status: count for status, count in result.statuses.items() if status >= 500}
    for status, count in sorted(result.statuses.items()):
        print(f"{count:7,} answers with status {status}")
    early, late = result.resident[len(result.resident) // 4], result.resident[-1]
    print(f"{early / 1e6:,.0f} MB after a quarter, {late / 1e6:,.0f} MB at the end")
    print(f"{len(result.leaks)} words of one conversation in another's")
    if out is not None:
        counts = {"statuses": dict(result.statuses), "resident": result.resident}
        machine = dataclasses.asdict(describe_machine())
        write_json(out, {"machine": machine, "leaks": len(result.leaks), **counts})
    if result.leaks or bad:
        raise KvkeepError(f"words leaked: {result.leaks[:3]}; failures: {bad}")


if __name__ == "__main__":
    soak()
