"""Clients beside Python libraries: OpenAI's for Node, `llm`, and curl."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from server.conftest import RunningServer, running_server

from kvkeep.model import Model

HERE = Path(__file__).parent
SCRIPT, PACKAGE = HERE / "openai.mjs", ("package.json", "package-lock.json")
QUESTION = "What is the capital of France? One word."


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(smollm2, tmp_path_factory.mktemp("server")) as result:
        yield result


def find_program(name: str) -> str:
    """Return the path of a program; skip the test without it, except in CI."""
    result = shutil.which(name)
    if result is None and not os.environ.get("CI"):
        pytest.skip(f"there is no {name} here")
    assert result is not None, f"{name} is missing"
    return result


@pytest.fixture(scope="session")
def node_folder(request: pytest.FixtureRequest) -> Path:
    """Install the client once, as pinned by the lock file, and return its folder."""
    npm = find_program("npm")
    folder = Path(request.config.cache.mkdir("node"))  # type: ignore[union-attr]
    with FileLock(folder / "lock"):
        done = folder / "node_modules" / ".package-lock.json"
        lock = folder / "package-lock.json"
        known = lock.exists() and lock.read_bytes() == (HERE / "package-lock.json").read_bytes()
        if not (done.exists() and known):
            for name in PACKAGE:
                shutil.copy(HERE / name, folder)
            subprocess.run([npm, "ci", "--silent"], cwd=folder, check=True)
        shutil.copy(SCRIPT, folder)
    return folder


def test_openai_for_node_completes_all_its_calls(server: RunningServer, node_folder: Path) -> None:
    command = [find_program("node"), SCRIPT.name, f"{server.url}/v1"]
    ran = subprocess.run(command, cwd=node_folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    names = ["chat", "stream", "tools", "schema", "errors", "cancellation", "branches"]
    assert ran.stdout.split() == names


@pytest.mark.parametrize("streamed", [True, False])
def test_llm_answers_a_prompt_and_a_follow_up(
    server: RunningServer, tmp_path: Path, streamed: bool
) -> None:
    """A model of the program's list takes a prompt and then a follow-up."""
    entry = {
        "model_id": "kept",
        "model_name": "smollm2",
        "api_base": f"{server.url}/v1",
        "can_stream": streamed,
    }
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML

    def run_llm(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words, "-m", "kept", "-o", "temperature", "0"]
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert "Paris" in run_llm(QUESTION, "--key", "none", "-o", "max_tokens", "12")
    fields = run_llm("And of Italy?", "--continue", "--key", "none", "-o", "max_tokens", "12")
    assert "Rome" in fields


def test_curl_gets_a_response_a_stream_and_an_error(server: RunningServer) -> None:
    """A whole response, a stream, and an error."""
    program = find_program("curl")

    def curl(path: str, body: dict[str, object], *options: str) -> str:
        head = ("-H", "Content-Type: application/json", "-d", json.dumps(body))
        command = [program, "-sS", *options, f"{server.url}{path}", *head]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    response = json.loads(curl("/v1/chat/completions", body))
    content = response["choices"][0]["message"]["content"]
    assert "Paris" in content
    events = curl("/v1/chat/completions", {**body, "stream": True}, "-N").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(deltas) == content
    refused = curl("/v1/chat/completions", {"messages": []}, "-w", "\n%{http_code}")
    assert refused.endswith("\n400")
    assert json.loads(refused.rpartition("\n")[0])["error"]["type"] == "invalid_request_error"
