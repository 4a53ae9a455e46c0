"""The unread part of an answer: text in which control tokens are single characters."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence

# Lone surrogates stand for control tokens: decoded text never contains them.
_FIRST_CODE = 0xD800
_SURROGATES = re.compile("[\ud800-\udfff]")
SPACE = " \t\r\n"


class Scanner:
    """The unread part of an answer, and what was read since `mark`.

    A marker, such as `<tool_call>`, is a control token in some vocabularies and plain text in
    others. As a control token it becomes one character here, its code, so that the rest of the
    reader works on strings. Control tokens that are no markers are dropped.
    """

    def __init__(
        self,
        markers: Iterable[str],
        control_markers: Collection[str],
        control_text: Callable[[int], str] = lambda token: "",
        silent: Collection[str] = (),
    ):
        """control_markers: those that are control tokens, and so never plain text.

        control_text: the text of a control token's id. silent: markers that have no text.
        """
        self._codes = {
            text: chr(_FIRST_CODE + index) for index, text in enumerate(dict.fromkeys(markers))
        }
        self._texts = {code: "" if text in silent else text for text, code in self._codes.items()}
        self.control_markers, self._control_text = frozenset(control_markers), control_text
        self._read = ""
        self.rest = ""
        self.closed = False  # no more text will come

    def append(self, pieces: Sequence[str | int]) -> None:
        self.rest += "".join(
            _SURROGATES.sub("\ufffd", piece)
            if isinstance(piece, str)
            else self._codes.get(self._control_text(piece), "")
            for piece in pieces
        )

    def advance(self, length: int) -> str:
        """Read this many characters, and return them."""
        read, self.rest = self.rest[:length], self.rest[length:]
        self._read += read
        return read

    def mark(self) -> None:
        """Forget what was read so far: `written` begins here."""
        self._read = ""

    def unread(self) -> None:
        """Take back what was read since `mark`, so that it is read again."""
        self.rest, self._read = self._read + self.rest, ""

    @property
    def written(self) -> str:
        """The text read since `mark`."""
        return self._read

    def plain(self, text: str, in_json: bool = False) -> str:
        """Return a text with control tokens as their texts. in_json: inside strings of JSON."""
        texts = self._texts
        if in_json:
            texts = {code: json.dumps(text)[1:-1] for code, text in texts.items()}
        return _SURROGATES.sub(lambda match: texts.get(match[0], ""), text)

    def forms(self, marker: str) -> tuple[str, ...]:
        """Return how a marker can look in `rest`."""
        code = self._codes.get(marker)
        if code is None:
            return (marker,)
        return (code,) if marker in self.control_markers else (code, marker)

    def find(self, markers: Iterable[str]) -> tuple[int, str, int] | None:
        """Return the place, marker and length of the first marker in `rest`."""
        found = [
            (place, -len(form), marker)
            for marker in markers
            for form in self.forms(marker)
            if (place := self.rest.find(form)) >= 0
        ]
        if not found:
            return None
        place, negative_length, marker = min(found)
        return place, marker, -negative_length

    def certain_length(self, markers: Iterable[str]) -> int:
        """Return the length of `rest` without an end that may begin a marker."""
        if self.closed:
            return len(self.rest)
        held = 0
        for marker in markers:
            for form in self.forms(marker):
                for length in range(min(len(form) - 1, len(self.rest)), held, -1):
                    if self.rest.endswith(form[:length]):
                        held = length
                        break
        return len(self.rest) - held


def has_control_codes(text: str) -> bool:
    """Whether some of a text of `Scanner.rest` stands for control tokens."""
    return bool(_SURROGATES.search(text))
