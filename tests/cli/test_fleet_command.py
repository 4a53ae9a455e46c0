"""Errors of `kvkeep fleet` before any server is started."""

from pathlib import Path

import pytest
from cli.conftest import Invoke

from kvkeep.errors import Conflict, StoreError
from kvkeep.fleet.config import ReplicaConfig
from kvkeep.fleet.replica import require_conditional_writes
from kvkeep.server.keys import ApiKeys
from kvkeep.storage.objects import ObjectStore, open_object_store


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Missing option '--store'"),
        (["--store", "folder"], "must be a URL"),
        (["--store", "memory://here"], "for one process"),
        (["--store", "ftp://there"], "s3://bucket/prefix"),
        (["--store", "file:///tmp/x", "--replicas", "none"], "or a range"),
        (["--store", "file:///tmp/x", "--replicas", "3-1"], "or a range"),
        (["--store", "file:///tmp/x", "--host", "0.0.0.0"], "--api-key-file"),
        (["--store", "file:///tmp/x", "--device", "cuda"], "kvkeep serve --device cuda"),
    ],
)
def test_invalid_options_are_refused(invoke: Invoke, options: list[str], said: str) -> None:
    result = invoke("fleet", *options)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("command", ["fleet", "serve"])
def test_api_keys_need_a_shared_secret(invoke: Invoke, tmp_path: Path, command: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef0123")
    store = (tmp_path / "store").as_uri()
    result = invoke(command, "--store", store, "--api-key-file", keys)
    assert result.exit_code == 2
    assert "openssl rand" in result.stderr


def test_a_server_reads_answers_in_the_format_that_is_given(tiny_folder: Path) -> None:
    config = ReplicaConfig(
        model=str(tiny_folder),
        dtype="float32",
        weight_format=None,
        output_format="mistral",
        store_url="memory://",
        secret=bytes(32),
        session_settings={},
        memory_bytes=1,
        share_prefixes=False,
        threads=1,
        lease_seconds=2.0,
        api_keys=ApiKeys(),
        hosts=(),
        origins=(),
        alias=None,
    )
    assert config.load().renderer.output_format.name == "mistral"


class _UnconditionalStore:
    """A store that ignores the conditions of conditional writes."""

    def __init__(self, objects: ObjectStore):
        self._objects = objects
        self.url = objects.url

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def put(self, key: str, content: bytes, **conditions: object) -> str:
        return self._objects.put(key, content)


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path) -> None:
    objects = open_object_store(tmp_path)
    require_conditional_writes(objects)
    with pytest.raises(StoreError, match="If-Match"):
        require_conditional_writes(_UnconditionalStore(objects))  # type: ignore[arg-type]
    assert not list(objects.list_objects(""))
    with pytest.raises(Conflict):
        objects.put("a", b"", if_match="none")
