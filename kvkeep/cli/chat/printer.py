"""Printing of answers on a terminal while they are generated: word-wrapped, or as Markdown."""

import os
import re
import shutil
import sys
import time

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from kvkeep.cli.chat.markdown_blocks import MarkdownBlocks
from kvkeep.cli.output import TextPrinter, without_control, write_flushed
from kvkeep.cli.terminal import suspension_count

_REDRAW_INTERVAL = 0.08  # seconds between two redraws of the unfinished block, or more:
_REDRAW_COSTS = 10  # so many times what the last redraw took
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"  # switch autowrap (DECAWM) off and on


class WrappingPrinter(TextPrinter):
    """Prints text on a terminal, wrapped between words and without control characters."""

    def __init__(self) -> None:
        super().__init__()
        self._word, self._column = "", 0  # the word not printed yet; the cursor's column

    def _show(self, piece: str) -> None:
        output = list[str]()
        for part in re.split(r"(\s)", without_control(piece)):
            if part.isspace():
                output += [*self._pop_word(), self._add_space(part)]
            else:
                self._word += part
        output += self._pop_word(open_ended=True)
        super()._show("".join(output))

    def _finish(self) -> None:
        super()._show("".join(self._pop_word()))
        self._column = 0
        super()._finish()

    def _pop_word(self, open_ended: bool = False) -> list[str]:
        """Take the current word, in parts as wide as lines. open_ended: leave its last part."""
        width = _terminal_columns()
        parts = chop_cells(self._word, width) if self._word else []
        self._word = ""
        if open_ended and parts and (len(parts) > 1 or cell_len(parts[-1]) < width):
            self._word = parts.pop()
        return [self._break_before(part, width) for part in parts]

    def _break_before(self, word: str, width: int) -> str:
        """Return a word, after a newline if it does not fit on the current line of that width."""
        word_width = cell_len(word)
        needs_break = self._column > 0 and self._column + word_width > width
        self._column = word_width if needs_break else self._column + word_width
        return "\n" + word if needs_break else word

    def _add_space(self, space: str) -> str:
        """Return a whitespace character, or a newline in its place at the end of the line."""
        if space == "\n" or self._column + 1 >= _terminal_columns():
            self._column = 0
            return "\n"
        self._column += 1
        return space


class MarkdownPrinter(TextPrinter):
    """Prints text on a terminal as rendered Markdown.

    A complete block is printed once. The newest lines of the incomplete block, at most a screenful,
    form a preview that is redrawn as the block grows. It ends with a newline, and the terminal does
    not wrap it, so that its height is its number of lines even if the terminal counts a character
    as wider than rich does, or prints ^C at the cursor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks, self._has_printed = MarkdownBlocks(), False
        self._redraw_at = 0.0
        self._preview_widths: list[int] = []  # columns of each line of the preview
        self._terminal_width = self._suspension_count = 0  # when the preview was drawn

    def _show(self, piece: str) -> None:
        for block in self._blocks.push(without_control(piece)):
            self._print_block(block)
        if time.monotonic() >= self._redraw_at:
            self._draw_preview()

    def _finish(self) -> None:
        self._print_block(self._blocks.pop())

    def _draw_preview(self) -> None:
        start, console = time.monotonic(), _console()
        num_rows = max(1, console.height - 2)
        lines = _render(console, self._blocks.newest_text(num_rows))[-num_rows:]
        write_flushed(f"{self._erase_preview()}{_NO_WRAP}{_to_ansi(console, lines)}{_WRAP}")
        self._preview_widths = [Segment.get_line_length(line) for line in lines]
        self._terminal_width, self._suspension_count = console.width, suspension_count()
        end = time.monotonic()
        self._redraw_at = end + max(_REDRAW_INTERVAL, _REDRAW_COSTS * (end - start))

    def _print_block(self, text: str) -> None:
        output = self._erase_preview()
        if text.strip():
            console, separator = _console(), "\n" if self._has_printed else ""
            output += separator + _to_ansi(console, _render(console, text))
            self._has_printed = True
        if output:
            write_flushed(output)

    def _erase_preview(self) -> str:
        """Return the control codes that erase the preview, "" if there is none; forget it."""
        line_widths, self._preview_widths = self._preview_widths, []
        if self._suspension_count != suspension_count():
            return ""  # after Ctrl-Z a shell wrote below the preview
        width = _console().width if line_widths else 0
        if width < self._terminal_width and _terminal_reflows():
            rows = sum(max(1, -(-line_width // width)) for line_width in line_widths)
        else:
            rows = len(line_widths)
        return f"\r\x1b[{rows}A\x1b[J" if rows else ""


def _render(console: Console, text: str) -> list[list[Segment]]:
    """Render Markdown to lines of styled text, without empty lines at both ends."""
    markdown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    lines = console.render_lines(markdown, pad=False)
    nonblank_rows = [n for n, line in enumerate(lines) if any(part.text.strip() for part in line)]
    return lines[nonblank_rows[0] : nonblank_rows[-1] + 1] if nonblank_rows else []


def _to_ansi(console: Console, lines: list[list[Segment]]) -> str:
    """Return lines of styled text as one text with the terminal's control codes."""
    with console.capture() as capture:
        for line in lines:
            console.print(Segments([*line, Segment.line()]), end="")
    return capture.get()


def _terminal_reflows() -> bool:
    """Whether the terminal rewraps lines when it gets narrower. Some cut them off instead."""
    terminal = os.environ.get("TERM", "")
    cuts_off = terminal.startswith(("rxvt", "screen", "linux")) or "XTERM_VERSION" in os.environ
    return not cuts_off


def make_printer(markdown: bool) -> TextPrinter:
    """Return a printer for standard output. markdown: whether to render it, if possible."""
    if not sys.stdout.isatty():
        return TextPrinter()
    has_cursor_control = os.environ.get("TERM", "") not in ("", "dumb")
    return MarkdownPrinter() if markdown and has_cursor_control else WrappingPrinter()


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False)


def _terminal_columns() -> int:
    return max(20, shutil.get_terminal_size().columns)
