"""aider, unmodified, run by `kvkeep launch`: an edit, a resume, a picture, and an overflow.

The model is a scripted one. aider is the program on the path, or that in the folder
KVKEEP_AGENTS; last run with aider-chat 0.86.2.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.test_agents import REPOSITORY, TIMEOUT, png, project, scripted_server

__all__ = ["project"]  # a fixture

EDIT = "Change heron to stork in notes.txt."
RESUME = "Repeat that word in capitals."
IMAGE = "Describe the attached picture in one word."
# Edits are whole files for models that aider does not know.
EDITED = "notes.txt\n```\nline one\nThe code word is stork.\nline three\n```\n"
SCRIPT = [
    {"when": re.escape(RESUME), "write": "STORK it is."},
    {"when": re.escape(IMAGE), "write": "Nothing seen."},
    {"when": re.escape(EDIT), "write": EDITED},
]


@pytest.fixture(scope="session")
def search_path() -> str:
    """Return the path of programs, with aider on it."""
    path = os.pathsep.join([os.environ.get("KVKEEP_AGENTS", ""), os.environ["PATH"]])
    if shutil.which("aider", path=path) is None:
        pytest.skip("needs aider: `uv tool install aider-chat`")
    return path


def run_aider(search_path: str, url: str, project: Path, *arguments: str) -> str:
    """Run aider in a project; return its output."""
    options = ["--no-git", "--yes-always", "--no-check-update", "--no-show-release-notes"]
    command = [sys.executable, "-m", "kvkeep", "launch", "aider", "--server", url, "--"]
    environment = {"PATH": search_path, "HOME": str(project.parent / "home"), "NO_COLOR": "1"}
    result = subprocess.run(
        [*command, *options, "--no-pretty", "--message", *arguments],
        cwd=project,
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT,
        check=False,
    )
    output = result.stdout.decode(errors="replace")
    assert result.returncode == 0, output
    return output


def test_aider_edits_a_file_resumes_and_takes_an_image(
    search_path: str, project: Path, tmp_path: Path
) -> None:
    (project / "red.png").write_bytes(png())
    with scripted_server(SCRIPT, tmp_path) as url:
        output = run_aider(search_path, url, project, EDIT, "notes.txt")
        assert "Applied edit to notes.txt" in output
        assert "word is stork." in (project / "notes.txt").read_text()
        output = run_aider(search_path, url, project, RESUME, "--restore-chat-history")
        assert "STORK it is." in output
        assert "Nothing seen." in run_aider(search_path, url, project, IMAGE, "red.png")


def test_aider_says_that_the_context_is_full(
    search_path: str, project: Path, tmp_path: Path
) -> None:
    with scripted_server(SCRIPT, tmp_path, "--max-kv-size", "400") as url:
        output = run_aider(search_path, url, project, EDIT, "notes.txt")
    assert re.search("token limit|context", output.partition("Added notes.txt")[2]), output
