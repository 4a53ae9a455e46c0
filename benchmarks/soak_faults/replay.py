"""Lone replays of users' sessions, compared with what the server saved."""

import math
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.soak_faults.effects import ALIGNMENT, COMPRESSION
from benchmarks.soak_faults.records import Content, SessionPoint, Tokens, UserSession
from kvkeep import Model, Sampling, Session, Snapshot
from kvkeep.engine.session_files import ENGINE_NOTES_KEY
from kvkeep.engine.steps import DEFAULT_PREFILL_STEP
from kvkeep.errors import StoreError
from kvkeep.storage.files.atomic import write_json


class Replayer:
    """Compares saved sessions with sessions of this process that make the same changes.

    Of one that differs it writes both to the store's parent, and its changes with all tokens.
    """

    def __init__(self, model: Model, store: Path) -> None:
        self._model, self._store, self._lock = model, store, threading.Lock()

    def __call__(self, held: UserSession) -> str | None:
        """Return the difference of a saved session from its replay; None if all bits are equal."""
        with self._lock:
            session = self._model.session(
                512, policy=held.policy, prefill_step=DEFAULT_PREFILL_STEP
            )
            session = replay_changes(session, held.points)
            expected = held.points[-1].content
            status, cells = tuple(session.token_status), session.cache.cells
            replayed = Content(tuple(session.tokens), status, cells)
            if replayed != expected:
                return f"the replay has {replayed}; expected {expected}"
            saved = self._saved(held.name, expected.tokens)
            if saved is None:
                return f"{self._store} has no file of the saved session {held.name}"
            logits, saved_logits = session.logits, saved.logits
            assert logits is not None
            if saved_logits is not None and torch.equal(saved_logits, logits):
                return None
            self._write(held, saved, session.snapshot())
            most = math.inf if saved_logits is None else (saved_logits - logits).abs().max().item()
            changes = [(point.change, len(point.tokens)) for point in held.points]
            history = f"{held.policy}, {changes}, {held.events}"
            return f"its saved logits differ from the replay's by up to {most:.3g}: {history}"

    def _write(self, held: UserSession, saved: Snapshot, replayed: Snapshot) -> None:
        """Write what differs for a closer look."""
        folder = self._store.parent
        saved.save(folder / "saved.kvkeep")
        replayed.save(folder / "replayed.kvkeep")
        changes = {"policy": held.policy, "points": [asdict(point) for point in held.points]}
        write_json(folder / "changes.json", changes)

    def _saved(self, name: str, tokens: Tokens) -> Snapshot | None:
        """Return the file of a session; a fork may have the same tokens, and other bits."""
        for path in self._store.rglob(f"{name}.kvkeep"):
            try:
                snapshot = Snapshot.load(path)
            except (StoreError, FileNotFoundError):
                continue  # deleted meanwhile
            saved_name = snapshot.notes.get(ENGINE_NOTES_KEY, {}).get("name")
            if saved_name == name and tuple(snapshot.tokens.tolist()) == tokens:
                return snapshot
        return None


def replay_changes(session: Session, points: Sequence[SessionPoint]) -> Session:
    """Repeat the changes of a session's points in one of this process; return that, or its fork."""
    for point in points:
        change = point.change
        match change.kind:
            case "feed" | "generate" | "turn":
                if removed := len(session.tokens) - change.start:
                    session.rewind(removed)
                if change.tokens:
                    session.feed(list(change.tokens))
                for _ in range(len(point.tokens) - len(session.tokens)):
                    session.next_token(Sampling())
            case "delete":
                session.delete(change.start, change.end)
            case "insert":
                session.insert(change.start, list(change.tokens))
            case "align":
                session.align(list(change.tokens), **ALIGNMENT)
            case "rewind":
                session.rewind(change.end - change.start)
            case "pin":
                session.pin(change.start, change.end)
            case "compress":
                session.compress(**COMPRESSION)
            case "fork":  # its new cells begin a segment: sums have another order than the parent's
                session = session.fork()
    return session
