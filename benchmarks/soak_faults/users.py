"""Simulated users: each makes one operation after another, and checks what it finds after each."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import httpx

from benchmarks.soak_faults.changes import GREEDY, PROPOSALS, Proposal
from benchmarks.soak_faults.checks import Checker
from benchmarks.soak_faults.deployment import Deployment
from benchmarks.soak_faults.effects import first_content
from benchmarks.soak_faults.latency import Latencies
from benchmarks.soak_faults.records import Change, Record, SessionPoint, UserSession
from kvkeep import Client, Model
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

    latencies: of the users' operations, without replays. model: the servers', for its tokenizer.
    replay: compares a session that was saved with a lone replay of its changes. deleted: names of
    sessions. is_answered: whether a request of the operation, other than to read, succeeded.
    """

    def __init__(
        self,
        number: int,
        key: str,
        server: Deployment,
        record: Record,
        latencies: Latencies,
        model: Model,
        replay: Callable[[UserSession], str | None] | None,
    ) -> None:
        super().__init__(name=f"user {number}", daemon=True)
        self.key, self.server, self.record, self.replay = key, server, record, replay
        self.latencies, self.replay_seconds = latencies, 0.0
        self.model, self.deleted, self.is_answered = model, list[str](), False
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
                self.is_answered = False
                self._operate()
                if self.is_answered:
                    seconds = time.monotonic() - start - self.replay_seconds
                    self.latencies.add(self.number, seconds)
        except Exception as error:
            self.checker.violation(f"{type(error).__name__}: {error}")
            raise

    def _operate(self) -> None:
        """Make an operation; none if a change was chosen that the session does not allow."""
        sessions = self.checker.sessions
        if not sessions or (len(sessions) < 3 and self.rng.random() < 0.1):
            self._create()
            return
        held = self.rng.choice(sessions)
        if len(held.points[-1].tokens) > MAX_TOKENS:
            self._finish(held)
            return
        others = (self._save, self._fork, self._restore, self._ask, self._look)
        if self.rng.random() < len(others) / (len(others) + 2 * len(PROPOSALS)):
            self.rng.choice(others)(held)
            return
        proposal = self.rng.choice(PROPOSALS)(self.rng, held, self.model)
        if proposal is not None:
            self._change(held, proposal)

    # Changes

    def _change(self, held: UserSession, proposal: Proposal) -> None:
        """Make a change, and check what the session holds after it."""
        change, response = proposal.change, None
        # Over a shared store a retry may be refused although the first try is about to be made.
        refusals = NoRoom if self.server.is_shared else (Busy, NoRoom)
        try:
            response = proposal.call(self._remote(held), held.points[-1].revision)
            self.is_answered = True
        except refusals:
            self.checker.compare_unchanged(held)  # a refused change is not made
            return
        except InvalidArgument as error:
            if not isinstance(error, NoSuchSession):
                self.checker.violation(f"{held.name}: {change} was refused: {error}")
                return
        except KvkeepError as error:
            held.events.append(f"{change} after point {len(held.points) - 1}: {error!r}")
        self.record.count(change.kind)
        self.checker.compare_after(held, change, response)

    def _tried(self, request: Callable[[], Any]) -> Any:
        """Return the response to a request; None if it failed."""
        try:
            response = request()
        except KvkeepError:
            return None
        self.is_answered = True
        return response

    def _look(self, held: UserSession) -> None:
        """Read a session that was not changed, and one that was deleted."""
        self.checker.compare_unchanged(held)
        if self.deleted:
            self.checker.require_deleted(self.rng.choice(self.deleted))

    # Sessions

    def _create(self) -> None:
        self.made += 1
        name = f"u{self.number}-{self.made}"
        word = "".join(self.rng.choice("bcdfghjklmnpqrstvwxz") for _ in range(10))
        with self.record.lock:
            self.record.words[word] = self.key
        policies: tuple[PolicyName, ...] = ("full", "sliding")
        text = f"{word}. " + " ".join(f"{word} is {n}." for n in range(4))
        tokens = tuple(self.model.text.encode(text))
        new = UserSession(name, word, self.rng.choice(policies), [], self.server.generation)
        create = partial(self.client.create, name, policy=new.policy)
        response = self._tried(lambda: create().feed(text, revision=0))
        self.record.count("create")
        point = SessionPoint(first_content(tokens, new.policy), 1, Change("feed", tokens=tokens))
        self.checker.add_new(new, point, is_made=response is not None)

    def _save(self, held: UserSession) -> None:
        index, generation = len(held.points) - 1, self.server.generation
        revision = held.points[-1].revision
        response = self._tried(lambda: self._remote(held).save(revision=revision))
        if response is None:
            self.checker.compare_unchanged(held)
            return
        self.record.count("save")
        if response["saved_revision"] != revision:
            self.checker.violation(f"{held.name}: the save of revision {revision} gave {response}")
        if held.generation == generation == self.server.generation:
            held.saved, held.saved_revision = index, revision
            if self.rng.random() < 0.5:
                self._replay(held)
        else:
            self.checker.compare_unchanged(held)

    def _replay(self, held: UserSession) -> None:
        """Compare a session that was just saved with a lone replay."""
        if self.replay is None:
            return
        start = time.monotonic()
        difference = self.replay(held)
        self.replay_seconds = time.monotonic() - start
        self.record.replayed += 1
        if difference is not None:
            self.checker.violation(f"{held.name}: {difference}")

    def _fork(self, held: UserSession) -> None:
        new, revision = self._new_copy(held, "fork"), held.points[-1].revision
        response = self._tried(lambda: self._remote(held).fork(new.name, revision=revision))
        self._add_copy(held, new, "fork", is_made=response is not None)

    def _restore(self, held: UserSession) -> None:
        """Restore another session from a snapshot of this one."""
        new, revision = self._new_copy(held, "restore"), held.points[-1].revision
        response = self._tried(lambda: self._remote(held).snapshot(new.name, revision=revision))
        if response is not None:
            response = self._tried(lambda: self.client.restore(new.name, new.name))
        with suppress(KvkeepError):  # then it is there, or not; it is not asked for again
            self.client.delete_snapshot(new.name)
        self._add_copy(held, new, "restore", is_made=response is not None)

    def _new_copy(self, held: UserSession, kind: str) -> UserSession:
        """Return a session with the points of another, before it is made."""
        self.made += 1
        name, points = f"u{self.number}-{self.made}", list(held.points)
        copy = UserSession(name, held.word, held.policy, points, self.server.generation)
        copy.origin, copy.events = len(points), [*held.events, f"{kind} of {held.name}"]
        return copy

    def _add_copy(self, held: UserSession, new: UserSession, kind: str, is_made: bool) -> None:
        """Add a copy with what the other session held, if it is there."""
        self.record.count(kind)
        if not is_made:
            self.checker.compare_unchanged(held)
        point = SessionPoint(new.points[-1].content, 0, Change(kind))
        self.checker.add_new(new, point, is_made)

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
        self.is_answered = True
        (choice,), usage = (document := response.json())["choices"], document["usage"]
        text = choice["message"]["content"]
        self.checker.check_words(f"the answer to {question!r}", text)
        answer = (text, choice["finish_reason"], usage["completion_tokens"])
        expected = self.record.first_answer(question, answer)
        if answer != expected:
            difference = f"answered by {answer!r}, and before by {expected!r}"
            self.checker.violation(f"{question!r} was {difference}")

    def _finish(self, held: UserSession) -> None:
        """Save a session, compare it with a replay now and then, and delete it."""
        self._save(held)
        if held not in self.checker.sessions:
            return
        self.checker.sessions.remove(held)
        if self._tried(lambda: self.client.delete(held.name)) is not None:
            self.deleted.append(held.name)
            self.checker.require_deleted(held.name)
        self.record.count("delete session")

    def _remote(self, held: UserSession) -> Any:
        return self.client.session(held.name)
