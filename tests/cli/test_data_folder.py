"""The data folder: what cannot be made again, sessions of a server among it, is not in a cache."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import platformdirs
import pytest
from lossy_basis import random_basis
from timeouts import PATIENCE

from kvkeep.cli.store import default_server_folder
from kvkeep.errors import Locked, StoreError
from kvkeep.loader import load_model
from kvkeep.storage.lossy.basis import add_basis, find_basis, newest_basis
from kvkeep.storage.sessions.folder import SessionFolder


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """The data folder and the cache folder of a new user."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "KVKEEP_HOME"):
        monkeypatch.delenv(name, raising=False)
    folders = platformdirs.user_data_path("kvkeep"), platformdirs.user_cache_path("kvkeep")
    assert all(tmp_path in folder.parents for folder in folders)
    return folders


def test_a_server_keeps_its_sessions_in_the_data_folder(
    folders: tuple[Path, Path], tiny: list[str]
) -> None:
    data, cache = folders
    command = [sys.executable, "-m", "kvkeep", "serve", *tiny, "--port", "0", "--prefix-cache"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+", process.stdout.readline())
            assert match is not None
            httpx.post(f"{match[0]}/v1/sessions", json={"name": "a"})
            httpx.post(f"{match[0]}/v1/sessions/a/feed", json={"text": "The sea. " * 400})
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert [file.stem for file in (data / "server").rglob("*.kvkeep")] == ["a"]
    assert not list(cache.rglob("*.kvkeep"))
    assert (cache / "server" / "prefixes").is_dir()
    assert not (data / "server" / "prefixes").exists()


def test_the_sessions_of_a_server_move_out_of_the_cache_folder(
    folders: tuple[Path, Path],
) -> None:
    data, cache = folders
    owner = cache / "server" / "sessions" / "0"
    owner.mkdir(parents=True)
    (cache / "server" / "prefixes").mkdir()
    (owner / "a.kvkeep").write_bytes(b"cells")
    (cache / "server" / "secret").write_bytes(b"secret")
    with SessionFolder(owner).lock("a"), pytest.raises(Locked):
        default_server_folder()
    assert (owner / "a.kvkeep").exists()
    assert default_server_folder() == data / "server"
    assert (data / "server" / "sessions" / "0" / "a.kvkeep").read_bytes() == b"cells"
    assert (data / "server" / "secret").read_bytes() == b"secret"
    assert [path.name for path in (cache / "server").iterdir()] == ["prefixes"]
    owner.mkdir(parents=True)
    assert default_server_folder() == data / "server"
    assert owner.exists(), "newer sessions are not replaced"


def test_sessions_that_cannot_be_moved_are_named(folders: tuple[Path, Path]) -> None:
    data, cache = folders
    (cache / "server" / "sessions").mkdir(parents=True)
    data.parent.mkdir(parents=True)
    data.write_bytes(b"no folder")
    with pytest.raises(StoreError, match=f"--store {cache / 'server'}"):
        default_server_folder()


def test_bases_are_in_the_data_folder(folders: tuple[Path, Path], tiny_folder: Path) -> None:
    """Those of older versions are found in the cache folder."""
    data, cache = folders
    model = load_model(str(tiny_folder), dtype="float32")
    basis = random_basis(model)
    path = add_basis(basis)
    assert path.parent == data / "bases"
    (cache / "bases").mkdir(parents=True)
    path.rename(cache / "bases" / path.name)
    assert find_basis(basis.digest).digest == basis.digest
    assert newest_basis(model.fingerprint.to_dict()).digest == basis.digest


def test_a_calibration_of_an_older_version_is_found(
    folders: tuple[Path, Path], invoke, tiny: list[str], tiny_folder: Path
) -> None:
    data, cache = folders
    text = "The sea is wide and the boat is small. " * 200
    assert invoke("calibrate", "-", *tiny, input=text).exit_code == 0
    (cache / "calibrations").parent.mkdir(parents=True, exist_ok=True)
    (data / "calibrations").rename(cache / "calibrations")
    assert load_model(str(tiny_folder), dtype="float32").calibration is not None
    (row,) = (
        row for row in json.loads(invoke("disk", "--json").stdout) if row["kind"] == "calibrations"
    )
    (file,) = (cache / "calibrations").iterdir()
    assert row["bytes"] == file.stat().st_size
