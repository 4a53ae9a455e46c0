"""Clients that are no Python library: OpenAI's for Node, `llm`, and plain curl."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from server.conftest import Running, running

from kvkeep.model import Model

HERE = Path(__file__).parent
SCRIPT, PACKAGE = HERE / "openai.mjs", ("package.json", "package-lock.json")
QUESTION = "What is the capital of France? One word."


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(smollm2, tmp_path_factory.mktemp("server")) as found:
        yield found


def program(name: str) -> str:
    """Where it is; a test without it is left out, but not where all is to be tested."""
    found = shutil.which(name)
    if found is None and not os.environ.get("CI"):
        pytest.skip(f"there is no {name} here")
    assert found is not None, f"{name} is missing"
    return found


@pytest.fixture(scope="session")
def node_folder(request: pytest.FixtureRequest) -> Path:
    """A folder with the client in it, as the lock file has it; installed once."""
    npm = program("npm")
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


def test_openai_for_node(server: Running, node_folder: Path) -> None:
    command = [program("node"), SCRIPT.name, f"{server.url}/v1"]
    ran = subprocess.run(command, cwd=node_folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    names = ["chat", "stream", "tools", "schema", "errors", "cancellation", "branches"]
    assert ran.stdout.split() == names


@pytest.mark.parametrize("streamed", [True, False])
def test_llm(server: Running, tmp_path: Path, streamed: bool) -> None:
    """A model of that program's own list, asked once, and then asked on."""
    entry = {
        "model_id": "kept",
        "model_name": "smollm2",
        "api_base": f"{server.url}/v1",
        "can_stream": streamed,
    }
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML

    def asked(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words, "-m", "kept", "-o", "temperature", "0"]
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert "Paris" in asked(QUESTION, "--key", "none", "-o", "max_tokens", "12")
    more = asked("And of Italy?", "--continue", "--key", "none", "-o", "max_tokens", "12")
    assert "Rome" in more


def test_curl(server: Running) -> None:
    """Whole, as a stream, and refused."""
    curl = program("curl")

    def sent(path: str, body: dict[str, object], *options: str) -> str:
        head = ("-H", "Content-Type: application/json", "-d", json.dumps(body))
        command = [curl, "-sS", *options, f"{server.url}{path}", *head]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    answer = json.loads(sent("/v1/chat/completions", body))
    content = answer["choices"][0]["message"]["content"]
    assert "Paris" in content
    events = sent("/v1/chat/completions", {**body, "stream": True}, "-N").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(deltas) == content
    refused = sent("/v1/chat/completions", {"messages": []}, "-w", "\n%{http_code}")
    assert refused.endswith("\n400")
    assert json.loads(refused.rpartition("\n")[0])["error"]["type"] == "invalid_request_error"
