r"""Requests that schemathesis generates from the OpenAPI description, against `kvkeep serve`.

    python tests/clients/install.py FOLDER schemathesis
    KVKEEP_CLIENTS=FOLDER KVKEEP_SCHEMATHESIS=180 \
      python -m pytest -s tests/clients/test_openapi_fuzzing.py

KVKEEP_SCHEMATHESIS is the number of examples for each operation; with 180 there are more than
10,000 requests.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

EXAMPLES = os.environ.get("KVKEEP_SCHEMATHESIS", "5")
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


@pytest.fixture
def url(tiny_folder: Path, tmp_path: Path) -> Iterator[str]:
    """Run `kvkeep serve` with a tiny random model and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    options = ("--port", str(port), "--max-kv-size", "64", "--policy", "full", "--memory", "1GB")
    command = [sys.executable, "-m", "kvkeep", "serve", "-m", str(tiny_folder), *options]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([*command, "--store", str(tmp_path / "store")], stderr=log)
        try:
            for _ in range(600):
                try:
                    httpx.get(f"{address}/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    assert server.poll() is None, (tmp_path / "log").read_text()
                    time.sleep(0.2)
            yield address
        finally:
            server.terminate()
            server.wait()


@pytest.fixture
def program() -> Path:
    path = Path(os.environ.get("KVKEEP_CLIENTS", "")) / "schemathesis/bin/schemathesis"
    if not path.exists():
        pytest.skip("schemathesis is missing: tests/clients/install.py installs it")
    return path


def test_no_request_gets_an_undocumented_response_or_a_server_error(
    program: Path, url: str, tmp_path: Path
) -> None:
    options = [f"--checks={CHECKS}", f"--max-examples={EXAMPLES}", "--phases=coverage,fuzzing"]
    options += ["--exclude-path-regex=events$", "--continue-on-failure", "--request-timeout=60"]
    options += ["--suppress-health-check=all", "--warnings=off", "--no-color", "--seed=1"]
    httpx.get(f"{url}/openapi.json", timeout=120)  # the first takes seconds to make
    command = [str(program.absolute()), "run", f"{url}/openapi.json", *options]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    print(ran.stdout[-3000:])
    assert ran.returncode == 0, ran.stdout[-20_000:]
    assert re.search(r"[1-9]\d* generated", ran.stdout)
