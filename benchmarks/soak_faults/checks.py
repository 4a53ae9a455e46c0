"""Reading of sessions, and comparison with their records."""

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.soak_faults.deployment import Deployment
from benchmarks.soak_faults.records import (
    Change,
    Content,
    Found,
    Record,
    SessionPoint,
    UserSession,
)
from benchmarks.soak_faults.verdicts import judge, judge_new
from kvkeep import Client
from kvkeep.client.remote import RemoteSession
from kvkeep.errors import KvkeepError, NoSuchSession

_RETRY_SECONDS = 0.02  # between attempts to read


class Checker:
    """Reads the sessions of a user, and records what contradicts its record of them.

    user: the name in violations. clients: one for each server. sessions: those that are not lost.
    """

    def __init__(
        self, user: str, clients: list[Client], server: Deployment, record: Record
    ) -> None:
        self._user, self._clients, self._server, self._record = user, clients, server, record
        self.sessions = list[UserSession]()

    def violation(self, text: str) -> None:
        with self._record.lock:
            total = self._record.total
            self._record.violations.append(f"{self._user}, after {total:,}: {text:.20000}")

    def compare_after(
        self, held: UserSession, change: Change, response: Mapping[str, Any] | None
    ) -> None:
        """Compare a session after a change. response: the server's; None if it was lost."""
        if response is None:
            held.unanswered.append(change)
            verdict = self._compare(held, f"{change} without a response")
            self._record.unanswered += verdict != "made"
            return
        if change.max_answer:
            change = replace(change, answer=tuple(response["tokens"]))
        self._compare(held, str(change), change, response["revision"])

    def compare_unchanged(self, held: UserSession) -> None:
        """Compare without a change: none but an unanswered one may have happened."""
        self._record.count("read")
        self._compare(held, "no change")

    def _compare(
        self,
        held: UserSession,
        event: str,
        answered: Change | None = None,
        revision: int | None = None,
    ) -> str:
        """Read a session, and judge it; return the verdict."""
        found, generation = self.read(held.name)
        newest, events, saved = held.points[-1], [*held.events], held.points[max(held.saved, 0) :]
        verdict = judge(held, found, generation, answered, revision)
        if verdict in ("went back", "lost"):
            self._record.lost += 1
        if verdict in ("lost", "wrong"):
            self.sessions.remove(held)
        if verdict == "wrong":
            known = f"{events}; {newest}; points since the last save: {saved}"
            self.violation(f"{held.name}: {event}, revision {revision}, gave {found}; {known}")
        if found is not None:
            self.check_words(held.name, found.text, held.word)
        return verdict

    def add_new(self, new: UserSession, point: SessionPoint, is_made: bool) -> None:
        """Add a new session with its first point, if it is there.

        is_made: whether the server has acknowledged all of it.
        """
        found, generation = self.read(new.name)
        verdict = judge_new(new, point, found, generation, is_made)
        if verdict == "made":
            self.sessions.append(new)
        elif verdict == "wrong":
            self.violation(f"{new.name}: expected {point}, {is_made=}; found {found}")

    def require_deleted(self, name: str) -> None:
        """Record a violation if a session is there whose deletion was acknowledged."""
        found, _ = self.read(name)
        if found is not None:
            self.violation(f"{name} was deleted, and is there: {found}")

    def check_words(self, name: str, text: str, own_word: str = "") -> None:
        """Record a violation if a text holds words of others."""
        if strangers := self._record.strangers(text, own_word):
            self.violation(f"{name} holds words of others: {strangers}")

    def read(self, name: str) -> tuple[Found | None, int]:
        """Return a session and the generation of its server, as soon as that answers."""
        while True:
            self._server.ready.wait()
            generation = self._server.generation
            try:
                found = _found(random.choice(self._clients).session(name))
            except NoSuchSession:
                if self._server.ready.is_set() and self._server.generation == generation:
                    return None, generation
            except KvkeepError:
                time.sleep(_RETRY_SECONDS)
            else:
                if found is not None and self._server.generation == generation:
                    return found, generation


def _found(remote: RemoteSession) -> Found | None:
    """Read a session. None if it changed between the requests: a lost one may still be made."""
    view, memory = remote.text(), remote.memory()
    if memory["revision"] != view["revision"]:
        return None
    tokens = tuple(piece["id"] for piece in view["pieces"])
    text = "".join(piece["text"] for piece in view["pieces"])
    status = (run["standing"] for run in memory["runs"] for _ in range(run["count"]))
    content = Content(tokens, tuple(status), memory["cells"])
    return Found(content, text, view["revision"])
