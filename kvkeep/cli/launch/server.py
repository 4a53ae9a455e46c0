"""The server for a launched client: one that runs, or one that is started for the client."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx

from kvkeep.cli.launch.clients import RunningServer
from kvkeep.cli.model_options import absolute_name
from kvkeep.cli.output import say, spinner
from kvkeep.cli.serve import serve
from kvkeep.cli.store import default_server_folder, require_no_server
from kvkeep.client.transport import http_options
from kvkeep.errors import InvalidArgument, KvkeepError, Locked
from kvkeep.models.hub.names import name_digest
from kvkeep.models.hub.source import DEFAULT_MODEL

# Agents send 5,000 to 15,000 tokens of instructions and tools before the first question.
_AGENT_CONTEXT = 16_384
_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 15.0


def find_server(url: str, key: str | None) -> RunningServer | None:
    """Return the kvkeep server at an address, or None if none answers there.

    Raises InvalidArgument for an address or a key that cannot be one, KvkeepError if the server
    needs another API key.
    """
    with httpx.Client(**http_options(url, key, {"timeout": 5.0})) as client:
        try:
            entry = _get(client, "/v1/models")["data"][0]
            if entry["owned_by"] != "kvkeep":
                return None
            digest = _get(client, "/v1/page").get("name_digest")  # needs the key, unlike the list
            context = entry["n_ctx"]
        except _NeedsKey:
            raise KvkeepError(
                f"the server at {url} needs {'an' if key is None else 'another'} API key: use "
                "--api-key or $KVKEEP_API_KEY"
            ) from None
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
            return None
    return RunningServer(url.rstrip("/"), entry["id"], context, key or "none", digest)


class _NeedsKey(Exception):
    """A request without an API key that the server accepts."""


def _get(client: httpx.Client, path: str) -> Any:
    response = client.get(path)
    if response.status_code == 401:
        raise _NeedsKey
    return response.raise_for_status().json()


def serves(server: RunningServer, model: str | None) -> bool:
    """Whether a server has the model with a name. model: None for any.

    Paths, and names with an owner, are compared as a whole, if the server says what its own is.
    """
    if model is None:
        return True
    name = absolute_name(model)
    if name == model == server.model:  # which may be an alias
        return True
    if server.name_digest is not None and "/" in name:
        return server.name_digest == name_digest(name)
    return server.model in (model, Path(model).name)


def warn_of_short_context(server: RunningServer) -> None:
    """Say so if the instructions of most agents do not fit in a server's context."""
    if server.context is not None and server.context < _AGENT_CONTEXT:
        say(
            f"kvkeep: the context of {server.model} has {server.context:,} tokens, and agents need "
            f"{_AGENT_CONTEXT:,} or more: use another model, or raise --max-kv-size"
        )


def serve_command(model: str | None, options: Sequence[str], port: int) -> list[str]:
    """Return the arguments of `kvkeep` that start a server for an agent."""
    command = ["serve", "--model", model or DEFAULT_MODEL, "--port", str(port)]
    return [*command, "--context-policy", "refuse", *options]


@contextmanager
def started_server(
    model: str | None, options: Sequence[str], key: str | None
) -> Iterator[RunningServer]:
    """Start a server on a free port; stop it at the end. key: an API key that it accepts.

    Raises KvkeepError if it cannot start, or needs another key.
    """
    with (
        _temporary_store() as store,
        tempfile.NamedTemporaryFile(prefix="kvkeep-serve-", suffix=".log") as log,
    ):
        command = [sys.executable, "-m", "kvkeep", *serve_command(model, [*store, *options], 0)]
        # In a session of its own: Ctrl-C in the terminal is for the client.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            with spinner(f"starting kvkeep serve with {model or DEFAULT_MODEL}", True):
                url = _await_address(process, Path(log.name))
            server = find_server(url, key)
            if server is None:
                raise KvkeepError(f"the server that was started at {url} does not answer")
            say(f"kvkeep serves {server.model} on {url}, until the client ends")
            yield server
        finally:
            _stop(process)


@contextmanager
def _temporary_store() -> Iterator[list[str]]:
    """Yield the options for a temporary store, if another server uses kvkeep's own folder."""
    if _is_own_folder_free():
        yield []
    else:
        say(
            "kvkeep: another server uses kvkeep's folder; this server's sessions are temporary and "
            "are deleted when it stops"
        )
        with tempfile.TemporaryDirectory(prefix="kvkeep-serve-") as folder:
            yield ["--store", folder]


def _is_own_folder_free() -> bool:
    try:
        require_no_server(default_server_folder())
    except Locked:
        return False
    return True


def server_to_start(
    model: str | None, options: Sequence[str], key: str | None, port: int
) -> tuple[list[str], RunningServer]:
    """Return the arguments of `kvkeep` that start a server, and how clients reach it then.

    port: unless the options have another one. Raises InvalidArgument.
    """
    folder = Path(tempfile.gettempdir()) / f"kvkeep-serve-{os.getuid()}"
    store = [] if _is_own_folder_free() else ["--store", str(folder)]
    command = serve_command(model, [*store, *options], port)
    parameters = _parse_options(command[1:])
    host, port = parameters["host"], parameters["port"]
    if port == 0:
        raise InvalidArgument("a printed script needs the server's port: leave out --port 0")
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    name = parameters["alias"] or Path(parameters["model"]).name
    return command, RunningServer(url, name, parameters["max_kv_size"], key or "none")


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
    """Split the value of `--serve` as a shell does.

    Raises InvalidArgument for open quotes, options that `kvkeep serve` does not have, and for -q.
    """
    try:
        options = shlex.split(text)
    except ValueError as error:
        raise InvalidArgument(f"--serve {text!r} is not a list of options: {error}") from error
    if _parse_options(options)["quiet"]:
        raise InvalidArgument(
            "leave -q out of --serve: the server's address is read from its output"
        )
    return options


def _parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of `kvkeep serve` by name. Raises InvalidArgument."""
    try:
        return serve.make_context("serve", list(options)).params
    except click.UsageError as error:
        raise InvalidArgument(f"--serve: {error.format_message()}") from error
    except click.exceptions.Exit as error:  # of --help, which was printed
        raise InvalidArgument("--serve: leave out --help") from error
