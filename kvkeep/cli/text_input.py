"""UTF-8 text from files and standard input, unchanged except for a byte order mark."""

import sys
from pathlib import Path

import click

from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.text import decode_text, read_text_file

STDIN = "-"
SPECIAL = click.option(
    "--special", is_flag=True, help="Take what reads like a special token, <|im_end|>, for one."
)


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Return the prompt: the file's text, then the option's, or else standard input.

    Raises InvalidArgument if there is no text or if it is not UTF-8, OSError for the file.
    """
    if prompt is None and file is None:
        if sys.stdin.isatty():
            raise InvalidArgument("no prompt: give -p TEXT or -f FILE, or pipe text in")
        file = STDIN
    text = (read_text(file) if file is not None else "") + (prompt or "")
    require_utf8(text, "the prompt")
    if not text:
        source = {None: "", STDIN: " (standard input held nothing)"}.get(file, f" ({file})")
        raise InvalidArgument(f"the prompt is empty{source}: expected some text")
    return text


def read_text(file: str) -> str:
    """Read a whole file, or standard input for "-".

    Raises InvalidArgument if it is not UTF-8, OSError for the file.
    """
    if file == STDIN:
        return decode_text(sys.stdin.buffer.read(), "standard input")
    return read_text_file(Path(file))


def require_utf8(text: str, source: str) -> None:
    """Raise InvalidArgument for an argument that was not UTF-8.

    Python decodes such bytes to surrogates, which tokenizers do not accept.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{source} is not UTF-8 text from character {error.start} on; expected text in UTF-8"
        ) from error
