"""Where the user's words come from: the terminal, or lines of a pipe or file."""

import sys
from contextlib import suppress

from kvkeep.cli.saying import say
from kvkeep.cli.terminated import terminated
from kvkeep.cli.text_input import decode, require_utf8
from kvkeep.errors import InvalidArgument


class Prompt:
    """Standard input, line by line. interactive: whether somebody sits there."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()

    def read(self) -> str | None:
        """A line, or None at the end: of the input, or by Ctrl-C at the prompt."""
        if not self.interactive:
            content = sys.stdin.buffer.readline()
            return decode(content, "standard input").rstrip("\r\n") if content else None
        while True:
            try:
                return _ask("> ")
            except InvalidArgument as error:
                say(str(error))
            except (EOFError, KeyboardInterrupt):
                say("")
                if terminated():
                    raise
                return None
            except OSError:  # the terminal is gone
                return None


def _ask(prompt: str) -> str:
    if sys.stdout.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 (line editing and history for input())
        line = input(prompt)
    else:
        # Standard output belongs to the answers.
        say(prompt, end="")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
    require_utf8(line, "the line")
    return line.rstrip("\n")
