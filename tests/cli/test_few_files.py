"""A server that may open few files."""

import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
from timeouts import PATIENCE

_RAISED = """
import resource
from kvkeep.server.connections import max_connections, raise_file_limit
hard = min(2_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard), max_connections() == hard // 2)
"""


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    command = [sys.executable, "-c", _RAISED]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "True True\n"


def test_more_connections_than_open_files_leave_the_server_at_work(
    tiny: list[str], tmp_path: Path
) -> None:
    """It closes those that are too many, logs nothing, creates sessions, and saves them."""
    command = [sys.executable, "-m", "kvkeep", "serve", *tiny, "--port", "0"]
    options = ["--store", str(tmp_path / "store")]
    limited = ["sh", "-c", 'ulimit -n 96 && exec "$@"', "sh", *command, *options]
    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            limited, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
        ) as server,
        ExitStack() as connections,
    ):
        try:
            assert server.stdout is not None
            match = re.search(r"http://(\S+):(\d+)", server.stdout.readline())
            assert match is not None
            for _ in range(110):
                connection = socket.create_connection((match[1], int(match[2])), PATIENCE)
                connections.enter_context(connection)
            connections.close()
            with httpx.Client(base_url=match[0], timeout=PATIENCE) as client:
                for number in range(100):
                    created = client.post("/v1/sessions", json={"name": f"s{number}"})
                    assert created.status_code == 201, created.text
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 0
        finally:
            server.kill()
    assert len(list((tmp_path / "store").rglob("s*.kvkeep"))) == 100
    assert log.read_text() == ""
