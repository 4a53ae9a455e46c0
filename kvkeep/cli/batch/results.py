"""What came of each request: a line of a JSONL file, there for good once it is written."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kvkeep.cli.batch.requests import BatchRequest
from kvkeep.errors import InvalidArgument, Locked


class Results:
    """The file. done: digests of requests that had their answer before. added: how many since."""

    def __init__(self, file: BinaryIO, done: set[str]):
        self._file, self.done = file, done
        self.added = 0

    def add(self, line: dict[str, Any]) -> None:
        """It is on disk once this returns."""
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.added += not line.get("error")


@contextmanager
def open_results(path: Path, requests: Sequence[BatchRequest], again: bool) -> Iterator[Results]:
    """The file, with the answers that an earlier run has left in it.

    Half a line that a kill has left, and what failed, is taken out, and asked once more. again:
    whether to begin anew. Raises InvalidArgument where it holds what is no answer to these
    requests, Locked where another process writes to it.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Locked(f"another process writes to {path}") from None
        lines = [] if again else _answers(file.read(), path, {each.digest for each in requests})
        kept = b"".join(line + b"\n" for _, line in lines)
        file.seek(0)
        if file.read() != kept:
            file.seek(0)
            file.write(kept)
            file.truncate()
        yield Results(file, {digest for digest, _ in lines})


def _answers(content: bytes, path: Path, known: set[str]) -> list[tuple[str, bytes]]:
    """The digest and the line of each whole answer."""
    *lines, _ = content.split(b"\n")  # the last one is empty, or was not written to its end
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
            digest, failed = entry["request"], entry.get("error")
        except (ValueError, LookupError, TypeError, AttributeError):
            digest, failed = None, None
        if digest not in known:
            raise InvalidArgument(
                f"{path} holds what is no answer to these requests: name another file, or begin "
                "anew with --again"
            )
        if not failed:
            found.append((digest, line))
    return found
