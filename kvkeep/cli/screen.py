"""Where answers appear: as they are in a pipe, wrapped at words or as Markdown on a terminal."""

import itertools
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvkeep.cli.type_ahead import suspensions
from kvkeep.runtime.signals import first_interrupt_deferred

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what could command a terminal
_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)
_BLOCK = re.compile(r"\n[ \t]*\n(?=[^\s])")  # where what stands before it is surely whole
_EVERY = 0.08  # seconds between two pictures of an answer that is being written
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"  # what is wider than the terminal is cut off (DECAWM)


class Screen:
    """Text, piece by piece; in a pipe or file all of it as it is.

    taken: characters handed over so far. Ctrl-C waits until a piece is shown, so that none is shown
    in part or twice; a second one does not wait, as for a reader of a pipe that has stopped.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._last = "\n"

    def write(self, piece: str) -> None:
        """Show a piece at once. Raises OSError when standard output is closed."""
        with first_interrupt_deferred():
            self.taken += len(piece)
            self._show(piece)

    def end(self) -> None:
        """End the answer, complete or not: what follows starts on a new line."""
        with first_interrupt_deferred():
            self._finish()

    def _show(self, piece: str) -> None:
        if piece:
            self._last = piece[-1]
            _out(piece)

    def _finish(self) -> None:
        if self._last != "\n":
            _out("\n")
        self._last = "\n"


class WrappedScreen(Screen):
    """On a terminal: lines end between words, and nothing in the text commands the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._word, self._column = "", 0

    def _show(self, piece: str) -> None:
        shown = list[str]()
        for part in re.split(r"(\s)", _CONTROLS.sub("", piece)):
            if part and part.isspace():
                shown += [*self._words(), self._space(part)]
            else:
                self._word += part
        shown += self._words(open_ended=True)
        super()._show("".join(shown))

    def _finish(self) -> None:
        super()._show("".join(self._words()))
        self._column = 0
        super()._finish()

    def _words(self, open_ended: bool = False) -> list[str]:
        """The word, cut to the width of lines; open_ended: without its end, which may grow."""
        from rich.cells import cell_len, chop_cells

        width = _columns()
        parts = chop_cells(self._word, width) if self._word else []
        self._word = ""
        if open_ended and parts and (len(parts) > 1 or cell_len(parts[-1]) < width):
            self._word = parts.pop()
        return [self._placed(part, width) for part in parts]

    def _placed(self, part: str, width: int) -> str:
        """A word, on a new line where this one has no room for it."""
        from rich.cells import cell_len

        size = cell_len(part)
        breaks = self._column > 0 and self._column + size > width
        self._column = size if breaks else self._column + size
        return "\n" + part if breaks else part

    def _space(self, space: str) -> str:
        if space == "\n" or self._column + 1 >= _columns():
            self._column = 0
            return "\n"
        self._column += 1
        return space


class MarkdownScreen(Screen):
    """On a terminal: the answer as it is meant, while it is written.

    What is whole is printed for good, block by block. Of the block that is being written the newest
    lines are shown, as many as the screen has, and drawn anew as they grow.

    The picture of them ends with a new line, and no line of it is wrapped by the terminal: it is as
    many rows high as it has lines, also where the terminal counts a character wider than rich does,
    or writes ^C at the cursor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._text, self._drawn, self._begun = "", 0.0, False
        self._picture: list[int] = []  # cells of each line that is shown until the next picture
        self._width = self._suspensions = 0

    def _show(self, piece: str) -> None:
        self._text += _CONTROLS.sub("", piece)
        *whole, self._text = _blocks(self._text)
        for block in whole:
            self._print(block)
        if time.monotonic() - self._drawn >= _EVERY:
            self._draw()

    def _finish(self) -> None:
        rest, self._text = self._text, ""
        self._print(rest)

    def _draw(self) -> None:
        from rich.segment import Segment

        console = _console()
        lines = _rendered(console, self._text)[-max(1, console.height - 2) :]
        _out(f"{self._erased()}{_NO_WRAP}{_coded(console, lines)}{_WRAP}")
        self._picture = [Segment.get_line_length(line) for line in lines]
        self._width, self._suspensions = console.width, suspensions()
        self._drawn = time.monotonic()

    def _print(self, text: str) -> None:
        erased, between = self._erased(), "\n" if self._begun else ""
        if text.strip():
            self._begun = True
            console = _console()
            _out(f"{erased}{between}{_coded(console, _rendered(console, text))}")
        elif erased:
            _out(erased)

    def _erased(self) -> str:
        """The control codes that erase the picture; "" where there is none to erase."""
        lines, self._picture = self._picture, []
        if self._suspensions != suspensions():
            return ""  # a shell wrote below it: it stays
        width = _console().width if lines else 0
        if width < self._width and _breaks_lines_anew():
            rows = sum(max(1, -(-cells // width)) for cells in lines)
        else:
            rows = len(lines)
        return f"\r\x1b[{rows}A\x1b[J" if rows else ""


def _rendered(console: "Console", text: str) -> "list[list[Segment]]":
    """The lines of a Markdown text, without empty ones around it."""
    from rich.markdown import Markdown

    markdown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    lines = console.render_lines(markdown, pad=False)
    full = [n for n, line in enumerate(lines) if any(part.text.strip() for part in line)]
    return lines[full[0] : full[-1] + 1] if full else []


def _coded(console: "Console", lines: "list[list[Segment]]") -> str:
    """Lines as the terminal takes them, each with its end."""
    from rich.segment import Segment, Segments

    with console.capture() as captured:
        for line in lines:
            console.print(Segments([*line, Segment.line()]), end="")
    return captured.get()


def _breaks_lines_anew() -> bool:
    """Whether the terminal moves what no longer fits into rows of its own when it gets narrower.

    Most do; those that are known to cut lines off instead are xterm, rxvt, screen and the console.
    """
    kind = os.environ.get("TERM", "")
    return "XTERM_VERSION" not in os.environ and not kind.startswith(("rxvt", "screen", "linux"))


def screen(markdown: bool) -> Screen:
    """The one for this standard output. markdown: whether it is wanted, where it can be."""
    if not sys.stdout.isatty():
        return Screen()
    return (
        MarkdownScreen()
        if markdown and os.environ.get("TERM", "") not in ("", "dumb")
        else WrappedScreen()
    )


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
