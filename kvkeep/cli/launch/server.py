"""The server for a launched client: one that runs, or one that is started for the client."""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from kvkeep.cli.launch.clients import RunningServer
from kvkeep.cli.output import say, spinner
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.models.hub.source import DEFAULT_MODEL

# Agents send 5,000 to 15,000 tokens of instructions and tools before the first question.
_AGENT_CONTEXT = 16_384
_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 15.0


def find_server(url: str, key: str | None) -> RunningServer | None:
    """Return the kvkeep server at an address, or None if none answers there.

    Raises KvkeepError if it needs another API key.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        response = httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers, timeout=5.0)
        if response.status_code == 401:
            raise KvkeepError(f"the server at {url} needs an API key: set $KVKEEP_API_KEY")
        entry = response.raise_for_status().json()["data"][0]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None
    if entry.get("owned_by") != "kvkeep":
        return None
    return RunningServer(url.rstrip("/"), entry["id"], entry["n_ctx"], key or "none")


def serves(server: RunningServer, model: str | None) -> bool:
    """Whether a server has the model with a name. model: None for any."""
    return model is None or server.model in (model, Path(model).name)


def warn_of_short_context(server: RunningServer) -> None:
    """Say so if the instructions of most agents do not fit in a server's context."""
    if server.context is not None and server.context < _AGENT_CONTEXT:
        say(
            f"kvkeep: the context of {server.model} has {server.context:,} tokens, and agents need "
            f"{_AGENT_CONTEXT:,} or more: take another model, or more with --max-kv-size"
        )


def serve_command(model: str | None, options: Sequence[str], port: int) -> list[str]:
    """Return the arguments of `kvkeep` that start a server for an agent."""
    command = ["serve", "--model", model or DEFAULT_MODEL, "--port", str(port)]
    return [*command, "--context-policy", "refuse", *options]


@contextmanager
def started_server(model: str | None, options: Sequence[str]) -> Iterator[RunningServer]:
    """Start a server on a free port; stop it at the end. Raises KvkeepError if it cannot start."""
    command = [sys.executable, "-m", "kvkeep", *serve_command(model, options, 0)]
    with tempfile.NamedTemporaryFile(prefix="kvkeep-serve-", suffix=".log") as log:
        # In a session of its own: Ctrl-C in the terminal is for the client.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            with spinner(f"starting kvkeep serve with {model or DEFAULT_MODEL}", True):
                url = _await_address(process, Path(log.name))
            server = find_server(url, None)
            if server is None:
                raise KvkeepError(f"the server that was started at {url} does not answer")
            say(f"kvkeep serves {server.model} on {url}, until the client ends")
            yield server
        finally:
            _stop(process)


def _await_address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    while True:
        has_ended = process.poll() is not None
        text = log.read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"serves .* on (http://\S+)", text):
            return match[1]
        if has_ended:
            raise InvalidArgument(_failure(text))
        time.sleep(_POLL_SECONDS)


def _failure(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    reason = lines[-1].removeprefix("kvkeep: error: ") if lines else "it printed nothing"
    return f"kvkeep serve did not start: {reason} (pass options of the server with --serve)"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def parse_serve_options(text: str) -> list[str]:
    """Split the value of `--serve` as a shell does. Raises InvalidArgument for open quotes."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidArgument(f"--serve {text!r} is not a list of options: {error}") from error
