"""A log of sampled answers on disk, from which a restarted engine restores them.

A log of JSON lines: first the model, then an answer in each line, the newest last. When it exceeds
its bound, it is written anew, with the last used answers that take half of it.
"""

import json
import logging
from array import array
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from kvkeep.chat.written import WrittenAnswer, WrittenAnswers
from kvkeep.model import Model
from kvkeep.storage.files.atomic import write_atomic

_MAX_BYTES = 2**24
# Of a line that ends early, or was damaged.
_DAMAGE = (ValueError, LookupError, TypeError, OverflowError, RecursionError)
_log = logging.getLogger("kvkeep.engine")


class AnswerLog:
    """The log of an engine's answers. Answers of another model's log are dropped."""

    def __init__(
        self,
        written: WrittenAnswers,
        path: Path,
        model: Model,
        writer: Executor,
        max_bytes: int = _MAX_BYTES,
    ):
        """writer: one thread that writes."""
        self._written, self._path, self._writer = written, path, writer
        self._max_bytes = max_bytes
        fingerprint = json.dumps(model.fingerprint.to_dict(), sort_keys=True)
        digest = blake2b(fingerprint.encode(), digest_size=16).hexdigest()
        self._header = json.dumps({"model": digest}) + "\n"
        self._num_bytes = 0

    def load(self) -> None:
        """Read the answers of an earlier engine, and log all that follow."""
        try:
            header, *lines = self._path.read_bytes().split(b"\n")
        except OSError:
            header, lines = b"", []
        for line in lines if header == self._header.strip().encode() else ():
            with suppress(*_DAMAGE):
                self._written.restore(*_from_line(line))
        self._rewrite()
        self._written.on_add = self._add

    def _add(self, owner: str, says: bytes, answer: WrittenAnswer) -> None:
        with suppress(RuntimeError):  # the engine is closed
            self._writer.submit(self._append, _to_line(owner, says, answer))

    def _append(self, line: str) -> None:
        is_whole = self._num_bytes and self._path.exists()  # not if the last write failed
        if not is_whole or self._num_bytes + len(line) > self._max_bytes:
            self._rewrite()  # the answer is among those in memory
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
            self._num_bytes += len(line)
        except OSError as error:
            self._num_bytes = 0  # a part of the line may be there
            _log.error("answers could not be noted in %s: %s", self._path, error)

    def _rewrite(self) -> None:
        entries = reversed(self._written.entries())
        lines = _up_to((_to_line(*entry) for entry in entries), self._max_bytes // 2)
        text = self._header + "".join(reversed(lines))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(0o600)  # a file that is replaced keeps its permissions
            self._path.chmod(0o600)
            write_atomic(self._path, text.encode())
            self._num_bytes = len(text)
        except OSError as error:
            _log.error("answers could not be noted in %s: %s", self._path, error)


def _up_to(lines: Iterable[str], num_bytes: int) -> list[str]:
    result = list[str]()
    for line in lines:
        num_bytes -= len(line)
        if num_bytes < 0:
            break
        result.append(line)
    return result


def _to_line(owner: str, says: bytes, answer: WrittenAnswer) -> str:
    fields = {"owner": owner, "says": says.hex(), "prompt": answer.prompt.hex()}
    return json.dumps({**fields, "ids": answer.ids.tolist(), **answer.to_json()}) + "\n"


def _from_line(line: bytes) -> tuple[str, bytes, WrittenAnswer]:
    """Return the owner, what the answer says, and the answer."""
    fields = json.loads(line)
    ids, prompt = array("i", fields["ids"]), bytes.fromhex(fields["prompt"])
    answer = WrittenAnswer.from_json(ids, prompt, fields)
    return str(fields["owner"]), bytes.fromhex(fields["says"]), answer
