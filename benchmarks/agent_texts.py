"""Texts of generated agent sessions: instructions, tools, files and answers, of real prose.

Nothing is copied from an agent: the prose is Python's manual, and the tools are made up.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvkeep.evaluate.haystack import manual_text

_CHARACTERS_PER_TOKEN = 3.6  # of the manual, about
_TOOL_NAMES = (
    "read_file",
    "write_file",
    "edit_file",
    "list_folder",
    "find_files",
    "search_text",
    "run_command",
    "stop_command",
    "read_output",
    "fetch_page",
    "search_web",
    "update_plan",
    "ask_user",
    "start_helper",
    "list_helpers",
    "read_notebook",
    "edit_notebook",
    "view_image",
)
LATE_TOOLS = ("query_database", "list_tables")  # of a server that connects during a session
_FILE_READER, _CONTENT = "read_file", "path"


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, about; they fit a context of 8,192.

    instructions: of the system prompt. project: the instructions that a project adds to it.
    file: of a file that is read. tool: of a tool's description. turns: requests of a session.
    """

    instructions: int = 1700
    project: int = 300
    file: int = 420
    tool: int = 45
    turns: int = 7


class Prose:
    """Consecutive passages of a long real text, none of them twice."""

    def __init__(self) -> None:
        self._text, self._start = manual_text(), 0

    def take(self, tokens: int) -> str:
        """Return the next passage of about so many tokens, up to the end of a line."""
        end = self._text.index("\n", self._start + int(tokens * _CHARACTERS_PER_TOKEN))
        passage, self._start = self._text[self._start : end], end + 1
        return passage.strip()


@dataclass(frozen=True)
class WrittenTurn:
    """An answer of the model, as it writes it, and the file that the agent then reads."""

    thought: str
    said: str
    path: str
    content: str

    def text(self, thinks: bool) -> str:
        """Return the answer, whose call has other bytes than JSON that a program writes."""
        thinking = f"<think>\n{self.thought}\n</think>\n\n" if thinks else ""
        call = f'{{"name":"{_FILE_READER}","arguments" :{{"limit": 2000,  "path":"{self.path}"}}}}'
        return f"{thinking}{self.said}\n<tool_call>{call}</tool_call>"


def written_turns(prose: Prose, sizes: Sizes) -> Iterator[WrittenTurn]:
    """Yield the answers of a session, and what the agent reads after each."""
    number = 0
    while True:
        number += 1
        content = prose.take(sizes.file)
        thought = f"Step {number} needs the next file. I should read it before I change anything."
        said = f"I will read part {number} of the manual now, and compare it with the last one."
        yield WrittenTurn(thought, said, f"docs/part_{number}.txt", content)


def functions(prose: Prose, sizes: Sizes) -> list[dict[str, Any]]:
    """Return tools as name, description and schema."""
    return [function(name, prose.take(sizes.tool)) for name in _TOOL_NAMES]


def late_functions(prose: Prose, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the tools of `LATE_TOOLS`."""
    return [function(name, prose.take(sizes.tool)) for name in LATE_TOOLS]


def function(name: str, description: str) -> dict[str, Any]:
    """Return a tool with a schema of two properties."""
    properties = {
        _CONTENT: {"type": "string", "description": "An absolute path."},
        "limit": {"type": "integer", "description": "How much is returned at most."},
    }
    parameters = {"type": "object", "properties": properties, "required": [_CONTENT]}
    return {"name": name, "description": description, "parameters": parameters}


def reordered(value: Any) -> Any:
    """Return a JSON value whose objects have their keys in the opposite order."""
    if isinstance(value, Mapping):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return [reordered(entry) for entry in value] if isinstance(value, list) else value


def canonical(arguments: str) -> str:
    """Return JSON as programs that parse and format it send it back."""
    return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
