"""Texts beside calls, for chat templates that render calls without them.

The template renders the calls alone, with a mark before the first name of each message. The text is
inserted before what the template writes in front of that name.
"""

import re
import secrets
import string
from collections.abc import Mapping

from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.control_tokens import ChatText

# Random letters: no message has them, and no template changes them.
_MARK = "".join(secrets.choice(string.ascii_lowercase) for _ in range(16))
_MARK_END = "z"  # no digit of a number


def call_mark(number: int) -> str:
    """Return the mark of the message with this number."""
    return _MARK + "".join(chr(ord("a") + int(digit)) for digit in str(number)) + _MARK_END


def insert_texts(
    codec: TextCodec, rendered: ChatText, opening: str, texts: Mapping[int, str]
) -> tuple[ChatText, bool]:
    """Return a chat with texts before the calls with their marks, and whether it has all of them.

    opening: what the template writes before a call's name, sealed. texts: by number of message.
    They are text of the message, in which no control token stands.
    """
    left = dict(texts)

    def placed(match: re.Match[str]) -> str:
        before = match[1] or ""
        number = int("".join(str(ord(letter) - ord("a")) for letter in match[2]))
        return left.pop(number, "") + before if before else ""

    pattern = f"({re.escape(opening)})?{_MARK}([a-j]+){_MARK_END}"
    sealed = re.sub(pattern, placed, rendered.sealed)
    return codec.unsealed(sealed), not left
