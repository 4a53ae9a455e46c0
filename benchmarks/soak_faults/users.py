"""Simulated users: each makes one operation after another, and checks what it finds after each."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from benchmarks.soak_faults.changes import GREEDY, PROPOSALS, Proposal
from benchmarks.soak_faults.checks import Checker
from benchmarks.soak_faults.deployment import Deployment
from benchmarks.soak_faults.latency import Latencies
from benchmarks.soak_faults.records import Change, Record, SessionPoint, UserSession
from kvkeep import Client
from kvkeep.errors import Busy, InvalidArgument, KvkeepError, NoRoom, NoSuchSession
from kvkeep.types import PolicyName

QUESTIONS = (
    "Where is the capital city of Norway?",
    "Where is the capital city of Norway, and how many people live there?",
    "What is a key-value cache?",
)
MAX_TOKENS = 250  # of a session, before it is deleted


class User(threading.Thread):
    """One user with one key, who makes one change after another until the record is full.

    latencies: of the users' operations, without replays. replay: compares a session that was saved
    with a lone replay of its changes.
    """

    def __init__(
        self,
        number: int,
        key: str,
        server: Deployment,
        record: Record,
        latencies: Latencies,
        replay: Callable[[UserSession], str | None] | None,
    ) -> None:
        super().__init__(name=f"user {number}", daemon=True)
        self.key, self.server, self.record, self.replay = key, server, record, replay
        self.latencies, self.replay_seconds = latencies, 0.0
        self.rng = random.Random(number)
        self.number, self.made = number, 0
        self.clients = [Client(url, key) for url in server.urls]
        self.checker = Checker(self.name, self.clients, server, record)
        headers = {"Authorization": f"Bearer {key}"}
        self.http = [httpx.Client(base_url=u, headers=headers, timeout=None) for u in server.urls]

    @property
    def client(self) -> Client:
        """A client of any of the servers, another one each time."""
        return self.rng.choice(self.clients)

    def run(self) -> None:
        try:
            while not self.record.is_over:
                start, self.replay_seconds = time.monotonic(), 0.0
                if self._operate():
                    seconds = time.monotonic() - start - self.replay_seconds
                    self.latencies.add(self.number, seconds)
        except Exception as error:
            self.checker.violation(f"{type(error).__name__}: {error}")
            raise

    def _operate(self) -> bool:
        """Make an operation. False if a change was chosen that the session does not allow."""
        sessions = self.checker.sessions
        if not sessions or (len(sessions) < 3 and self.rng.random() < 0.1):
            self._create()
            return True
        held = self.rng.choice(sessions)
        if len(held.points[-1].tokens) > MAX_TOKENS:
            self._finish(held)
            return True
        others = (self._save, self._fork, self._restore, self._ask, self.checker.compare_unchanged)
        if self.rng.random() < len(others) / (len(others) + 2 * len(PROPOSALS)):
            self.rng.choice(others)(held)
            return True
        proposal = self.rng.choice(PROPOSALS)(self.rng, held)
        if proposal is not None:
            self._change(held, proposal)
        return proposal is not None

    # Changes

    def _change(self, held: UserSession, proposal: Proposal) -> None:
        """Make a change, and check what the session holds after it."""
        change, is_certain = proposal.change, True
        # Over a shared store a retry may be refused although the first try is about to be made.
        refusals = NoRoom if self.server.is_shared else (Busy, NoRoom)
        try:
            proposal.call(self._remote(held), held.points[-1].revision)
        except refusals:
            self.checker.compare_unchanged(held)  # a refused change is not made
            return
        except InvalidArgument as error:
            if not isinstance(error, NoSuchSession):
                self.checker.violation(f"{held.name}: {change} was refused: {error}")
                return
            is_certain = False
        except KvkeepError as error:
            held.events.append(f"{change} after point {len(held.points) - 1}: {error!r}")
            is_certain = False
        self.record.count(change.kind)
        self.checker.compare(held, change, proposal.check, is_certain)

    # Sessions

    def _create(self) -> None:
        self.made += 1
        name = f"u{self.number}-{self.made}"
        word = "".join(self.rng.choice("bcdfghjklmnpqrstvwxz") for _ in range(10))
        with self.record.lock:
            self.record.words[word] = self.key
        policies: tuple[PolicyName, ...] = ("full", "sliding")
        policy = self.rng.choice(policies)
        try:
            remote = self.client.create(name, policy=policy)
            remote.feed(f"{word}. " + " ".join(f"{word} is {n}." for n in range(4)))
        except KvkeepError:
            pass
        found, generation = self.checker.read(name)
        self.record.count("create")
        if found is None or not found.content.tokens:
            return
        if found.text.count(f"{word} is 0.") != 1:
            self.checker.violation(f"{name}: its first text is not there once: {found}")
        point = SessionPoint(found.content, found.revision, Change("feed"))
        self.checker.sessions.append(UserSession(name, word, policy, [point], generation))

    def _save(self, held: UserSession) -> None:
        index, generation = len(held.points) - 1, self.server.generation
        try:
            self._remote(held).save(revision=held.points[-1].revision)
        except KvkeepError:
            self.checker.compare_unchanged(held)
            return
        self.record.count("save")
        if held.generation == generation == self.server.generation:
            held.saved = index
            if self.rng.random() < 0.5:
                self._replay(held)
        else:
            self.checker.compare_unchanged(held)

    def _replay(self, held: UserSession) -> None:
        """Compare a session that was just saved with a lone replay."""
        if self.replay is None or held.has("turn"):  # turns depend on the chat template
            return
        start = time.monotonic()
        difference = self.replay(held)
        self.replay_seconds = time.monotonic() - start
        self.record.replayed += 1
        if difference is not None:
            self.checker.violation(f"{held.name}: {difference}")

    def _fork(self, held: UserSession) -> None:
        self.made += 1
        name, points = f"u{self.number}-{self.made}", list(held.points)
        try:
            self._remote(held).fork(name, revision=points[-1].revision)
        except KvkeepError:
            self.checker.compare_unchanged(held)
        self._add_copy(held, points, name, "fork")

    def _restore(self, held: UserSession) -> None:
        """Restore another session from a snapshot of this one."""
        self.made += 1
        name, points = f"u{self.number}-{self.made}", list(held.points)
        try:
            self._remote(held).snapshot(name, revision=points[-1].revision)
            self.client.restore(name, name)
        except KvkeepError:
            self.checker.compare_unchanged(held)
        with suppress(KvkeepError):  # then it is there, or not; it is not asked for again
            self.client.delete_snapshot(name)
        self._add_copy(held, points, name, "restore")

    def _add_copy(
        self, held: UserSession, points: list[SessionPoint], name: str, kind: str
    ) -> None:
        """Add a copy of a session that was at these points, if it is there, and compare it."""
        self.record.count(kind)
        found, generation = self.checker.read(name)
        if found is None:
            return
        if found.content != points[-1].content:
            self.checker.violation(f"{name}: a {kind} of {points[-1]} holds {found}")
        point = SessionPoint(found.content, found.revision, Change(kind))
        copy = UserSession(name, held.word, held.policy, [*points, point], generation)
        copy.events = [*held.events, f"{kind} of {held.name}"]
        self.checker.sessions.append(copy)

    def _ask(self, held: UserSession) -> None:
        """Ask a question without a session: its answer is always the same, to the token."""
        question = self.rng.choice(QUESTIONS)
        body = {"messages": [{"role": "user", "content": question}], **GREEDY, "max_tokens": 8}
        try:
            response = self.rng.choice(self.http).post("/v1/chat/completions", json=body)
        except httpx.TransportError:
            return
        self.record.count("ask")
        if not response.is_success:
            return
        answer = response.json()["choices"][0]["message"]["content"]
        with self.record.lock:
            expected = self.record.answers.setdefault(question, answer)
        if answer != expected:
            difference = f"answered by {answer!r}, and before by {expected!r}"
            self.checker.violation(f"{question!r} was {difference}")

    def _finish(self, held: UserSession) -> None:
        """Save a session, compare it with a replay now and then, and delete it."""
        self._save(held)
        if held not in self.checker.sessions:
            return
        with suppress(KvkeepError):  # then it is there, or not; it is not asked for again
            self.client.delete(held.name)
        self.record.count("delete session")
        self.checker.sessions.remove(held)

    def _remote(self, held: UserSession) -> Any:
        return self.client.session(held.name)
