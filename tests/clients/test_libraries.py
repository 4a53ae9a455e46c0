"""Client libraries, each by a script of its own in an environment of its own (`install.py`).

KVKEEP_CLIENTS=FOLDER python -m pytest tests/clients/test_libraries.py
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.conftest import RunningServer, running_server, serving

from kvkeep.model import Model
from tests.scripted_model import ScriptedEngine, model_with_text_of
from tests.scripted_server import script_writer

FOLDER = Path(__file__).parent / "libraries"
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
# The answers of a model that decides on a call: "Let me look." and a call, then an answer.
SCRIPT = [
    {"when": "It rains in Paris", "write": "An umbrella helps."},
    {"when": "weather", "write": f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>"},
]


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(smollm2, tmp_path_factory.mktemp("server")) as result:
        yield result


@pytest.fixture(scope="module")
def scripted_server(
    smollm2: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("scripted")
    model = model_with_text_of(folder / "model", smollm2.text.folder)
    settings = {"max_kv_size": 8192}
    engine = ScriptedEngine(model, script_writer(SCRIPT), settings=settings, folder=folder / "s")
    with serving(engine) as result:
        yield result


def environment_of(script: Path) -> Path:
    """Return the folder that has a script's library; skip the test without it."""
    environments = os.environ.get("KVKEEP_CLIENTS")
    if not environments:
        pytest.skip("KVKEEP_CLIENTS is not set: tests/clients/install.py makes environments")
    name = "node" if script.suffix == ".mjs" else script.stem.partition("_")[2]
    folder = Path(environments).absolute() / name.replace("_", "-")
    if not (folder / "installed").exists():
        pytest.skip(f"{folder} is missing: tests/clients/install.py makes it")
    return folder


def run_script(script: Path, server: RunningServer, folder: Path) -> list[str]:
    """Run a script in an empty folder and return the names of its checks, which all passed."""
    environment = environment_of(script)
    if script.suffix == ".mjs":  # a module finds its imports beside itself
        program = environment / "node_modules/.bin/node"
        script = Path(shutil.copy(script, environment))
    else:
        program = environment / "bin/python"
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "DO_NOT_TRACK": "1"}
    command = [str(program), str(script), server.url]
    ran = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout.split()


@pytest.mark.parametrize("script", sorted(FOLDER.glob("with_*")), ids=lambda script: script.stem)
def test_a_library_completes_all_its_calls(
    server: RunningServer, script: Path, tmp_path: Path
) -> None:
    assert len(run_script(script, server, tmp_path)) >= 4


@pytest.mark.parametrize("script", sorted(FOLDER.glob("auto_*")), ids=lambda script: script.stem)
def test_a_library_follows_a_model_that_decides_on_a_call(
    scripted_server: RunningServer, script: Path, tmp_path: Path
) -> None:
    assert run_script(script, scripted_server, tmp_path)
