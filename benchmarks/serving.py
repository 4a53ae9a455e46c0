r"""`kvkeep serve` and another server under the same load, in turn.

    python -m benchmarks.serving --peer llama.cpp \
      'llama-server -m {gguf} --port {port} -np {clients} -c {context} -t 2'

Each client has a prompt of its own and is answered in a stream. Then one long prompt comes while
others are being answered. The other server is asked by the same API, `/v1/completions`.
"""

import asyncio
import dataclasses
import json
import math
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import httpx

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.peers.gguf_files import own_file
from kvkeep.errors import KvkeepError
from kvkeep.evaluate.manual import manual_text
from kvkeep.models.hub.source import resolve
from kvkeep.models.text.codec import TextCodec
from kvkeep.storage.files.atomic import write_json

PROMPT, WRITTEN, LONG, BESIDE = 512, 128, 4096, 4
_OURS = "-c 'from kvkeep.cli.start import run; run()' serve -m {model} --port {port} -q"
_START = 120  # seconds


@dataclass(frozen=True)
class Load:
    """What the clients of one server saw, all at once.

    tokens_per_second: written, together. first_token, gap: seconds, the median; gap_99: the 99th
    percentile, worst_gap: the longest, between two pieces of one answer. stall: the longest gap of
    those who are answered while a prompt of 4,096 tokens comes, and long_first: its first token.
    """

    server: str
    tokens_per_second: float
    first_token: float
    gap: float
    gap_99: float
    worst_gap: float
    stall: float
    long_first: float


@dataclass
class Times:
    """When it was asked, and when each piece of the answer came; in seconds."""

    begun: float
    pieces: list[float] = dataclasses.field(default_factory=list)

    def gaps(self, first: float = 0.0, last: float = math.inf) -> list[float]:
        """Between pieces, of those that reach into a time."""
        pairs = zip(self.pieces, self.pieces[1:], strict=False)
        return [b - a for a, b in pairs if b > first and a < last]


@contextmanager
def served(command: str, **values: object) -> Iterator[str]:
    """A server that answers; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [word.format(port=port, **values) for word in shlex.split(command)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(_START * 10):
        if process.poll() is not None:
            raise KvkeepError(f"the server ended with status {process.returncode}")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise KvkeepError(f"the server did not answer within {_START} seconds")


async def answer(
    client: httpx.AsyncClient, prompt: Sequence[int], tokens: int, times: Times
) -> None:
    """Fills in `times` as the answer comes."""
    asked = {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        if response.status_code != 200:
            raise KvkeepError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                times.pieces.append(time.perf_counter())


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits)


async def together(url: str, prompts: Sequence[Sequence[int]]) -> list[Times]:
    """All at once."""
    async with _client(url) as client:
        found = [Times(time.perf_counter()) for _ in prompts]
        each = zip(prompts, found, strict=True)
        await asyncio.gather(*(answer(client, prompt, WRITTEN, times) for prompt, times in each))
    return found


async def beside_a_long_one(
    url: str, prompts: Sequence[Sequence[int]], long: Sequence[int]
) -> tuple[float, float]:
    """The longest gap of the others while it is read, and how long its first token took."""
    async with _client(url) as client:
        found = [Times(time.perf_counter()) for _ in prompts]
        each = zip(prompts, found, strict=True)
        others = [
            asyncio.create_task(answer(client, prompt, 2000, times)) for prompt, times in each
        ]
        while min(len(times.pieces) for times in found) < 5:
            await asyncio.sleep(0.01)
        mine = Times(time.perf_counter())
        await answer(client, long, 4, mine)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    gaps = [gap for times in found for gap in times.gaps(mine.begun, mine.pieces[0])]
    return max(gaps), mine.pieces[0] - mine.begun


def measure(name: str, command: str, model: str, ids: Sequence[int], clients: int) -> Load:
    gguf = own_file(model, progress=True)
    with served(command, model=model, gguf=gguf, clients=clients, context=clients * 1024) as url:
        first, own = [ids[-PROMPT:]], ids[100 : 100 + PROMPT * clients]
        asyncio.run(together(url, first))  # what is prepared once is prepared
        begun = time.perf_counter()
        prompts = [own[at * PROMPT : (at + 1) * PROMPT] for at in range(clients)]
        found = asyncio.run(together(url, prompts))
        seconds = time.perf_counter() - begun
    slots = BESIDE + 1
    with served(command, model=model, gguf=gguf, clients=slots, context=slots * 8192) as url:
        asyncio.run(together(url, first))
        long = ids[20_000 : 20_000 + LONG]
        stall, long_first = asyncio.run(beside_a_long_one(url, prompts[:BESIDE], long))
    gaps = sorted(gap for times in found for gap in times.gaps())
    numbers = (
        clients * WRITTEN / seconds,
        median(times.pieces[0] - times.begun for times in found),
        median(gaps),
        gaps[int(0.99 * len(gaps))],
        gaps[-1],
        stall,
        long_first,
    )
    return Load(name, *map(rounded, numbers))


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--clients", default=16, type=click.IntRange(2), help="At once.")
@click.option("--rounds", default=3, type=click.IntRange(1), help="Measurements of each server.")
@click.option("--max-kv-size", default=8192, help="Of kvkeep's sessions.")
@click.option(
    "--peer",
    "peers",
    metavar="NAME COMMAND",
    type=(str, str),
    multiple=True,
    help="Another server, and what starts it; see above. Repeatable.",
)
@model_option
@out_option
def serving(
    clients: int,
    rounds: int,
    max_kv_size: int,
    peers: Sequence[tuple[str, str]],
    name: str,
    out: Path | None,
) -> None:
    """Print what clients see of `kvkeep serve`, and of other servers, under one load."""
    check_outputs(out)
    ids = TextCodec.open(resolve(name, progress=True)).encode(manual_text())
    commands = {"kvkeep": f"{shlex.quote(sys.executable)} {_OURS} --max-kv-size {max_kv_size}"}
    commands |= dict(peers)
    found = []
    click.echo(
        f"{'':18s}{'tokens/s':>10s}{'first token':>13s}{'gap':>10s}{'99%':>10s}{'worst':>10s}"
        f"{'stall':>10s}{'long first':>12s}"
    )
    for _ in range(rounds):
        for server, command in commands.items():
            each = measure(server, command, name, ids, clients)
            found.append(each)
            click.echo(
                f"{server:18s}{each.tokens_per_second:10.1f}{each.first_token:11.2f} s"
                f"{1000 * each.gap:7.0f} ms{1000 * each.gap_99:7.0f} ms"
                f"{1000 * each.worst_gap:7.0f} ms{1000 * each.stall:7.0f} ms"
                f"{each.long_first:10.2f} s"
            )
    result = {
        "machine": dataclasses.asdict(describe_machine()),
        "settings": {"model": name, "clients": clients, "prompt": PROMPT, "written": WRITTEN},
        "loads": [dataclasses.asdict(each) for each in found],
    }
    write_json(out, result)


if __name__ == "__main__":
    serving()
