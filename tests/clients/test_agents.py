"""Coding agents, unmodified: a task with tools, a resume, an image, and an overflow.

The agents are the released programs. Their model is a scripted one (`tests/scripted_server.py`),
since small models do not call tools by themselves. npm installs them once for a run, unless
KVKEEP_AGENTS names a folder with their programs.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from filelock import FileLock

from tests.clients.agent_setups import AGENTS, Agent, AgentRun

REPOSITORY = Path(__file__).parents[2]
TASK = "Count the lines of notes.txt, and tell me the code word in notes.txt."
RESUME = "Repeat that word in capitals."
IMAGE = "Describe the attached picture in one word."
NO_IMAGE = "(?:image.{0,80} omitted|Unsupported image)"  # by the server, or by the agent itself
TIMEOUT = 240  # seconds, of one run of an agent on a busy machine


def png() -> bytes:
    """Return a red square as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\x00" + b"\xff\x00\x00" * 8) * 8)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def call(tool: tuple[str, Mapping[str, object]], project: Path) -> str:
    """Return a call as the model writes it."""
    name, arguments = tool
    text = json.dumps({"name": name, "arguments": arguments}).replace("{project}", str(project))
    return f"<tool_call>\n{text}\n</tool_call>"


def rules(agent: Agent, project: Path) -> list[dict[str, str]]:
    """Return the script: by what the newest part of the prompt says."""
    seen = re.escape(IMAGE)
    script = [
        {"when": f"{re.escape(RESUME)}", "write": "HERON it is."},
        {"when": rf"{seen}.*{NO_IMAGE}|{NO_IMAGE}.*{seen}", "write": "Nothing seen."},
        {"when": "tool_response.*The code word is heron", "write": "The code word is heron."},
        {"when": r"tool_response.*\b3 notes\.txt", "write": call(agent.read, project)},
        {"when": re.escape(TASK), "write": f"I will look.\n{call(agent.shell, project)}"},
    ]
    # Claude Code gets the path of a picture, and reads it by its tool.
    read_image = call(agent.read, project).replace("notes.txt", "red.png")
    return [*script, {"when": seen, "unless": "tool_response", "write": read_image}]


@pytest.fixture
def programs(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the agent's program. All workers of a run share it."""
    if folder := os.environ.get("KVKEEP_AGENTS"):
        return Path(folder)
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    shared = tmp_path_factory.getbasetemp().parent / f"agent-{name}"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(shared)]
            command.append(AGENTS[name].package)
            shared.mkdir()
            subprocess.run(command, capture_output=True, timeout=400, check=False)
    return shared / "node_modules" / ".bin"


@contextmanager
def scripted_server(
    script: Sequence[Mapping[str, str]], folder: Path, *options: str
) -> Iterator[str]:
    """Run a scripted server, and yield its URL."""
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    command = [sys.executable, "-m", "tests.scripted_server", str(path), *options]
    command += ["--log", str(folder / "log.jsonl")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def run_agent(agent: Agent, programs: Path, run: AgentRun, project: Path) -> tuple[int, str]:
    """Run an agent; return its exit status and its output."""
    program = programs / agent.program
    if not program.exists():
        pytest.skip(f"{agent.package} could not be installed")
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOME": str(run.home),
        "XDG_DATA_HOME": str(run.home / "data"),
        "XDG_CONFIG_HOME": str(run.home / "config"),
        "NO_COLOR": "1",
        **agent.environment(run),
    }
    result = subprocess.run(
        [str(program), *agent.command(run)],
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT,
        check=False,
    )
    return result.returncode, result.stdout.decode(errors="replace")


def cache_misses(url: str) -> list[dict[str, Any]]:
    """Return the server's newest generations, with what each reused of its prompt."""
    return list(httpx.get(f"{url}/v1/prefix/misses").json()["data"])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "notes.txt").write_text("line one\nThe code word is heron.\nline three\n")
    (folder / "red.png").write_bytes(png())
    (tmp_path / "home").mkdir()
    return folder


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_does_a_task_resumes_and_takes_an_image(
    name: str, programs: Path, project: Path, tmp_path: Path
) -> None:
    """The image is in a session of its own, which reuses the instructions of the one before."""
    agent, home = AGENTS[name], tmp_path / "home"
    with scripted_server(rules(agent, project), tmp_path) as url:
        status, output = run_agent(agent, programs, AgentRun(TASK, url, home), project)
        assert status == 0, output
        assert "The code word is heron." in output
        resume = AgentRun(RESUME, url, home, resumes=True)
        status, output = run_agent(agent, programs, resume, project)
        assert status == 0, output
        assert "HERON it is." in output
        earlier = {miss["number"] for miss in cache_misses(url)}
        image = AgentRun(IMAGE, url, home, image=project / "red.png")
        status, output = run_agent(agent, programs, image, project)
        assert status == 0, output
        assert "Nothing seen." in output
        misses = [miss for miss in cache_misses(url) if miss["number"] not in earlier]
    longest = max(miss["prompt_tokens"] for miss in misses)  # others ask for a title
    long = [miss for miss in misses if miss["prompt_tokens"] >= longest / 2]
    first = min(long, key=lambda miss: miss["number"])
    assert first["reused"] >= 0.85 * first["prompt_tokens"], first
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "log.jsonl").open()]
    assert any(re.search(r"\b3 notes\.txt", prompt) for prompt in prompts)  # the shell ran


@pytest.mark.parametrize("name", [name for name, agent in AGENTS.items() if not agent.compacts])
def test_an_agent_says_that_the_context_is_full(
    name: str, programs: Path, project: Path, tmp_path: Path
) -> None:
    agent = AGENTS[name]
    with scripted_server(rules(agent, project), tmp_path, "--max-kv-size", "2048") as url:
        run = AgentRun(TASK, url, tmp_path / "home")
        _, output = run_agent(agent, programs, run, project)
    assert re.search(r"(?i)context|too long", output), output


@pytest.mark.parametrize("name", [name for name, agent in AGENTS.items() if agent.compacts])
def test_an_agent_compacts_a_full_context_and_goes_on(
    name: str, programs: Path, project: Path, tmp_path: Path
) -> None:
    """Its own prompt and the question do not fit together, but each does alone."""
    agent, question = AGENTS[name], "Which of these words matters? " + "word " * 8_000
    summary = {"when": "context was compacted", "write": "The user asked about words."}
    script = [summary, {"when": "", "write": "None of them."}]
    with scripted_server(script, tmp_path, "--max-kv-size", "12000") as url:
        run = AgentRun(question, url, tmp_path / "home")
        _, output = run_agent(agent, programs, run, project)
    assert "None of them." in output  # behind the error of the first try
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "log.jsonl").open()]
    assert "The user asked about words." in prompts[-1]
