"""What a server's work costs on this machine: asked of servers that run, one kind at a time.

A turn of an engine writes one token of each answer, and reads a step of one prompt. How long the
first takes with so many answers, and the second with so many tokens, is all that the simulator
knows of an engine; and how much slower both are beside others that compute on this machine.
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
LONG, SHORT = 49, 1  # tokens of answers, whose difference is made of turns alone
FEW = 4  # tokens of a prompt that is not to cost

Stored = tuple[float, float, float, int]


@dataclass(frozen=True)
class Costs:
    """Of one server with `threads`. Seconds.

    turn_first, turn_each: of a token of all answers, whatever their number, and for each of them.
    step_first, step_each: of a step of a prompt, and for each of its tokens. turns_slower,
    steps_slower: how many times longer they take where so many engines compute at once here.
    commit, load: of a session of `session_bytes` in a folder: hashed, written and synced; read and
    checked. http: of a request that asks
    for nothing. head: of one conditional put there.
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
        """engines: that compute at once on the machine."""
        alone = self.turn_first + self.turn_each * answers if answers else 0.0
        return alone * _between(self.turns_slower, engines)

    def step(self, tokens: int, engines: int = 1) -> float:
        alone = self.step_first + self.step_each * tokens if tokens else 0.0
        return alone * _between(self.steps_slower, engines)


def _between(slower: dict[int, float], engines: int) -> float:
    """By how much, for any number of engines."""
    known = sorted(slower.items())
    for (few, slow), (many, slowest) in itertools.pairwise(known):
        if engines <= many:
            return slow + max(0, engines - few) / (many - few) * (slowest - slow)
    return known[-1][1] * engines / known[-1][0]


class Asking:
    """Asks servers for completions. ids: tokens of a text, of which each prompt is another part."""

    def __init__(self, url: str, ids: Sequence[int]):
        self._client, self._ids = httpx.AsyncClient(base_url=url, timeout=300), ids

    async def servers(self, count: int) -> dict[str, str]:
        """Of so many servers: a session that each has."""
        found: dict[str, str] = {}
        while len(found) < count:
            session = f"{random.getrandbits(64):x}"
            headers = {"x-session-id": session}
            answer = await self._client.get("/v1/models", headers=headers)
            found.setdefault(answer.headers["x-kvkeep-server"], session)
        return found

    async def seconds(self, prompt: int, written: int, session: str) -> float:
        """Of one completion."""
        first = random.randrange(len(self._ids) - prompt)
        body = {
            "model": "any",
            "prompt": list(self._ids[first : first + prompt]),
            "max_tokens": written,
            "temperature": 0,
            "logit_bias": {"0": -100, "2": -100},  # an answer has all of its tokens
        }
        begun = time.perf_counter()
        answer = await self._client.post(
            "/v1/completions", json=body, headers={"x-session-id": session}
        )
        answer.raise_for_status()
        return time.perf_counter() - begun

    async def turn(self, batch: int, session: str) -> float:
        """Seconds of a token of each of so many answers."""
        asked = [[self.seconds(FEW, n, session) for _ in range(batch)] for n in (LONG, SHORT)]
        times = [max(await asyncio.gather(*together)) for together in asked]
        return (times[0] - times[1]) / (LONG - SHORT)

    async def step(self, tokens: int, session: str) -> float:
        """Seconds of a prompt of so many tokens, with all that a request takes."""
        return await self.seconds(tokens, SHORT, session)


async def alone(asking: Asking, session: str) -> tuple[list[float], list[float], float]:
    """Of one server: first value and slope of turns and of steps, and what a request takes."""
    turns = [(n, median([await asking.turn(n, session) for _ in range(3)])) for n in BATCHES]
    steps = [(n, median([await asking.step(n, session) for _ in range(5)])) for n in STEPS]
    health = []
    for _ in range(20):
        begun = time.perf_counter()
        await asking._client.get("/health", headers={"x-session-id": session})
        health.append(time.perf_counter() - begun)
    turn, step, http = _line(turns), _line(steps), median(health)
    step[0] = max(0.0, step[0] - http - sum(turn))
    return turn, step, http


async def beside(asking: Asking, sessions: Sequence[str], seconds: float) -> tuple[float, float]:
    """Seconds of a turn of 4 and of a step of 64 tokens where all of these servers work so."""
    turns, steps, end = list[float](), list[float](), time.perf_counter() + seconds

    async def works(session: str) -> None:
        while time.perf_counter() < end:
            turns.append(await asking.turn(4, session))
            steps.extend([await asking.step(64, session) for _ in range(3)])

    await asyncio.gather(*(works(session) for session in sessions))
    return median(turns), median(steps)


def _line(points: Sequence[tuple[int, float]]) -> list[float]:
    """First value and slope of the line through points, by least squares."""
    x = torch.tensor([[1.0, count] for count, _ in points], dtype=torch.float64)
    y = torch.tensor([[seconds] for _, seconds in points], dtype=torch.float64)
    first, each = torch.linalg.lstsq(x, y).solution.flatten().tolist()
    return [max(0.0, first), max(0.0, each)]


def store(model: Model, ids: Sequence[int]) -> Stored:
    """Seconds of a commit, a load and a head in a folder, and bytes of the session."""
    session = model.session(max_kv_size=512)
    session.feed(list(ids[:512]))
    snapshot = session.snapshot()
    commits, loads, heads, size = list[float](), list[float](), list[float](), 0
    with tempfile.TemporaryDirectory() as folder:
        sessions = SharedSessions(open_object_store(folder))
        for _ in range(7):
            begun = time.perf_counter()
            lease = sessions.acquire("one")
            taken = time.perf_counter()
            size = snapshot.save(SessionPath(lease.objects, lease))
            commits.append(time.perf_counter() - taken)
            lease.release()
            heads.append(taken - begun)
            begun = time.perf_counter()
            Snapshot.load(sessions.existing("one"))
            loads.append(time.perf_counter() - begun)
    return median(commits), median(loads), median(heads), size
