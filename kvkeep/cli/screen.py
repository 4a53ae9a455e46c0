"""Where answers appear: as they are in a pipe, wrapped at words or as Markdown on a terminal."""

import itertools
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what could command a terminal
_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)
_BLOCK = re.compile(r"\n[ \t]*\n(?=[^\s])")  # where what stands before it is surely whole
_EVERY = 0.08  # seconds between two pictures of an answer that is being written


class Screen:
    """Text, piece by piece; whoever listens at standard output gets all of it as it is."""

    def __init__(self) -> None:
        self._last = "\n"

    def write(self, piece: str) -> None:
        """Shows a piece at once. Raises OSError where nobody reads any more."""
        if piece:
            self._last = piece[-1]
            _out(piece)

    def end(self) -> None:
        """After the last piece, however that came to be: the next thing begins on a line."""
        if self._last != "\n":
            _out("\n")
        self._last = "\n"


class Wrapped(Screen):
    """On a terminal: lines end between words, and nothing in the text commands the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._word, self._column = "", 0

    def write(self, piece: str) -> None:
        shown = list[str]()
        for part in re.split(r"(\s)", _CONTROLS.sub("", piece)):
            if part and part.isspace():
                shown += [self._taken(), self._space(part)]
            else:
                self._word += part
        if len(self._word) >= _columns():
            shown.append(self._taken())
        super().write("".join(shown))

    def end(self) -> None:
        super().write(self._taken())
        self._column = 0
        super().end()

    def _taken(self) -> str:
        """The word, on a new line where this one has no room for it."""
        from rich.cells import cell_len

        word, size = self._word, cell_len(self._word)
        self._word = ""
        breaks = self._column > 0 and self._column + size > _columns()
        self._column = size if breaks else self._column + size
        return "\n" + word if breaks else word

    def _space(self, space: str) -> str:
        if space == "\n" or self._column + 1 >= _columns():
            self._column = 0
            return "\n"
        self._column += 1
        return space


class Markdown(Screen):
    """On a terminal: the answer as it is meant, while it is written.

    What is whole is printed for good, block by block. Of the block that is being written the newest
    lines are shown, as many as the screen has, and drawn anew as they grow.
    """

    def __init__(self) -> None:
        super().__init__()
        self._text, self._drawn, self._begun = "", 0.0, False
        self._live: Live | None = None

    def write(self, piece: str) -> None:
        self._text += _CONTROLS.sub("", piece)
        *whole, self._text = _blocks(self._text)
        for block in whole:
            self._print(block)
        if time.monotonic() - self._drawn >= _EVERY:
            self._draw()

    def end(self) -> None:
        rest, self._text = self._text, ""
        self._print(rest)

    def _draw(self) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=_console(), auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(_Rendered(self._text, newest=True), refresh=True)
        self._drawn = time.monotonic()

    def _print(self, text: str) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
        if text.strip():
            if self._begun:
                _out("\n")  # between two blocks
            self._begun = True
            _console().print(_Rendered(text))
            sys.stdout.flush()


class _Rendered:
    """Markdown without empty lines around it. newest: its last lines, as many as there is room."""

    def __init__(self, text: str, newest: bool = False):
        self._text, self._newest = text, newest

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.markdown import Markdown
        from rich.segment import Segment

        markdown = Markdown(self._text, code_theme="ansi_dark", hyperlinks=False)
        lines = console.render_lines(markdown, options, pad=False)
        full = [n for n, line in enumerate(lines) if any(part.text.strip() for part in line)]
        lines = lines[full[0] : full[-1] + 1] if full else []
        for line in lines[-max(1, console.height - 2) :] if self._newest else lines:
            yield from line
            yield Segment.line()


def screen(markdown: bool) -> Screen:
    """The one for this standard output. markdown: whether it is wanted, where it can be."""
    if not sys.stdout.isatty():
        return Screen()
    return Markdown() if markdown and os.environ.get("TERM", "") not in ("", "dumb") else Wrapped()


def shown_whole(text: str, on: Screen) -> None:
    """A text that is there already."""
    on.write(text)
    with suppress(OSError):
        on.end()


def _console() -> "Console":
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False)


def _blocks(text: str) -> list[str]:
    """What surely does not change with what follows, block by block; and the rest."""
    ends = [found.end() for found in _BLOCK.finditer(text)]
    outside_code = [end for end in ends if len(_FENCE.findall(text[:end])) % 2 == 0]
    edges = [0, *outside_code, len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def _columns() -> int:
    return max(20, shutil.get_terminal_size().columns)


def _out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
