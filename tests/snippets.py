"""The snippets of a Markdown page."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# python and sh snippets are run; console shows commands after `$ ` and their output; output is what
# the previous snippet prints; text is not code.
KINDS = ("python", "sh", "console", "output", "text")
_FENCE, _NOT_RUN = re.compile(r"```(.*)"), re.compile(r"<!-- not run: (.+) -->")
_BEFORE = re.compile(r"<!-- before: (.+) -->")


@dataclass(frozen=True)
class Snippet:
    """A fenced snippet of a page.

    line: the line of the page on which it begins. not_run: the reason why no test runs it. before:
    Python code that defines what the snippet needs.
    """

    page: Path
    line: int
    kind: str
    text: str
    not_run: str | None
    before: str

    @property
    def location(self) -> str:
        """The page and line, to name the snippet in messages."""
        return f"{self.page.name}:{self.line}"

    def commands(self) -> list[tuple[str, list[str]]]:
        """Return each command of a sh or console snippet with the lines that it should print."""
        commands: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if self.kind == "sh" or line.startswith("$ "):
                command = re.sub(r"\s+#\s.*", "", line.removeprefix("$ "))
                commands.append((command, []))
            else:
                commands[-1][1].append(line)
        return [(command, expected_output) for command, expected_output in commands if command]


def snippets(page: Path) -> Iterator[Snippet]:
    """Yield the fenced snippets of a page in order."""
    lines, previous = page.read_text(encoding="utf-8").splitlines(), ""
    number, before = 0, ""
    while number < len(lines):
        fence = _FENCE.fullmatch(lines[number])
        if fence is None:
            if setup := _BEFORE.fullmatch(lines[number]):
                before += f"{setup[1]}\n"
            previous = lines[number] or previous
            number += 1
            continue
        end = lines.index("```", number + 1)
        reason = _NOT_RUN.fullmatch(previous)
        text = "\n".join(lines[number + 1 : end])
        yield Snippet(page, number + 1, fence[1], text, reason and reason[1], before)
        number, previous, before = end + 1, "", ""


def indented_code(page: Path) -> list[str]:
    """Return the first lines of code blocks made by indentation, which have no kind."""
    code_lines, fenced, previous = [], False, ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if _FENCE.fullmatch(line):
            fenced = not fenced
        elif not fenced and line.startswith("    ") and not previous.strip():
            code_lines.append(line)
        previous = line
    return code_lines
