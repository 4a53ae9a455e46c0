"""The results file of a batch: a JSONL file, durable line by line."""

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
    """The open results file.

    done: digests of the requests that an earlier run answered. added: answers added since.
    """

    def __init__(self, file: BinaryIO, done: set[str]):
        self._file, self.done = file, done
        self.added = 0

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, which is on disk when this returns."""
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.added += not line.get("error")


@contextmanager
def open_results(path: Path, requests: Sequence[BatchRequest], again: bool) -> Iterator[Results]:
    """Open and lock the results file, with the answers of an earlier run.

    Failed requests and an incomplete last line are removed, and so will be tried again.
    again: whether to discard all earlier answers. Raises InvalidArgument if the file contains
    anything other than answers to these requests, Locked if another process writes to it.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Locked(f"another process writes to {path}") from None
        lines = (
            [] if again else _answers(file.read(), path, {request.digest for request in requests})
        )
        content = b"".join(line + b"\n" for _, line in lines)
        file.seek(0)
        if file.read() != content:
            file.seek(0)
            file.write(content)
            file.truncate()
        yield Results(file, {digest for digest, _ in lines})


def _answers(content: bytes, path: Path, known: set[str]) -> list[tuple[str, bytes]]:
    """Return the digest and the line of each successful answer."""
    *lines, _ = content.split(b"\n")  # the last item is empty, or an incomplete line
    answers = []
    for line in lines:
        try:
            entry = json.loads(line)
            digest, failed = entry["request"], entry.get("error")
        except (ValueError, LookupError, TypeError, AttributeError):
            digest, failed = None, None
        if digest not in known:
            raise InvalidArgument(
                f"{path} contains lines that are not answers to these requests: name another "
                "file, or start again with --again"
            )
        if not failed:
            answers.append((digest, line))
    return answers
