"""Costs of a server's work on this machine, measured on running servers.

A turn of an engine decodes one token of each answer and prefills one step of one prompt. The
simulator models an engine by the time of the former by number of answers, of the latter by number
of tokens, and by the slowdown of both when several engines compute on this machine.
"""

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import httpx
import torch

from kvkeep import Model, Snapshot
from kvkeep.storage.objects import open_object_store
from kvkeep.storage.sessions.shared import SessionPath, SharedSessions

BATCHES = (1, 2, 4, 8)
STEPS = (32, 64, 128)
LONG_ANSWER, SHORT_ANSWER = (
    49,
    1,
)  # answer lengths in tokens; their difference consists of turns alone
SHORT_PROMPT = 4  # tokens of a prompt of negligible cost

StoreCosts = tuple[float, float, float, int]


@dataclass(frozen=True)
class Costs:
    """Costs of one server with `threads` threads, in seconds.

    turn_first, turn_each: of a turn, constant and per answer. step_first, step_each: of a prefill
    step, constant and per token. turns_slower, steps_slower: slowdown by number of engines that
    compute at once here. commit, load: of a session of `session_bytes` in a folder: hashed, written
    and synced; read and checked. head: of one conditional put there. http: of a request without
    work.
    """

    threads: int
    turn_first: float
    turn_each: float
    step_first: float
    step_each: float
    turns_slower: dict[int, float]
    steps_slower: dict[int, float]
    commit: float
    load: float
    head: float
    session_bytes: int
    http: float

    def turn(self, answers: int, engines: int = 1) -> float:
        """Return the seconds of a turn. engines: computing at once on the machine."""
        measure_alone = self.turn_first + self.turn_each * answers if answers else 0.0
        return measure_alone * _interpolate(self.turns_slower, engines)

    def step(self, tokens: int, engines: int = 1) -> float:
        measure_alone = self.step_first + self.step_each * tokens if tokens else 0.0
        return measure_alone * _interpolate(self.steps_slower, engines)


def _interpolate(factors: dict[int, float], engines: int) -> float:
    """Return the slowdown for any number of engines."""
    points = sorted(factors.items())
    for (lower, lower_factor), (upper, upper_factor) in itertools.pairwise(points):
        if engines <= upper:
            return lower_factor + max(0, engines - lower) / (upper - lower) * (
                upper_factor - lower_factor
            )
    return points[-1][1] * engines / points[-1][0]


class CompletionClient:
    """Sends completions to servers. ids: tokens of a text; each prompt is a different part."""

    def __init__(self, url: str, ids: Sequence[int]):
        self._client, self._ids = httpx.AsyncClient(base_url=url, timeout=300), ids

    async def servers(self, count: int) -> dict[str, str]:
        """Return a session id for each of `count` servers, by server name."""
        sessions: dict[str, str] = {}
        while len(sessions) < count:
            session = f"{random.getrandbits(64):x}"
            headers = {"x-session-id": session}
            answer = await self._client.get("/v1/models", headers=headers)
            sessions.setdefault(answer.headers["x-kvkeep-server"], session)
        return sessions

    async def seconds(self, prompt: int, written: int, session: str) -> float:
        """Return the seconds of one completion."""
        start_token = random.randrange(len(self._ids) - prompt)
        body = {
            "model": "any",
            "prompt": list(self._ids[start_token : start_token + prompt]),
            "max_tokens": written,
            "temperature": 0,
            "logit_bias": {"0": -100, "2": -100},  # no end of text: answers have their full length
        }
        start = time.perf_counter()
        answer = await self._client.post(
            "/v1/completions", json=body, headers={"x-session-id": session}
        )
        answer.raise_for_status()
        return time.perf_counter() - start

    async def turn(self, batch: int, session: str) -> float:
        """Return the seconds of a turn with `batch` answers."""
        batches = [
            [self.seconds(SHORT_PROMPT, n, session) for _ in range(batch)]
            for n in (LONG_ANSWER, SHORT_ANSWER)
        ]
        times = [max(await asyncio.gather(*requests)) for requests in batches]
        return (times[0] - times[1]) / (LONG_ANSWER - SHORT_ANSWER)

    async def step(self, tokens: int, session: str) -> float:
        """Return the seconds of a request with a prompt of `tokens` and an answer of one token."""
        return await self.seconds(tokens, SHORT_ANSWER, session)


async def measure_alone(
    client: CompletionClient, session: str
) -> tuple[list[float], list[float], float]:
    """Measure one server: constant and slope of turns and of steps, and seconds of a request."""
    turns = [(n, median([await client.turn(n, session) for _ in range(3)])) for n in BATCHES]
    steps = [(n, median([await client.step(n, session) for _ in range(5)])) for n in STEPS]
    health = []
    for _ in range(20):
        start = time.perf_counter()
        await client._client.get("/health", headers={"x-session-id": session})
        health.append(time.perf_counter() - start)
    turn, step, http = _fit_line(turns), _fit_line(steps), median(health)
    step[0] = max(0.0, step[0] - http - sum(turn))
    return turn, step, http


async def measure_beside(
    client: CompletionClient, sessions: Sequence[str], seconds: float
) -> tuple[float, float]:
    """Return seconds of a turn of 4 and a step of 64 tokens while all these servers are busy."""
    turns, steps, end = list[float](), list[float](), time.perf_counter() + seconds

    async def work(session: str) -> None:
        while time.perf_counter() < end:
            turns.append(await client.turn(4, session))
            steps.extend([await client.step(64, session) for _ in range(3)])

    await asyncio.gather(*(work(session) for session in sessions))
    return median(turns), median(steps)


def _fit_line(points: Sequence[tuple[int, float]]) -> list[float]:
    """Return constant and slope of the line through points, by least squares."""
    x = torch.tensor([[1.0, count] for count, _ in points], dtype=torch.float64)
    y = torch.tensor([[seconds] for _, seconds in points], dtype=torch.float64)
    first, each = torch.linalg.lstsq(x, y).solution.flatten().tolist()
    return [max(0.0, first), max(0.0, each)]


def measure_store(model: Model, ids: Sequence[int]) -> StoreCosts:
    """Return seconds of a commit, a load and a head in a folder, and bytes of the session."""
    session = model.session(max_kv_size=512)
    session.feed(list(ids[:512]))
    snapshot = session.snapshot()
    commits, loads, heads, nbytes = list[float](), list[float](), list[float](), 0
    with tempfile.TemporaryDirectory() as folder:
        sessions = SharedSessions(open_object_store(folder))
        for _ in range(7):
            start = time.perf_counter()
            lease = sessions.acquire("one")
            acquired = time.perf_counter()
            nbytes = snapshot.save(SessionPath(lease.objects, lease))
            commits.append(time.perf_counter() - acquired)
            lease.release()
            heads.append(acquired - start)
            start = time.perf_counter()
            Snapshot.load(sessions.existing_path("one"))
            loads.append(time.perf_counter() - start)
    return median(commits), median(loads), median(heads), nbytes
