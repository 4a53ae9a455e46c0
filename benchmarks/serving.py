r"""`kvkeep serve` and other servers under the same load, alternately.

    python -m benchmarks.serving --peer llama.cpp \
      'llama-server -m {gguf} --port {port} -np {clients} -c {context} -t 2'

Each client sends its own prompt and streams the answer. Then one long prompt arrives while other
requests are decoding. All servers are used through the same API, `/v1/completions`.
"""

import asyncio
import dataclasses
import json
import math
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO

import click
import httpx

from benchmarks.command import Measurement, ResultFile, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.peers.gguf_files import gguf_file
from kvkeep.errors import KvkeepError
from kvkeep.evaluate.haystack import manual_text
from kvkeep.models.hub.source import resolve
from kvkeep.models.text.codec import TextCodec

PROMPT, ANSWER_TOKENS, LONG_PROMPT, OTHER_CLIENTS = 512, 128, 4096, 4
# Without speculation: greedy answers of random models repeat themselves more than real ones.
_KVKEEP_COMMAND = (
    "-c 'from kvkeep.cli.start import run; run()' serve -m {model} --port {port} -q --no-speculate "
    "--store {store}"
)
_START_TIMEOUT = 120  # seconds


@dataclass(frozen=True)
class Load:
    """Latency and throughput of one server with concurrent clients; times in seconds.

    tokens_per_second: total throughput. first_token: median time to first token. gap, gap_99,
    worst_gap: median, 99th percentile and maximum time between two pieces of one answer. stall: the
    longest gap of other requests during the prefill of a prompt of 4,096 tokens; long_first: its
    time to first token.
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
class AnswerTimes:
    """Times of a request (`begun`) and of the pieces of its answer, in seconds."""

    begun: float
    pieces: list[float] = dataclasses.field(default_factory=list)

    def gaps(self, first: float = 0.0, last: float = math.inf) -> list[float]:
        """Return the gaps between pieces that overlap the interval `first` to `last`."""
        pairs = zip(self.pieces, self.pieces[1:], strict=False)
        return [b - a for a, b in pairs if b > first and a < last]


@contextmanager
def running_server(
    command: str, environment: Mapping[str, str] | None = None, **values: object
) -> Iterator[str]:
    """Start a server, wait until it is healthy, and yield its URL.

    environment: variables besides those of this process.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [word.format(port=port, **values) for word in shlex.split(command)]
    url, variables = f"http://127.0.0.1:{port}", os.environ | dict(environment or {})
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            _wait(url, process, errors)
            yield url
        finally:
            process.terminate()
            process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
    """Wait until a server is healthy. errors: the file of its standard error."""
    for _ in range(_START_TIMEOUT * 10):
        if process.poll() is not None:
            errors.seek(0)
            printed = errors.read().decode(errors="replace").strip()[-400:]
            raise KvkeepError(f"the server ended with status {process.returncode}: {printed}")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise KvkeepError(f"the server did not answer within {_START_TIMEOUT} seconds")


async def answer(
    client: httpx.AsyncClient, prompt: Sequence[int], tokens: int, times: AnswerTimes
) -> None:
    """Stream one answer, recording its times."""
    body = {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise KvkeepError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                times.pieces.append(time.perf_counter())


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits)


async def answer_all(url: str, prompts: Sequence[Sequence[int]]) -> list[AnswerTimes]:
    """Send all prompts concurrently; return the times of the answers."""
    async with _client(url) as client:
        answers = [AnswerTimes(time.perf_counter()) for _ in prompts]
        pairs = zip(prompts, answers, strict=True)
        await asyncio.gather(
            *(answer(client, prompt, ANSWER_TOKENS, times) for prompt, times in pairs)
        )
    return answers


async def answer_during_long_prompt(
    url: str, prompts: Sequence[Sequence[int]], long: Sequence[int]
) -> tuple[float, float]:
    """Return the longest gap of other answers during its prefill, and its time to first token."""
    async with _client(url) as client:
        answers = [AnswerTimes(time.perf_counter()) for _ in prompts]
        pairs = zip(prompts, answers, strict=True)
        others = [
            asyncio.create_task(answer(client, prompt, 2000, times)) for prompt, times in pairs
        ]
        while min(len(times.pieces) for times in answers) < 5:
            await asyncio.sleep(0.01)
        long_answer = AnswerTimes(time.perf_counter())
        await answer(client, long, 4, long_answer)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    gaps = [
        gap for times in answers for gap in times.gaps(long_answer.begun, long_answer.pieces[0])
    ]
    return max(gaps), long_answer.pieces[0] - long_answer.begun


def measure(name: str, command: str, model: str, ids: Sequence[int], clients: int) -> Load:
    gguf = gguf_file(model, progress=True)
    with (
        tempfile.TemporaryDirectory() as store,
        running_server(
            command, model=model, gguf=gguf, clients=clients, context=clients * 1024, store=store
        ) as url,
    ):
        warm_up, client_ids = [ids[-PROMPT:]], ids[100 : 100 + PROMPT * clients]
        asyncio.run(answer_all(url, warm_up))  # a warm-up
        start = time.perf_counter()
        prompts = [client_ids[index * PROMPT : (index + 1) * PROMPT] for index in range(clients)]
        answers = asyncio.run(answer_all(url, prompts))
        seconds = time.perf_counter() - start
    slots = OTHER_CLIENTS + 1
    with (
        tempfile.TemporaryDirectory() as store,
        running_server(
            command, model=model, gguf=gguf, clients=slots, context=slots * 8192, store=store
        ) as url,
    ):
        asyncio.run(answer_all(url, warm_up))
        long = ids[20_000 : 20_000 + LONG_PROMPT]
        stall, long_first = asyncio.run(
            answer_during_long_prompt(url, prompts[:OTHER_CLIENTS], long)
        )
    gaps = sorted(gap for times in answers for gap in times.gaps())
    numbers = (
        clients * ANSWER_TOKENS / seconds,
        median(times.pieces[0] - times.begun for times in answers),
        median(gaps),
        gaps[int(0.99 * len(gaps))],
        gaps[-1],
        stall,
        long_first,
    )
    return Load(name, *map(rounded, numbers))


def _without_paths(peers: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the commands of peers with the names of files alone."""
    words = {peer: shlex.split(command) for peer, command in peers}
    return {peer: shlex.join(Path(word).name for word in each) for peer, each in words.items()}


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--clients", default=16, type=click.IntRange(2), help="Concurrent clients.")
@click.option("--rounds", default=3, type=click.IntRange(1), help="Repeats of each server.")
@click.option("--max-kv-size", default=8192, help="Budget of kvkeep's sessions.")
@click.option(
    "--peer",
    "peers",
    metavar="NAME COMMAND",
    type=(str, str),
    multiple=True,
    help="Another server and its start command. Repeatable.",
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
    """Compare latency and throughput of `kvkeep serve` and other servers."""
    settings = {"model": name, "clients": clients, "prompt": PROMPT, "written": ANSWER_TOKENS}
    settings |= {"rounds": rounds, "max_kv_size": max_kv_size, "peers": _without_paths(peers)}
    result = ResultFile(out, settings=settings)
    ids = TextCodec.open(resolve(name, progress=True)).encode(manual_text())
    commands = {
        "kvkeep": f"{shlex.quote(sys.executable)} {_KVKEEP_COMMAND} --max-kv-size {max_kv_size}"
    }
    commands |= dict(peers)
    loads = []
    click.echo(
        f"{'':18s}{'tokens/s':>10s}{'first token':>13s}{'gap':>10s}{'99%':>10s}{'worst':>10s}"
        f"{'stall':>10s}{'long first':>12s}"
    )
    for _ in range(rounds):
        for server, command in commands.items():
            load = measure(server, command, name, ids, clients)
            loads.append(load)
            result.write(loads=loads)
            click.echo(
                f"{server:18s}{load.tokens_per_second:10.1f}{load.first_token:11.2f} s"
                f"{1000 * load.gap:7.0f} ms{1000 * load.gap_99:7.0f} ms"
                f"{1000 * load.worst_gap:7.0f} ms{1000 * load.stall:7.0f} ms"
                f"{load.long_first:10.2f} s"
            )


if __name__ == "__main__":
    serving()
