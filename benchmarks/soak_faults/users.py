"""Simulated users: each knows what its sessions must hold, and checks it after every change.

After a kill a session may be at any state since the last acknowledged save, never before it. After
any other fault it must be at its newest state. A change whose response was lost is made or not.
"""

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from benchmarks.soak_faults.changes import GREEDY, PROPOSALS, Check, Proposal
from benchmarks.soak_faults.faults import FaultyServer
from benchmarks.soak_faults.records import Change, Record, SessionPoint, UserSession
from kvkeep import Client
from kvkeep.errors import (
    Busy,
    InvalidArgument,
    KvkeepError,
    NoRoom,
    NoSuchSession,
    WrongRevision,
)
from kvkeep.types import PolicyName

QUESTIONS = (
    "Where is the capital city of Norway?",
    "Where is the capital city of Norway, and how many people live there?",
    "What is a key-value cache?",
)
MAX_TOKENS = 250  # of a session, before it is deleted


class User(threading.Thread):
    """One user with one key, who makes one change after another until the record is full.

    replay: compares a session that was saved with a lone replay of its changes.
    """

    def __init__(
        self,
        number: int,
        key: str,
        server: FaultyServer,
        record: Record,
        replay: Callable[[UserSession], str | None] | None,
    ) -> None:
        super().__init__(name=f"user {number}", daemon=True)
        self.key, self.server, self.record, self.replay = key, server, record, replay
        self.rng = random.Random(number)
        self.number, self.made = number, 0
        self.sessions = list[UserSession]()
        self.client = Client(server.url, key)
        self.http = httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=None
        )

    def run(self) -> None:
        try:
            while not self.record.is_over:
                self._operate()
        except Exception as error:
            self._violation(f"{type(error).__name__}: {error}")
            raise

    def _operate(self) -> None:
        if not self.sessions or (len(self.sessions) < 3 and self.rng.random() < 0.1):
            self._create()
            return
        held = self.rng.choice(self.sessions)
        if len(held.points[-1].tokens) > MAX_TOKENS:
            self._finish(held)
            return
        others = (self._save, self._fork, self._restore, self._ask, self._read_again)
        if self.rng.random() < len(others) / (len(others) + 2 * len(PROPOSALS)):
            self.rng.choice(others)(held)
        elif (proposal := self.rng.choice(PROPOSALS)(self.rng, held)) is not None:
            self._change(held, proposal)

    # Changes

    def _change(self, held: UserSession, proposal: Proposal) -> None:
        """Make a change, and check what the session holds after it."""
        change, check, pending = proposal.change, proposal.check, None
        try:
            proposal.call(self._remote(held), held.points[-1].revision)
        except (Busy, NoRoom):
            self._read_again(held)  # a refused change is not made
            return
        except InvalidArgument as error:
            if not isinstance(error, NoSuchSession):
                self._violation(f"{held.name}: {change} was refused: {error}")
                return
            pending = check
        except (WrongRevision, KvkeepError) as error:
            held.events.append(f"{change} after point {len(held.points) - 1}: {error!r}")
            pending = check
        self.record.count(change.kind)
        self._compare(held, change, check, is_certain=pending is None)

    def _compare(self, held: UserSession, change: Change, check: Check, is_certain: bool) -> None:
        """Compare a session with what its user knows.

        is_certain: whether the server has acknowledged the change.
        """
        found, generation = self._read(held.name)
        newest = held.points[-1]
        if found is not None:
            self._check_words(held, found)
            tokens, revision = found["tokens"], found["revision"]
            if check(newest.tokens, tokens) and revision > newest.revision:
                held.points.append(SessionPoint(tokens, revision, change))
                held.generation = generation
                return
        if not is_certain:
            self.record.unanswered += 1
            if found is not None and tokens == newest.tokens:
                held.generation = generation
                return
        if generation > held.generation:
            self._go_back(held, found, generation)
            return
        self._violation(f"{held.name}: {held.events}, {change} of {newest} gave {found}")

    def _go_back(self, held: UserSession, found: dict[str, Any] | None, generation: int) -> None:
        """Accept the state after a kill, if it is none from before the last save."""
        self.record.lost += 1
        held.generation = generation
        if found is None:
            if held.saved >= 0:
                self._violation(f"{held.name}: lost, although it was saved")
            self.sessions.remove(held)
            return
        for index in range(len(held.points) - 1, max(held.saved, 0) - 1, -1):
            if held.points[index].tokens == found["tokens"]:
                del held.points[index + 1 :]
                point = held.points[index]
                held.points[index] = SessionPoint(point.tokens, found["revision"], point.change)
                held.saved = index
                held.events.append(f"a kill led back to point {index}")
                return
        self._violation(f"{held.name}: after a kill {found}, saved was {held.points[held.saved :]}")

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
        found, generation = self._read(name)
        self.record.count("create")
        if found is None or not found["tokens"]:
            return
        point = SessionPoint(found["tokens"], found["revision"], Change("feed"))
        self.sessions.append(UserSession(name, word, policy, [point], generation))

    def _save(self, held: UserSession) -> None:
        index, generation = len(held.points) - 1, self.server.generation
        try:
            self._remote(held).save(revision=held.points[-1].revision)
        except KvkeepError:
            self._read_again(held)
            return
        self.record.count("save")
        if held.generation == generation == self.server.generation:
            held.saved = index
            if self.rng.random() < 0.5:
                self._replay(held)
        else:
            self._read_again(held)

    def _replay(self, held: UserSession) -> None:
        """Compare a session that was just saved with a lone replay."""
        if self.replay is None or held.has("turn"):  # turns depend on the chat template
            return
        difference = self.replay(held)
        self.record.replayed += 1
        if difference is not None:
            self._violation(f"{held.name}: {difference}")

    def _fork(self, held: UserSession) -> None:
        self.made += 1
        name = f"u{self.number}-{self.made}"
        try:
            self._remote(held).fork(name, revision=held.points[-1].revision)
        except KvkeepError:
            self._read_again(held)
        self._add_copy(held, name, "fork")

    def _restore(self, held: UserSession) -> None:
        """Restore another session from a snapshot of this one."""
        self.made += 1
        name = f"u{self.number}-{self.made}"
        try:
            self._remote(held).snapshot(name, revision=held.points[-1].revision)
            self.client.restore(name, name)
        except KvkeepError:
            self._read_again(held)
        with suppress(KvkeepError):  # then it is there, or not; it is not asked for again
            self.client.delete_snapshot(name)
        self._add_copy(held, name, "restore")

    def _add_copy(self, held: UserSession, name: str, kind: str) -> None:
        """Add a session that was copied, if it is there, and check that it holds the same."""
        self.record.count(kind)
        found, generation = self._read(name)
        if found is None:
            return
        if found["tokens"] != held.points[-1].tokens:
            self._violation(f"{name}: a {kind} of {held.points[-1]} holds {found}")
        point = SessionPoint(found["tokens"], found["revision"], Change(kind))
        points = [*held.points, point]
        self.sessions.append(UserSession(name, held.word, held.policy, points, generation))

    def _ask(self, held: UserSession) -> None:
        """Ask a question without a session: its answer is always the same, to the token."""
        question = self.rng.choice(QUESTIONS)
        body = {"messages": [{"role": "user", "content": question}], **GREEDY, "max_tokens": 8}
        try:
            response = self.http.post("/v1/chat/completions", json=body)
        except httpx.TransportError:
            return
        self.record.count("ask")
        if not response.is_success:
            return
        answer = response.json()["choices"][0]["message"]["content"]
        with self.record.lock:
            expected = self.record.answers.setdefault(question, answer)
        if answer != expected:
            self._violation(f"{question!r} was answered by {answer!r}, and before by {expected!r}")

    def _read_again(self, held: UserSession) -> None:
        """Compare without a change: nothing may have happened to the session."""
        found, generation = self._read(held.name)
        self.record.count("read")
        if found is not None and found["tokens"] == held.points[-1].tokens:
            self._check_words(held, found)
            held.generation = generation
        elif generation > held.generation:
            self._go_back(held, found, generation)
        else:
            self._violation(f"{held.name}: {held.points[-1]} has become {found}")

    def _finish(self, held: UserSession) -> None:
        """Save a session, compare it with a replay now and then, and delete it."""
        self._save(held)
        if held not in self.sessions:
            return
        with suppress(KvkeepError):  # then it is there, or not; it is not asked for again
            self.client.delete(held.name)
        self.record.count("delete session")
        self.sessions.remove(held)

    # Reading

    def _read(self, name: str) -> tuple[dict[str, Any] | None, int]:
        """Return a session's tokens, text and revision, as soon as the server answers."""
        while True:
            self.server.ready.wait()
            generation = self.server.generation
            try:
                view = self.client.session(name).text()
            except NoSuchSession:
                if self.server.ready.is_set() and self.server.generation == generation:
                    return None, generation
            except KvkeepError:
                continue
            else:
                tokens = tuple(piece["id"] for piece in view["pieces"])
                text = "".join(piece["text"] for piece in view["pieces"])
                found = {"tokens": tokens, "text": text, "revision": view["revision"]}
                if self.server.generation == generation:
                    return found, generation

    def _check_words(self, held: UserSession, found: dict[str, Any]) -> None:
        with self.record.lock:
            strangers = [
                word for word in self.record.words if word != held.word and word in found["text"]
            ]
        if strangers:
            self._violation(f"{held.name} holds words of others: {strangers}")

    def _remote(self, held: UserSession) -> Any:
        return self.client.session(held.name)

    def _violation(self, text: str) -> None:
        with self.record.lock:
            self.record.violations.append(f"{self.name}, after {self.record.total:,}: {text:.2000}")
