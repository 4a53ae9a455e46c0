"""Display of answers: unchanged in a pipe; word-wrapped or as Markdown on a terminal."""

import itertools
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvkeep.cli.terminal import suspensions
from kvkeep.runtime.signals import first_interrupt_deferred

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)  # control characters that a terminal could interpret
_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)
_BLOCK = re.compile(r"\n[ \t]*\n(?=[^\s])")  # an end of a block: what precedes it cannot change
_EVERY = 0.08  # seconds between two redraws of the unfinished block
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"  # switch autowrap (DECAWM) off and on


class Screen:
    """Output of text piece by piece, unchanged, as for a pipe or file.

    taken: characters passed to `write` so far. The first Ctrl-C is deferred until a piece is shown,
    so that no piece is shown in part or twice. A second one is not, since the reader of a pipe may
    have stopped.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._last = "\n"

    def write(self, piece: str) -> None:
        """Show a piece immediately. Raises OSError when standard output is closed."""
        with first_interrupt_deferred():
            self.taken += len(piece)
            self._show(piece)

    def end(self) -> None:
        """End the answer, complete or not. Later output starts on a new line."""
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
    """Output on a terminal: wrapped between words, with control characters removed."""

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
        """Take the current word, split to the width of lines.

        open_ended: whether the word may grow; its last part then stays for later.
        """
        from rich.cells import cell_len, chop_cells

        width = _columns()
        parts = chop_cells(self._word, width) if self._word else []
        self._word = ""
        if open_ended and parts and (len(parts) > 1 or cell_len(parts[-1]) < width):
            self._word = parts.pop()
        return [self._placed(part, width) for part in parts]

    def _placed(self, part: str, width: int) -> str:
        """Return a word, preceded by a new line if it does not fit on the current one."""
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
    """Output on a terminal as rendered Markdown, while it is generated.

    A complete block is printed once and for all. The newest lines of the incomplete block, at most
    a screenful, form a preview that is erased and redrawn as the block grows.

    The preview ends with a new line, and the terminal wraps none of its lines. Its height in rows
    is therefore its number of lines, even if the terminal counts a character as wider than rich
    does, or prints ^C at the cursor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._text, self._drawn, self._begun = "", 0.0, False
        self._preview: list[int] = []  # width in cells of each line of the preview
        self._width = self._suspensions = 0

    def _show(self, piece: str) -> None:
        self._text += _CONTROLS.sub("", piece)
        *complete, self._text = _blocks(self._text)
        for block in complete:
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
        self._preview = [Segment.get_line_length(line) for line in lines]
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
        """Return the control codes that erase the preview; "" if there is none."""
        lines, self._preview = self._preview, []
        if self._suspensions != suspensions():
            return ""  # after Ctrl-Z a shell wrote below the preview, so it stays
        width = _console().width if lines else 0
        if width < self._width and _breaks_lines_anew():
            rows = sum(max(1, -(-cells // width)) for cells in lines)
        else:
            rows = len(lines)
        return f"\r\x1b[{rows}A\x1b[J" if rows else ""


def _rendered(console: "Console", text: str) -> "list[list[Segment]]":
    """Render a Markdown text to lines, without empty lines at both ends."""
    from rich.markdown import Markdown

    markdown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    lines = console.render_lines(markdown, pad=False)
    full = [n for n, line in enumerate(lines) if any(part.text.strip() for part in line)]
    return lines[full[0] : full[-1] + 1] if full else []


def _coded(console: "Console", lines: "list[list[Segment]]") -> str:
    """Encode lines with the terminal's control codes, each with its end."""
    from rich.segment import Segment, Segments

    with console.capture() as captured:
        for line in lines:
            console.print(Segments([*line, Segment.line()]), end="")
    return captured.get()


def _breaks_lines_anew() -> bool:
    """Whether the terminal rewraps long lines into more rows when it gets narrower.

    Most do. xterm, rxvt, screen and the Linux console cut lines off instead.
    """
    kind = os.environ.get("TERM", "")
    return "XTERM_VERSION" not in os.environ and not kind.startswith(("rxvt", "screen", "linux"))


def screen(markdown: bool) -> Screen:
    """Return the screen for standard output.

    markdown: whether to render Markdown if the terminal can show it.
    """
    if not sys.stdout.isatty():
        return Screen()
    return (
        MarkdownScreen()
        if markdown and os.environ.get("TERM", "") not in ("", "dumb")
        else WrappedScreen()
    )


def show_text(text: str, target: Screen) -> None:
    """Show a complete text."""
    target.write(text)
    with suppress(OSError):
        target.end()


def _console() -> "Console":
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False)


def _blocks(text: str) -> list[str]:
    """Split a text into the blocks that later text cannot change, and the rest as last item."""
    ends = [match.end() for match in _BLOCK.finditer(text)]
    outside_code = [end for end in ends if len(_FENCE.findall(text[:end])) % 2 == 0]
    edges = [0, *outside_code, len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def _columns() -> int:
    return max(20, shutil.get_terminal_size().columns)


def _out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
