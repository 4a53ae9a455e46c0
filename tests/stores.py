"""Fixtures of object stores: a folder, memory and S3."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import BUCKET, ObjectServer, object_server

from kvkeep.storage.objects import ObjectStore, open_object_store

KINDS = ("folder", "memory", "s3")


@pytest.fixture(scope="session")
def _s3() -> Iterator[ObjectServer]:
    with object_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def s3(_s3: ObjectServer) -> Iterator[ObjectServer]:
    """An S3 server without injected faults."""
    yield _s3
    _s3.fault = lambda method, path: None
    _s3.seen.clear()


@pytest.fixture
def s3_url(s3: ObjectServer) -> str:
    """The URL of an empty prefix."""
    return f"s3://{BUCKET}/{secrets.token_hex(6)}"


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store; parametrised over every kind."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    if request.param == "memory":
        return f"memory://{secrets.token_hex(6)}"
    return (tmp_path / "store").as_uri()


@pytest.fixture
def objects(store_url: str) -> ObjectStore:
    return open_object_store(store_url)
