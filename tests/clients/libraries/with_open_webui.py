"""Open WebUI as a server of its own, with the server under test as OpenAI's and Ollama's.

Asks Open WebUI what its page asks: the models, and chats, whole and streamed, by each API.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from checks import MODEL, QUESTION, SYSTEM, URL, run_checks

MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
STARTING = 900  # seconds; it imports torch, and a busy machine takes minutes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: str) -> tuple[subprocess.Popen[bytes], httpx.Client]:
    """Start Open WebUI without accounts and return its process and a signed-in client."""
    port = free_port()
    variables = {
        **os.environ,
        "DATA_DIR": folder,
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "none",
        "OPENAI_API_BASE_URL": f"{URL}/v1",
        "OPENAI_API_KEY": "none",
        "OLLAMA_BASE_URL": URL,
        "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai",  # a local one would be downloaded
        "ENABLE_VERSION_UPDATE_CHECK": "False",
    }
    program = Path(sys.executable).parent / "open-webui"
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=variables, stdout=sys.stderr)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
    for _ in range(STARTING):
        try:
            client.get("/health").raise_for_status()
            break
        except httpx.HTTPError:
            if process.poll() is not None:
                sys.exit("Open WebUI ended")
            time.sleep(1)
    signed = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
    client.headers["Authorization"] = f"Bearer {signed['token']}"
    return process, client


def ask(path: str, **params: object) -> httpx.Response:
    settings = {"temperature": 0, "max_tokens": 20, **params}
    body = {"model": MODEL, "messages": MESSAGES, **settings}
    response = client.post(f"{path}/chat/completions", json=body)
    response.raise_for_status()
    return response


def joined_deltas(response: httpx.Response) -> str:
    lines = response.text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


def listed() -> None:
    assert MODEL in [model["id"] for model in client.get("/openai/models").json()["data"]]
    assert client.get("/ollama/api/tags").json()["models"]
    assert client.get("/api/models").json()["data"]


def chat() -> None:
    answer = ask("/openai").json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


def stream() -> None:
    assert "Paris" in joined_deltas(ask("/openai", stream=True))


def page_stream() -> None:
    """Check the route that the page uses, which takes the model from its merged list."""
    assert "Paris" in joined_deltas(ask("/api", stream=True))


def ollama_chat() -> None:
    name = client.get("/ollama/api/tags").json()["models"][0]["model"]
    body = {"model": name, "messages": MESSAGES, "options": {"temperature": 0}, "stream": False}
    response = client.post("/ollama/api/chat", json=body)
    response.raise_for_status()
    assert "Paris" in response.json()["message"]["content"]


with tempfile.TemporaryDirectory() as data:
    webui, client = start(data)
    try:
        run_checks(listed, chat, stream, page_stream, ollama_chat)
    finally:
        webui.terminate()
        webui.wait()
