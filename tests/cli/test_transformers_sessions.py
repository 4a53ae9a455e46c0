"""Sessions of a `transformers:FOLDER` are continued, shown and copied as any others."""

from pathlib import Path

import pytest
from cli.conftest import Invoke

from kvkeep import Snapshot
from kvkeep.cli.launch.clients import RunningServer
from kvkeep.cli.launch.server import serves
from kvkeep.cli.model_options import absolute_name
from kvkeep.models.hub.names import name_digest


@pytest.fixture
def in_folder(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the model as the folder `hf`."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("hf").symlink_to(tiny_folder)


@pytest.mark.usefixtures("in_folder")
def test_a_session_goes_on_in_any_folder(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--temperature", 0, "-n", 4)
    new = ("generate", "-m", "transformers:hf", "--dtype", "float32", "-p", "Once upon a time")
    assert invoke(*new, *options, "--session", "s").exit_code == 0
    snapshot = Snapshot.load(tmp_path / "home" / "sessions" / "s.kvkeep")
    assert snapshot.model == f"transformers:{tmp_path}/hf"
    named = invoke("sessions", "show", "s", "-m", "transformers:hf")
    assert "Once upon a time" in named.stdout
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for command in (
        ("sessions", "show", "s"),
        ("sessions", "fork", "s", "t", "--at", 2),
        ("generate", "--session", "s", *options),
        ("generate", "--session", "t", *options),
    ):
        done = invoke(*command)
        assert done.exit_code == 0, done.stderr
    (tmp_path / "hf").unlink()
    missing = invoke("generate", "--session", "s")
    assert missing.exit_code == 2
    assert f"'transformers:{tmp_path}/hf', which is not on this machine" in missing.stderr


@pytest.mark.usefixtures("in_folder")
def test_a_running_server_is_found_by_the_folder(tmp_path: Path) -> None:
    name = f"transformers:{tmp_path}/hf"
    server = RunningServer("http://x", "hf", None, "none", name_digest(name))
    assert absolute_name("transformers:hf") == name
    assert serves(server, "transformers:hf")
    assert not serves(server, "transformers:./other/hf")
