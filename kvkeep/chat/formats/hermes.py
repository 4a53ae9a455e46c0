"""Answers without a format of their own: plain text, and calls as the most models write them."""

from kvkeep.chat.bare_calls import (
    CALLS_IN_TOOLS,
    FENCED_CALLS,
    JSON_CALLS,
    NAMED_CALL,
    PYTHON_LIST,
)
from kvkeep.chat.formats.tagged import TAGGED
from kvkeep.chat.output_format import OutputFormat

PLAIN = OutputFormat("plain")
HERMES = OutputFormat(
    "hermes",
    calls=(TAGGED,),
    bare_calls=(JSON_CALLS, FENCED_CALLS, CALLS_IN_TOOLS, PYTHON_LIST, NAMED_CALL),
)
