"""Stores of objects, one of each kind, for all tests of what is kept in them."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import BUCKET, ObjectServer, object_server

from kvkeep.storage.objects import ObjectStore, open_object_store

KINDS = ("folder", "memory", "s3")


@pytest.fixture(scope="session")
def _s3() -> Iterator[ObjectServer]:
    with object_server() as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture
def s3(_s3: ObjectServer) -> Iterator[ObjectServer]:
    """A server with nothing that goes wrong yet."""
    yield _s3
    _s3.fault = lambda method, path: None
    _s3.seen.clear()


@pytest.fixture
def s3_url(s3: ObjectServer) -> str:
    """Of a place in it that is empty."""
    return f"s3://{BUCKET}/{secrets.token_hex(6)}"


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty store of each kind in turn."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    if request.param == "memory":
        return f"memory://{secrets.token_hex(6)}"
    return (tmp_path / "store").as_uri()


@pytest.fixture
def objects(store_url: str) -> ObjectStore:
    return open_object_store(store_url)
