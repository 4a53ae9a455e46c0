"""Division of Markdown that grows into blocks, each of which can be rendered by itself."""

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


class MarkdownBlocks:
    """Markdown that grows, divided at blank lines outside of code. text: the incomplete block.

    Each line is looked at once, when it is complete.
    """

    def __init__(self) -> None:
        self._reset("")

    def _reset(self, text: str) -> None:
        self.text = text
        self._line_start = 0  # of the newest line, which is incomplete
        self._follows_blank_line = False
        self._fence, self._code_start = "", 0  # of the code that the newest line is in, or ""

    def push(self, piece: str) -> list[str]:
        """Append a piece of text; return the blocks that it completes."""
        self.text += piece
        blocks = list[str]()
        while self._line_start < len(self.text):
            starts_block = not self.text[self._line_start].isspace() and not self._fence
            if starts_block and self._follows_blank_line:
                blocks.append(self.text[: self._line_start])
                self._reset(self.text[self._line_start :])
            end = self.text.find("\n", self._line_start)
            if end < 0:
                break
            line, self._line_start = self.text[self._line_start : end], end + 1
            self._follows_blank_line = not line.strip()
            self._pass_fence(line)
        return blocks

    def pop(self) -> str:
        """Return the incomplete block, and start anew."""
        text = self.text
        self._reset("")
        return text

    def newest_text(self, line_count: int) -> str:
        """Return the incomplete block; of code, its fence and at most so many lines and a part."""
        if not self._fence:
            return self.text
        start = self._line_start
        for _ in range(line_count):
            if start <= self._code_start:
                return self.text
            start = self.text.rfind("\n", 0, start - 1) + 1
        fence_start = self.text.rfind("\n", 0, self._code_start - 1) + 1
        return self.text[fence_start : self._code_start] + self.text[start:]

    def _pass_fence(self, line: str) -> None:
        """Open or close code if a complete line does, by the rules of CommonMark."""
        match = _FENCE.match(line)
        if match is None:
            return
        marker, rest = match.groups()
        if self._fence:
            if marker.startswith(self._fence) and not rest.strip():
                self._fence = ""
        elif marker[0] == "~" or "`" not in rest:
            self._fence, self._code_start = marker, self._line_start
