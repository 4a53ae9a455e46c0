"""Discrete-event simulation (simpy) of a fleet: servers, sessions, a store and failures.

The time of a server's work is measured (`costs.py`); latencies of the store, behaviour of users and
failures follow distributions given in `World`. Everything else is as in the code: consistent
hashing by session, a session leased from its first byte to its commit, turns of an engine, leases.
"""

import bisect
import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from benchmarks.fleet.costs import Costs

STEP = 128  # prefill step of an engine, in tokens
_RING_NODES = 100  # virtual nodes per server on the hash ring
Process = Generator[Any, Any, Any]


@dataclass(frozen=True)
class Lognormal:
    """A lognormal distribution by median and 99th percentile; constant if p99 <= median."""

    median: float
    p99: float

    def draw(self, random_source: random.Random) -> float:
        if self.p99 <= self.median:
            return self.median
        return self.median * math.exp(
            random_source.gauss(0, 1) * math.log(self.p99 / self.median) / 2.326
        )


@dataclass(frozen=True)
class World:
    """Assumptions of a simulation except costs. Times in seconds.

    machines: whether each server has its own machine. clients: each sends a request, waits for the
    answer, thinks, and repeats; in its own session if `sessions`. prompt, written: tokens. http: of
    a request, besides engine and store. put, get: of a small object in the store; bandwidth: bytes
    per second between a server and the store. cached: sessions that a server holds in memory.
    between_failures: mean time of one server; 0: never. restart: of a server. detect: until
    requests go to other servers. lease: duration, as for `kvkeep fleet`.
    """

    servers: int
    clients: int
    sessions: bool
    prompt: Lognormal
    written: Lognormal
    think: Lognormal
    http: float
    put: Lognormal
    get: Lognormal
    bandwidth: float
    machines: bool = True
    cached: int = 300
    between_failures: float = 0.0
    restart: float = 15.0
    detect: float = 0.5
    lease: float = 2.0


@dataclass
class SimulationResult:
    """Counts of a simulation: seconds, bytes, requests to the store."""

    seconds: float
    tokens: float = 0.0
    latencies: list[float] = field(default_factory=list)
    takeovers: list[float] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    puts: int = 0
    gets: int = 0
    sent: float = 0.0
    received: float = 0.0
    failures: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(eq=False)
class _Request:
    """A request at a server. done: succeeds when it is answered, fails if the server is killed."""

    unread: int
    unwritten: int
    done: simpy.Event


class _Killed(Exception):
    pass


class _Server:
    """A server and its engine: each turn decodes one token of all answers and prefills one step.

    Other work of the server, heads and commits, takes time of the same cores.
    """

    def __init__(self, fleet: "Fleet", number: int):
        self.fleet, self.number = fleet, number
        self.alive, self.computing = True, False
        self.held: OrderedDict[int, None] = OrderedDict()
        self.waiting: list[_Request] = []
        self.writing: list[_Request] = []
        self._came = fleet.env.event()
        self._owed = 0.0
        fleet.env.process(self._run())

    def works(self, seconds: float) -> simpy.Event:
        """Return the event that ends other work, which delays the engine if it is computing."""
        if self.computing:
            self._owed += seconds
        return self.fleet.env.timeout(seconds)

    def ask(self, prompt: int, written: int) -> _Request:
        answer = _Request(prompt, written, self.fleet.env.event())
        self.waiting.append(answer)
        if not self._came.triggered:
            self._came.succeed()
        return answer

    def kill(self) -> None:
        self.alive = False
        for answer in [*self.waiting, *self.writing]:
            answer.done.fail(_Killed())
            answer.done.defused = True
        self.waiting, self.writing = [], []
        self.held.clear()

    def _run(self) -> Process:
        env, costs = self.fleet.env, self.fleet.costs
        while True:
            if not self.waiting and not self.writing:
                self.computing = False
                self._came = env.event()
                yield self._came
            self.computing = True
            engines = self.fleet.computing()
            if self._owed:
                owed, self._owed = self._owed, 0.0
                yield env.timeout(owed)
            elif self.waiting:
                first = self.waiting[0]
                tokens = min(STEP, first.unread)
                turn = costs.turn(len(self.writing), engines)
                yield env.timeout(turn + costs.step(tokens, engines))
                self._wrote(1)
                if first in self.waiting:
                    first.unread -= tokens
                    if not first.unread:
                        self.waiting.remove(first)
                        self.writing.append(first)
            elif self.writing:
                # Decode until the next answer ends, or until a request arrives.
                turn, begun = costs.turn(len(self.writing), engines), env.now
                self._came = env.event()
                most = min(answer.unwritten for answer in self.writing)
                yield env.timeout(most * turn) | self._came
                turns = min(most, math.ceil((env.now - begun) / turn - 1e-9))
                yield env.timeout(max(0.0, begun + turns * turn - env.now))
                self._wrote(turns)

    def _wrote(self, tokens: int) -> None:
        for answer in list(self.writing):
            answer.unwritten -= tokens
            if answer.unwritten <= 0:
                self.writing.remove(answer)
                answer.done.succeed()


class Fleet:
    """A simulated fleet. Counting begins after `warm` seconds."""

    def __init__(self, world: World, costs: Costs, seed: int = 0):
        self.world, self.costs = world, costs
        self.env, self.chance = simpy.Environment(), random.Random(seed)
        self._servers = [_Server(self, number) for number in range(world.servers)]
        self._made = world.servers
        self._first = self.chance.randrange(2**40)
        self._make_ring()
        self._found = SimulationResult(0.0)
        self._begun = 0.0

    def run(self, seconds: float, warm: float) -> SimulationResult:
        self._begun, self._found = warm, SimulationResult(seconds)
        for client in range(self.world.clients):
            self.env.process(self._client(client))
        if self.world.between_failures:
            self.env.process(self._fails())
        self.env.run(until=warm + seconds)
        return self._found

    def computing(self) -> int:
        """Return the number of engines computing on one machine now."""
        if self.world.machines:
            return 1
        return sum(server.computing for server in self._servers)

    def _client(self, number: int) -> Process:
        world, chance = self.world, self.chance
        yield self.env.timeout(chance.random() * world.think.median)
        turn = 0
        while True:
            # Without a session, each request goes to a random server.
            key = self._first + (number if world.sessions else number + turn * 1_000_003)
            asked, written = self.env.now, max(1, round(world.written.draw(chance)))
            prompt = max(1, round(world.prompt.draw(chance)))
            failed: float | None = None
            while True:
                try:
                    yield from self._request(key, prompt, written, failed)
                    break
                except _Killed:
                    failed = failed or self.env.now
                    yield self.env.timeout(world.detect)
            self._count(asked, written)
            turn += 1
            yield self.env.timeout(world.think.draw(chance))

    def _request(self, key: int, prompt: int, written: int, failed: float | None) -> Process:
        world, server = self.world, self._server(key)
        yield self.env.timeout(world.http / 2)
        if world.sessions:
            if failed is not None:  # leased by the failed server until its lease expires
                left = failed + self.chance.uniform(2 / 3, 1) * world.lease - self.env.now
                yield self.env.timeout(max(0.0, left))
            yield from self._take(server, key)
        if failed is not None:
            self._takeover(failed)
        if not server.alive:
            raise _Killed
        yield server.ask(prompt, written).done
        if world.sessions:
            yield from self._commit(server, key)
        yield self.env.timeout(world.http / 2)

    def _take(self, server: _Server, key: int) -> Process:
        """Write the head that acquires the lease; load the session unless it is in memory."""
        world, counted = self.world, self._counts
        yield server.works(self.costs.head)
        yield self.env.timeout(world.put.draw(self.chance))
        if counted:
            self._found.puts += 1
        if key in server.held:
            server.held.move_to_end(key)
            self._found.hits += counted
            return
        self._found.misses += counted
        size = self.costs.session_bytes
        yield self.env.timeout(2 * world.get.draw(self.chance) + size / world.bandwidth)
        yield server.works(self.costs.load)
        if counted:
            self._found.gets += 3
            self._found.received += size
        server.held[key] = None
        while len(server.held) > world.cached:
            server.held.popitem(last=False)

    def _commit(self, server: _Server, key: int) -> Process:
        """Write a snapshot and a head."""
        world, size = self.world, self.costs.session_bytes
        puts = world.put.draw(self.chance) + world.put.draw(self.chance)
        yield server.works(self.costs.commit)
        yield self.env.timeout(puts + size / world.bandwidth)
        if not server.alive:
            raise _Killed
        if self._counts:
            self._found.puts += 2
            self._found.sent += size

    def _fails(self) -> Process:
        """Kill random servers from time to time, and start replacements."""
        world = self.world
        while True:
            wait = self.chance.expovariate(world.servers / world.between_failures)
            yield self.env.timeout(wait)
            alive = [server for server in self._servers if server.alive]
            if alive:
                killed = self.chance.choice(alive)
                killed.kill()
                self._found.failures += self._counts
                self._servers.remove(killed)
                self._make_ring()
                self.env.process(self._restarts())

    def _restarts(self) -> Process:
        yield self.env.timeout(self.world.restart)
        self._servers.append(_Server(self, self._made))
        self._made += 1
        self._make_ring()

    def _make_ring(self) -> None:
        nodes = [
            (_hash(f"{server.number}:{node}"), server)
            for server in self._servers
            for node in range(_RING_NODES)
        ]
        nodes.sort(key=lambda pair: pair[0])
        self._places = [place for place, _ in nodes]
        self._nodes = [server for _, server in nodes]

    def _server(self, key: int) -> _Server:
        if not self._nodes:
            raise _Killed
        place = bisect.bisect(self._places, _hash(f"session {key}")) % len(self._nodes)
        return self._nodes[place]

    @property
    def _counts(self) -> bool:
        return bool(self.env.now >= self._begun)

    def _count(self, asked: float, written: int) -> None:
        within = max(0.0, self.env.now - max(asked, self._begun)) / (self.env.now - asked)
        self._found.tokens += written * within
        if asked >= self._begun:
            self._found.latencies.append(self.env.now - asked)

    def _takeover(self, failed: float) -> None:
        if self._counts:
            self._found.takeovers.append(self.env.now - failed)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
