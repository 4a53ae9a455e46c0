"""The snippets of a Markdown page."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# python and sh are run; console has `$ ` before each command, and what it says; output is what
# the snippet before it prints; text is no code.
KINDS = ("python", "sh", "console", "output", "text")
_FENCE, _NOT_RUN = re.compile(r"```(.*)"), re.compile(r"<!-- not run: (.+) -->")
_BEFORE = re.compile(r"<!-- before: (.+) -->")


@dataclass(frozen=True)
class Snippet:
    """line: of the page, where it begins. not_run: the reason why no test runs it. before: Python
    that makes what the snippet takes for granted.
    """

    page: Path
    line: int
    kind: str
    text: str
    not_run: str | None
    before: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    def commands(self) -> list[tuple[str, list[str]]]:
        """Of sh or console: each command, and the lines that it is said to print."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if self.kind == "sh" or line.startswith("$ "):
                command = re.sub(r"\s+#\s.*", "", line.removeprefix("$ "))
                found.append((command, []))
            else:
                found[-1][1].append(line)
        return [(command, said) for command, said in found if command]


def snippets(page: Path) -> Iterator[Snippet]:
    lines, last = page.read_text(encoding="utf-8").splitlines(), ""
    number, before = 0, ""
    while number < len(lines):
        fence = _FENCE.fullmatch(lines[number])
        if fence is None:
            if given := _BEFORE.fullmatch(lines[number]):
                before += f"{given[1]}\n"
            last = lines[number] or last
            number += 1
            continue
        end = lines.index("```", number + 1)
        reason = _NOT_RUN.fullmatch(last)
        text = "\n".join(lines[number + 1 : end])
        yield Snippet(page, number + 1, fence[1], text, reason and reason[1], before)
        number, last, before = end + 1, "", ""


def indented_code(page: Path) -> list[str]:
    """Lines of code that say not what they are: by four spaces rather than between fences."""
    found, fenced, last = [], False, ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if _FENCE.fullmatch(line):
            fenced = not fenced
        elif not fenced and line.startswith("    ") and not last.strip():
            found.append(line)
        last = line
    return found
