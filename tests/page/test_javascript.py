"""The web UI's JavaScript: its unit tests by node, its types by tsc, its lint, and its size."""

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FILES = ROOT / "kvkeep" / "server" / "page" / "files"
TOOLS = ROOT / "tools" / "page"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")


def output(*command: str, folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@needs_node
def test_logic_does_what_its_unit_tests_say() -> None:
    output("node", "--test", str(ROOT / "tests" / "page"), folder=ROOT)


@needs_node
@pytest.mark.skipif(
    not (TOOLS / "node_modules").exists(), reason="no type checker: run `make page`"
)
def test_types_are_right_and_the_linter_finds_nothing() -> None:
    output("npm", "run", "types", folder=TOOLS)
    output("npm", "run", "lint", folder=TOOLS)


def test_the_first_view_takes_less_than_100_kilobytes() -> None:
    """Every file that the page loads by itself, compressed as the server sends it.

    Colours of code are loaded when there is code.
    """
    seen, waiting = set[Path](), [FILES / "index.html"]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        text = file.read_text()
        links = re.findall(r'(?:href|src)="/page/([^"]+)"', text)
        imports = re.findall(r'^(?:import|export) [^"]*"(\./[^"]+)";', text, re.MULTILINE)
        waiting += [FILES / name for name in links] + [file.parent / name for name in imports]
    assert {"chat.js", "marked.js", "purify.js"} <= {file.name for file in seen}
    assert sum(len(gzip.compress(file.read_bytes())) for file in seen) < 100_000


def test_every_library_has_its_licence_beside_it() -> None:
    names = {file.name.partition(".")[0].partition("-")[0] for file in (FILES / "vendor").iterdir()}
    licences = {file.name.partition(".")[0] for file in (FILES / "vendor").glob("*.LICENSE.txt")}
    assert names == licences
