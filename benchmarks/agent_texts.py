"""Generated texts of agent sessions: passages of real prose, and tools that are made up."""

from typing import Any

from kvkeep.evaluate.haystack import manual_text

_CHARACTERS_PER_TOKEN = 3.6  # of the manual, about


class Prose:
    """Consecutive passages of a long real text, Python's manual, none of them twice."""

    def __init__(self) -> None:
        self._words, self._next = manual_text().split(), 0

    def words(self, tokens: int) -> str:
        """Return the next words, in lines, of about so many tokens."""
        passage, length = list[str](), 0
        while length < tokens * _CHARACTERS_PER_TOKEN:
            word = self._words[self._next % len(self._words)]
            passage.append(word)
            length += len(word) + 1
            self._next += 1
        lines = [" ".join(passage[at : at + 12]) for at in range(0, len(passage), 12)]
        return "\n".join(lines)


def function(name: str, description: str) -> dict[str, Any]:
    """Return a tool with a schema of one property."""
    properties = {"path": {"type": "string", "description": "An absolute path."}}
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties},
    }
