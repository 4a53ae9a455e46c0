"""Time to first token in sessions of coding agents: kvkeep's modes, and llama.cpp's server.

    python -m benchmarks.agent_servers --llama-server PATH --out docs/results/agent-servers.json

The prompts are those of `benchmarks.agent_traces`, as tokens of the model's GGUF file, scaled to
its context. Each server gets them one after another over llama.cpp's `/completion`: the prompt,
with one token to generate, which is timed; then the prompt with its given answer, which is not. All
servers of a trace take turns with each request, so that they meet the same state of the machine.

llama.cpp runs with `--cache-reuse`, which moves equal chunks to their new positions as kvkeep's
alignment in place does, without evaluating anything at the seams. It gets the same file and, where
llama-cpp-python is installed, the weights as Q4_0, which it computes fastest.
"""

import dataclasses
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import httpx
from starlette.testclient import TestClient

from benchmarks.agent_clients import load_shapes, replay
from benchmarks.agent_traces import MODES, GivenAnswers, random_model, send
from benchmarks.command import Measurement, ResultFile, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.peers.gguf_files import gguf_file, requantised, weights_of
from benchmarks.peers.worker_pool import PAUSE
from benchmarks.serving import running_server
from kvkeep import load_model
from kvkeep.errors import InvalidArgument
from kvkeep.server.app import application
from kvkeep.server.keys import ApiKeys
from kvkeep.server.service import Service

CONTEXT = 8192
KVKEEP = (
    f"{shlex.quote(sys.executable)} -m kvkeep serve --model {{file}} --port {{port}} "
    "--max-kv-size {context} --policy full --quiet --store {store}"
)
LLAMA = (
    "{program} -m {file} --port {port} -c {context} --parallel 1 -t {threads} --cache-reuse {reuse}"
)
FASTEST = "Q4_0"  # of llama.cpp's formats with 4 bits
MODE_NAMES = [mode.name for mode in MODES if mode.rules == "default"]


@dataclass(frozen=True)
class PromptOfTrace:
    """Token ids of a prompt and its answer."""

    event: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class ServerReading:
    """One prompt on one server. seconds: until the response with its first token."""

    agent: str
    server: str
    request: int
    event: str
    prompt: int
    evaluated: int
    seconds: float


def trace_prompts(name: str, agent: str, scale: float, limit: int) -> list[PromptOfTrace]:
    """Return the prompts of a session, rendered for a model, without asides."""
    model = random_model(load_model(name))
    prompts, settings = list[PromptOfTrace](), {"max_kv_size": 65_536, "policy": "full"}
    with GivenAnswers(model, settings=settings) as engine:
        service = Service(engine, "model", ApiKeys())
        client = TestClient(application(service), base_url="http://127.0.0.1")
        session = replay(load_shapes()[agent], scale)
        request = next(session)
        while len(prompts) < limit:
            answer = send(client, engine, request)
            (generation,) = engine.submitted.result()
            ids = tuple(generation.request.prompt), tuple(generation.generated)
            if not request.aside:
                prompts.append(PromptOfTrace(request.event, *ids))
            try:
                request = session.send(answer)
            except StopIteration:
                break
    return prompts


def measure_prompt(url: str, prompt: PromptOfTrace, alignment: Any) -> tuple[int, float]:
    """Return the tokens that a server evaluates of a prompt, and the seconds to its first token."""
    fields = {"temperature": 0, "cache_prompt": True, "n_predict": 1, "id_slot": -1}
    if alignment is not None:
        fields["alignment"] = alignment
    started = time.perf_counter()
    response = httpx.post(
        f"{url}/completion", json={"prompt": [*prompt.prompt], **fields}, timeout=600
    )
    seconds = time.perf_counter() - started
    response.raise_for_status()
    evaluated = int(response.json()["timings"]["prompt_n"])
    answered = {"prompt": [*prompt.prompt, *prompt.answer], **fields}
    httpx.post(f"{url}/completion", json=answered, timeout=600).raise_for_status()
    return evaluated, seconds


def llama_files(file: Path, threads: int) -> dict[str, Path]:
    """Return the files that llama.cpp is measured with, by the format of their weights."""
    files = {weights_of(file): file}
    try:
        return files | {FASTEST: requantised(file, FASTEST, threads)}
    except ImportError:
        return files


def summary_table(readings: Sequence[ServerReading]) -> str:
    """Return a table in Markdown: a line for each trace and server, all prompts but the first."""
    lines = [
        "| Agent | Server | evaluated, mean | most | first token, median | most |",
        "|---|---|---|---|---|---|",
    ]
    for agent, server in dict.fromkeys((r.agent, r.server) for r in readings):
        later = [r for r in readings if (r.agent, r.server) == (agent, server) and r.request > 1]
        shares, times = [r.evaluated / r.prompt for r in later], [r.seconds for r in later]
        cells = [agent, server, f"{mean(shares):.1%}", f"{max(shares):.1%}"]
        cells += [f"{median(times) * 1000:,.0f} ms", f"{max(times) * 1000:,.0f} ms"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--agent", "agents", multiple=True, type=click.Choice(list(load_shapes())))
@click.option("--llama-server", type=click.Path(exists=True, path_type=Path), help="The program.")
@click.option("--cache-reuse", default=256, type=click.IntRange(0), help="Of llama.cpp's server.")
@click.option("--scale", default=0.2, type=click.FloatRange(0.01), help="Of the texts' lengths.")
@click.option("--requests", default=30, type=click.IntRange(2), help="At most, of each session.")
@click.option("--threads", default=2, type=click.IntRange(1))
@out_option
def agent_servers(
    name: str,
    agents: tuple[str, ...],
    llama_server: Path | None,
    cache_reuse: int,
    scale: float,
    requests: int,
    threads: int,
    out: Path | None,
) -> None:
    """Compare servers on the prompts of coding agents."""
    settings = {"model": name, "scale": scale, "threads": threads, "cache_reuse": cache_reuse}
    result = ResultFile(out, settings=settings | {"requests": requests})
    chosen = {x: trace_prompts(name, x, scale, requests) for x in agents or load_shapes()}
    require_context(chosen)
    file, readings = gguf_file(name, False), list[ServerReading]()
    servers = {f"kvkeep, {mode}": (KVKEEP, file) for mode in MODE_NAMES}
    if llama_server is not None:
        for weights, llama_file in llama_files(file, threads).items():
            servers[f"llama.cpp, {weights}, --cache-reuse {cache_reuse}"] = LLAMA, llama_file
    alignments: dict[str, Any] = {
        f"kvkeep, {mode.name}": dataclasses.asdict(mode.alignment) for mode in MODES
    }
    environment = {"OMP_NUM_THREADS": str(threads)}  # of kvkeep; llama.cpp has an option
    for agent, prompts in chosen.items():
        with ExitStack() as stack:
            values = {"context": CONTEXT, "program": llama_server}
            values |= {"threads": threads, "reuse": cache_reuse}
            urls = dict[str, str]()
            for server, (command, served) in servers.items():
                store = stack.enter_context(tempfile.TemporaryDirectory())
                running = running_server(command, environment, file=served, store=store, **values)
                urls[server] = stack.enter_context(running)
            for number, prompt in enumerate(prompts, 1):
                for server in rotated(list(urls), number):
                    time.sleep(PAUSE)
                    alignment = alignments.get(server)
                    evaluated, seconds = measure_prompt(urls[server], prompt, alignment)
                    reading = ServerReading(
                        *(agent, server, number, prompt.event, len(prompt.prompt)),
                        *(evaluated, rounded(seconds)),
                    )
                    readings.append(reading)
                result.write(readings=readings)
    click.echo(summary_table(readings))


def require_context(prompts_by_agent: Mapping[str, Sequence[PromptOfTrace]]) -> None:
    """Raise InvalidArgument if the servers' context is too short for a prompt and its answer."""
    for agent, prompts in prompts_by_agent.items():
        longest = max(len(prompt.prompt) + len(prompt.answer) + 1 for prompt in prompts)
        if longest > CONTEXT:
            raise InvalidArgument(
                f"a prompt of {agent} has {longest:,} tokens with its answer, and the servers hold "
                f"{CONTEXT:,}: lower --scale or --requests"
            )


def rotated(servers: Sequence[str], number: int) -> list[str]:
    """Return the servers in the order of a request: each begins in its turn."""
    first = number % len(servers)
    return [*servers[first:], *servers[:first]]


if __name__ == "__main__":
    agent_servers()
