"""Client libraries, each by a script of its own in an environment of its own (`install.py`).

KVKEEP_CLIENTS=FOLDER python -m pytest tests/clients/test_libraries.py
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.conftest import RunningServer, running_server

from kvkeep.model import Model

SCRIPTS = sorted((Path(__file__).parent / "libraries").glob("with_*"))


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(smollm2, tmp_path_factory.mktemp("server")) as result:
        yield result


def environment_of(script: Path) -> Path:
    """Return the folder that has a script's library; skip the test without it."""
    environments = os.environ.get("KVKEEP_CLIENTS")
    if not environments:
        pytest.skip("KVKEEP_CLIENTS is not set: tests/clients/install.py makes environments")
    name = "node" if script.suffix == ".mjs" else script.stem.removeprefix("with_")
    folder = Path(environments).absolute() / name.replace("_", "-")
    if not (folder / "installed").exists():
        pytest.skip(f"{folder} is missing: tests/clients/install.py makes it")
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem.removeprefix("with_"))
def test_a_library_completes_all_its_calls(
    server: RunningServer, script: Path, tmp_path: Path
) -> None:
    folder = environment_of(script)
    if script.suffix == ".mjs":  # a module finds its imports beside itself
        program = folder / "node_modules/.bin/node"
        script = Path(shutil.copy(script, folder))
    else:
        program = folder / "bin/python"
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "DO_NOT_TRACK": "1"}
    command = [str(program), str(script), server.url]
    ran = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert len(ran.stdout.split()) >= 4
