"""Output of commands: messages, tables, streamed text, and counts and sizes as text."""

import json
import os
import re
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any, Never, TextIO

import click

from kvkeep.runtime.signals import interrupts_deferred

if TYPE_CHECKING:
    from tqdm import tqdm

# All but tabs and newlines.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_control(text: str) -> str:
    """Return text without control characters, by which a file could take over a terminal."""
    return _CONTROL_CHARACTERS.sub("", text)


def say(text: str, end: str = "\n") -> None:
    """Print a message to standard error, unless it is closed."""
    try:
        print(without_control(text), end=end, file=sys.stderr, flush=True)
    except OSError:
        redirect_to_null(sys.stderr)


def redirect_to_null(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that flushing it on exit is not an error."""
    null_descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_descriptor, stream.fileno())
    os.close(null_descriptor)


def echo_table(rows: Sequence[Sequence[str]], right_aligned: Collection[int]) -> None:
    """Print rows of cells, without control characters.

    right_aligned: indices of columns; the last one is never padded.
    """
    rows = [[" ".join(without_control(cell).split("\n")) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, last_cell in rows:
        padded = [
            cell.rjust(width) if column in right_aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=False))
        ]
        click.echo("  ".join([*padded, last_cell]).rstrip())


def echo_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    for name, value in facts:
        click.echo(without_control(f"{name:<12} {value}"))


def echo_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: "1 token", "2 tokens"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_mb(num_bytes: int) -> str:
    """Return bytes in megabytes: "1.5 MB", "1,200 MB"."""
    size = num_bytes / 1e6
    return f"{size:,.0f} MB" if size >= 100 else f"{size:.1f} MB"


def format_size(num_bytes: int) -> str:
    """Return bytes as size options take them, rounded up: "195MB", "1.5GB"."""
    for unit, unit_bytes in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= unit_bytes:
            tenths = -(-num_bytes * 10 // unit_bytes)
            return f"{tenths // 10}{f'.{tenths % 10}' if tenths % 10 else ''}{unit}"
    return f"{-(-num_bytes // 1000)}KB"


def write_flushed(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def progress_bar(total: int, shown: bool, **settings: Any) -> "tqdm[Never]":
    """Return a progress bar. shown: whether to draw it, if standard error is a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, disable=None if shown else True, **settings)


@contextmanager
def spinner(label: str, shown: bool) -> Iterator[None]:
    """Show a label with a rotating bar (|/-\\) during the block. shown: False for no output."""
    frames = cycle("|/-\\")
    ended = threading.Event()
    with progress_bar(0, shown, bar_format="{desc}", leave=False) as bar:

        def rotate() -> None:
            while not (bar.disable or ended.wait(0.1)):
                bar.set_description_str(f"{next(frames)} {label}")

        thread = threading.Thread(target=rotate, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()  # or it would draw the closed bar again


class TextPrinter:
    """Prints generated text to standard output as it arrives, unchanged, as for a pipe or file.

    written_characters: those passed to `write` so far. During a write, a first Ctrl-C is deferred,
    so that no piece is shown in part or twice; a second one is not, since a pipe may be blocked.
    """

    def __init__(self) -> None:
        self.written_characters = 0
        self._last_character = "\n"

    def write(self, piece: str) -> None:
        """Print a piece of text at once. Raises OSError if standard output is closed."""
        with interrupts_deferred(only_first=True):
            self.written_characters += len(piece)
            self._show(piece)

    def end(self) -> None:
        """End the text. Later output starts on a new line."""
        with interrupts_deferred(only_first=True):
            self._finish()

    def _show(self, piece: str) -> None:
        if piece:
            self._last_character = piece[-1]
            write_flushed(piece)

    def _finish(self) -> None:
        if self._last_character != "\n":
            write_flushed("\n")
        self._last_character = "\n"
