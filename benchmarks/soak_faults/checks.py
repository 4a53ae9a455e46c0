"""Comparison of sessions with what their users know of them.

After a kill a session may be at any state since the last acknowledged save, never before it. After
any other fault it must be at its newest state. A change whose response was lost is made or not.
"""

import random
import time
from dataclasses import dataclass, replace

from benchmarks.soak_faults.deployment import Deployment
from benchmarks.soak_faults.records import Change, Check, Content, Record, SessionPoint, UserSession
from kvkeep import Client
from kvkeep.client.remote import RemoteSession
from kvkeep.errors import KvkeepError, NoSuchSession

_RETRY_SECONDS = 0.02  # between attempts to read


@dataclass(frozen=True)
class Found:
    """A session as its server shows it."""

    content: Content
    text: str
    revision: int


class Checker:
    """Reads the sessions of a user, and records violations of what the user knows.

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
            self._record.violations.append(f"{self._user}, after {total:,}: {text:.2000}")

    def compare(self, held: UserSession, change: Change, check: Check, is_certain: bool) -> None:
        """Compare a session after a change.

        is_certain: whether the server has acknowledged the change.
        """
        found, generation = self.read(held.name)
        newest = held.points[-1]
        may_be_made = [(change, check)] if is_certain else [*held.unanswered, (change, check)]
        if self._is_made(held, found, generation, may_be_made):
            return
        if not is_certain:
            self._record.unanswered += 1
            held.unanswered.append((change, check))
            if self._is_newest(held, found, generation):
                return
        if generation > held.generation:
            self._go_back(held, found, generation)
            return
        self.violation(f"{held.name}: {held.events}, {change} of {newest} gave {found}")

    def compare_unchanged(self, held: UserSession) -> None:
        """Compare without a change: none but an unanswered one may have happened."""
        found, generation = self.read(held.name)
        self._record.count("read")
        if self._is_made(held, found, generation, held.unanswered):
            return
        if self._is_newest(held, found, generation):
            return
        if generation > held.generation:
            self._go_back(held, found, generation)
        else:
            self.violation(f"{held.name}: {held.points[-1]} has become {found}")

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

    def _is_made(
        self,
        held: UserSession,
        found: Found | None,
        generation: int,
        changes: list[tuple[Change, Check]],
    ) -> bool:
        """Add a point to the session if one of these changes, made to the newest, explains it."""
        if found is None:
            return False
        self._check_words(held, found)
        newest, content, revision = held.points[-1], found.content, found.revision
        for change, check in changes:
            if check(newest.content, content) and revision > newest.revision:
                held.points.append(SessionPoint(content, revision, change))
                held.generation = generation
                held.unanswered = []
                return True
        return False

    def _is_newest(self, held: UserSession, found: Found | None, generation: int) -> bool:
        """Whether a session is at its newest point.

        After a kill, or a change that failed and was rolled back, it may have another revision.
        """
        if found is None or found.content != held.points[-1].content:
            return False
        is_same = generation == held.generation and not held.unanswered
        if is_same and found.revision != held.points[-1].revision:
            return False
        held.points[-1] = replace(held.points[-1], revision=found.revision)
        held.generation = generation
        return True

    def _go_back(self, held: UserSession, found: Found | None, generation: int) -> None:
        """Accept the state after a kill, if it is none from before the last save.

        One that was never saved may be gone, or empty as it was created.
        """
        self._record.lost += 1
        held.generation, held.unanswered = generation, []
        if found is None or not found.content.tokens:
            if held.saved >= 0:
                self.violation(f"{held.name}: lost, although it was saved")
            self.sessions.remove(held)
            return
        for index in range(len(held.points) - 1, max(held.saved, 0) - 1, -1):
            if held.points[index].content == found.content:
                del held.points[index + 1 :]
                held.points[index] = replace(held.points[index], revision=found.revision)
                held.saved = index
                held.events.append(f"a kill led back to point {index}")
                return
        self.violation(f"{held.name}: after a kill {found}, saved was {held.points[held.saved :]}")

    def _check_words(self, held: UserSession, found: Found) -> None:
        with self._record.lock:
            strangers = [
                word for word in self._record.words if word != held.word and word in found.text
            ]
        if strangers:
            self.violation(f"{held.name} holds words of others: {strangers}")


def _found(remote: RemoteSession) -> Found | None:
    """Read a session. None if it changed between the requests: a lost one may still be made."""
    view, memory = remote.text(), remote.memory()
    if memory["revision"] != view["revision"]:
        return None
    tokens = tuple(piece["id"] for piece in view["pieces"])
    text = "".join(piece["text"] for piece in view["pieces"])
    status = (run["standing"] for run in memory["runs"] for _ in range(run["count"]))
    return Found(Content(tokens, tuple(status)), text, view["revision"])
