"""Markdown is divided into the same blocks in whatever pieces it comes, and code is previewed."""

import io

import pytest
from rich.console import Console

from kvkeep.cli.chat.markdown_blocks import MarkdownBlocks
from kvkeep.cli.chat.printer import _render

CODE = "```python\na = 1\n\nb = '''\n~~~\n\n```` '''\n```\n"
BLOCKS = [
    "# Title\n \n",
    "Some text\nin two lines.\n\n\n",
    "- a list\n\n  with a paragraph\n\n",
    f"Code:\n{CODE}\n",
    "~~~~\nx\n\n~~~\n\ny\n~~~~\n\n",
    "```not code``` but text\n\n",
    "The end",
]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_blocks_are_the_same_in_any_pieces(size: int) -> None:
    """A blank line ends a block, unless it is in code or what follows is indented."""
    markdown, text, blocks = MarkdownBlocks(), "".join(BLOCKS), list[str]()
    for start in range(0, len(text), size):
        blocks += markdown.push(text[start : start + size])
    assert [*blocks, markdown.text] == BLOCKS
    assert markdown.pop() == "The end"
    assert markdown.text == ""


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_the_newest_rows_of_code_are_rendered_without_the_others(rows: int) -> None:
    """A block of code may be long, and it is drawn again and again while it grows."""
    console = Console(file=io.StringIO(), width=40, highlight=False)
    lines = [f"value_{number} = {'x' * (number % 60)}\n" for number in range(200)]
    markdown = MarkdownBlocks()
    markdown.push("Here it is:\n```python\n")
    for count, line in enumerate(lines, 1):
        markdown.push(line)
        newest = markdown.newest_text(rows)
        assert newest.count("\n") <= (rows + 1 if count > rows else count + 2)
        if count % 50 == 0:
            assert newest == "```python\n" + "".join(lines[count - rows : count])
            whole = [[part.text for part in row] for row in _render(console, markdown.text)]
            shown = [[part.text for part in row] for row in _render(console, newest)]
            assert shown[-rows:] == whole[-rows:]
    markdown.push("a part")
    assert markdown.newest_text(rows).endswith(lines[-1] + "a part")


def test_text_that_is_no_code_is_rendered_as_a_whole() -> None:
    """The numbers of a list, and the widths of a table, depend on what comes before."""
    markdown = MarkdownBlocks()
    text = "".join(f"{number}. item\n" for number in range(100))
    markdown.push(text)
    assert markdown.newest_text(5) == text
