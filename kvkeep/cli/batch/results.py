"""The results file of a batch: a line for each answer, on disk as soon as it is complete."""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvkeep.cli.batch.requests import BatchRequest
from kvkeep.cli.options import STDIN
from kvkeep.errors import InvalidArgument, Locked
from kvkeep.storage.files.atomic import write_atomic

_DIGEST = re.compile("[0-9a-f]{24}")
_LINE_START = b'{"'  # of a line that a killed batch left incomplete


class BatchResults:
    """The open results file of a batch.

    answered_digests: of the requests that an earlier run answered. settings: digests of what the
    answers depend on, stored in each line. discards_earlier: whether the first line replaces those
    in the file.
    """

    def __init__(
        self,
        file: BinaryIO,
        answered_digests: set[str],
        settings: Mapping[str, str],
        discards_earlier: bool = False,
    ):
        self.answered_digests = answered_digests
        self.new_answers = 0  # number of answers that this run added, without failed ones
        self._file, self._settings = file, settings
        self._discards_earlier = self._starts_over = discards_earlier

    @property
    def hint_to_continue(self) -> str:
        """The advice after an interrupt; by it the new answers in the file stay."""
        has_discarded = self._starts_over and not self._discards_earlier
        return f"run the same command{' without --again' if has_discarded else ''} to continue"

    def add(self, line: dict[str, Any]) -> None:
        """Append a line. It is on disk when this returns."""
        if self._discards_earlier:
            self._file.seek(0)
            self._file.truncate()
            self._discards_earlier = False
        text = json.dumps({**line, **self._settings}, ensure_ascii=False)
        # A lone surrogate, as in the name of a file that is not UTF-8, gets JSON's own escape.
        self._file.write(text.encode(errors="backslashreplace") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.new_answers += not line.get("error")


@contextmanager
def open_results(
    path: Path,
    requests: Sequence[BatchRequest],
    settings: Mapping[str, str],
    discard_earlier: bool,
) -> Iterator[BatchResults]:
    """Open and lock the results file.

    Failed requests and an incomplete last line are removed, so that they are tried again.
    settings: as of `BatchResults`. discard_earlier: discard the answers of an earlier run,
    once there is a new one. Raises InvalidArgument if the file is no results file, or has answers
    to other requests or by other settings, Locked if another process writes it.
    """
    if str(path) == STDIN or (path.exists() and not path.is_file()):
        raise InvalidArgument(
            f"-o {path} is not a regular file, from which a batch could resume: name one"
        )
    if not discard_earlier:
        with _locked_file(path) as file:
            content = file.read()
            lines = _result_lines(content, path)
            _require_same_batch(lines, path, {each.digest for each in requests}, settings)
            answers = b"".join(line.content + b"\n" for line in lines if not line.has_failed)
            if content != answers:
                write_atomic(path, answers)  # another file, which is locked below
    with _locked_file(path) as file:
        lines = _result_lines(file.read(), path)
        answered = {line.digest for line in lines if not (line.has_failed or discard_earlier)}
        yield BatchResults(file, answered, settings, discard_earlier)


@contextmanager
def _locked_file(path: Path) -> Iterator[BinaryIO]:
    """Open and lock a file, which is created if it is missing. Raises Locked."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except OSError:
            is_current = False
        if not is_current:  # another process holds it, or has replaced it
            raise Locked(f"another process is writing to {path}")
        yield file


@dataclass(frozen=True)
class _ResultLine:
    content: bytes
    digest: str  # of the request
    entry: Mapping[str, Any]
    has_failed: bool


def _result_lines(content: bytes, path: Path) -> list[_ResultLine]:
    """Parse a results file, but for an incomplete last line. Raises InvalidArgument for others."""
    *lines, last = content.split(b"\n")
    parsed = [_parse_line(line) for line in lines]
    if None in parsed or not (_is_cut_off(last) or _parse_line(last)):
        raise InvalidArgument(f"{path} is not the results file of a batch: use another file")
    return [line for line in parsed if line is not None]


def _is_cut_off(line: bytes) -> bool:
    """Whether a line is the beginning of a JSON object, or empty."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith(_LINE_START) or _LINE_START.startswith(line)
    return False


def _parse_line(line: bytes) -> _ResultLine | None:
    """Parse a line of a results file. Returns None for another line."""
    try:
        entry = json.loads(line)
        digest = entry["request"]
        if not _DIGEST.fullmatch(digest):
            return None
        return _ResultLine(line, digest, entry, bool(entry.get("error")))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _require_same_batch(
    lines: Sequence[_ResultLine], path: Path, digests: set[str], settings: Mapping[str, str]
) -> None:
    """Raise InvalidArgument for answers to other requests, or by other settings.

    A line without one of the settings, as earlier versions wrote it, may have any.
    """
    hint = "use another file, or start over with --again"
    if any(line.digest not in digests for line in lines):
        raise InvalidArgument(f"{path} has answers to other requests: {hint}")
    if any(
        line.entry.get(name, digest) != digest
        for line in lines
        for name, digest in settings.items()
    ):
        raise InvalidArgument(
            f"{path} has answers by another model, other options or an earlier version: give the "
            f"same options, {hint}"
        )
