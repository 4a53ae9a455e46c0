"""A terminal for tests and pictures: pexpect's pseudo-terminal, with pyte's screen."""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import pexpect
import pyte

COLUMNS, ROWS = 80, 24
_PASTE = "\x1b[200~", "\x1b[201~"  # bracketed paste
_COLOURS = {"brown": "yellow"}  # pyte's name: rich's name


class Terminal:
    """Runs `python -m kvkeep` with these arguments in an xterm-like terminal."""

    def __init__(
        self,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        size: tuple[int, int] = (COLUMNS, ROWS),
        program: tuple[str, ...] = ("-m", "kvkeep"),
    ):
        columns, rows = size
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000)
        # pyte's way to answer what programs ask of a terminal.
        setattr(self.screen, "write_process_input", self._answer)  # noqa: B010
        self._stream = pyte.ByteStream(self.screen)
        kind = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
        self.process = pexpect.spawn(
            sys.executable,
            [*program, *map(str, arguments)],
            env={**os.environ, **kind, **(environment or {})},
            dimensions=(rows, columns),
            timeout=None,
        )
        self.process.delaybeforesend = None

    def _answer(self, text: str) -> None:
        self.process.send(text)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *failure: object) -> None:
        self.process.close(force=True)

    @property
    def lines(self) -> list[str]:
        """Lines of the scrollback and the screen, without trailing spaces."""
        above = [self._line(row) for row in self.screen.history.top]
        return above + [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    def type(self, *keys: str) -> None:
        for key in keys:
            self.process.send(key)
            self.settle(0.15)

    def paste(self, text: str) -> None:
        self.type(f"{_PASTE[0]}{text}{_PASTE[1]}")

    def complete(self, text: str, seconds: float) -> str:
        """Press Tab until a completion shows a text; return all text. Raises TimeoutError.

        More than once, as a busy program may not offer it yet.
        """
        until = time.monotonic() + seconds
        while not self._count(text):
            if time.monotonic() > until:
                raise TimeoutError(f"{text!r} is no completion:\n{self.text}")
            self.type("\t")
            self.settle(1.0)
        return self.text

    def wait(self, text: str, seconds: float, times: int = 1, settles: bool = True) -> str:
        """Wait until a text appears `times` times; return all text. Raises TimeoutError.

        settles: whether to wait for the rest of the screen, too.
        """
        until = time.monotonic() + seconds
        while self._count(text) < times:
            if time.monotonic() > until or not self._read(0.05):
                if self._count(text) >= times:
                    break
                raise TimeoutError(f"{text!r} did not come {times} times:\n{self.text}")
        if settles:
            self.settle()
        return self.text

    def ended(self, seconds: float) -> int:
        """Wait for the command to end; return its exit status. Raises TimeoutError."""
        until = time.monotonic() + seconds
        while self._read(0.05):
            if time.monotonic() > until:
                raise TimeoutError(f"the command goes on:\n{self.text}")
        self.process.wait()
        status = self.process.exitstatus
        return -int(self.process.signalstatus) if status is None else int(status)

    def settle(self, seconds: float = 0.3) -> None:
        """Wait until the screen has not changed for `seconds`, at most six times as long."""
        start = last_change = time.monotonic()
        while time.monotonic() - last_change < seconds and time.monotonic() - start < 6 * seconds:
            before = self.screen.display
            if not self._read(0.05):
                return
            if self.screen.display != before:
                last_change = time.monotonic()

    def svg(self, title: str) -> str:
        """Return the screen as an SVG image."""
        from rich.console import Console
        from rich.style import Style
        from rich.text import Text

        with open(os.devnull, "w") as devnull:
            console = Console(
                record=True, width=self.screen.columns, file=devnull, force_terminal=True
            )
            rows = [self.screen.buffer[row] for row in range(self.screen.lines)]
            last = max((n for n, row in enumerate(rows) if self._line(row)), default=0)
            for row in rows[: last + 1]:
                line = Text(end="\n")
                for column in range(self.screen.columns):
                    cell = row[column]
                    style = Style(
                        color=_colour(cell.fg),
                        bgcolor=_colour(cell.bg),
                        bold=cell.bold,
                        italic=cell.italics,
                        reverse=cell.reverse,
                    )
                    line.append(cell.data, style)
                line.rstrip()
                console.print(line, no_wrap=True, crop=True)
            return console.export_svg(title=title, code_format=_SVG)

    def _count(self, text: str) -> int:
        """Count a text, also across line ends."""
        return max(self.text.count(text), "".join(self.lines).count(text))

    def _line(self, row: Any) -> str:
        return "".join(row[column].data for column in range(self.screen.columns)).rstrip()

    def _read(self, seconds: float) -> bool:
        """Read output for up to `seconds`. Returns whether the command still runs."""
        try:
            self._stream.feed(self.process.read_nonblocking(65536, seconds))
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        return True


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    bright = name.startswith("bright")
    plain = _COLOURS.get(name.removeprefix("bright"), name.removeprefix("bright"))
    if len(plain) == 6 and all(letter in "0123456789abcdef" for letter in plain):
        return f"#{plain}"
    return f"bright_{plain}" if bright else plain


# A template without web fonts.
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
