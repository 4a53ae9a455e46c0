"""Every kind of object store has the same behaviour and raises the same errors."""

import io
import itertools
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from object_server import FAULTS, ObjectServer
from obstore.store import from_url

from kvkeep.errors import Conflict, InvalidArgument, NoObject, StoreError
from kvkeep.storage.objects import ObjectStore, open_object_store
from kvkeep.storage.objects.folder import FolderObjectStore
from kvkeep.storage.objects.paths import ObjectPath, as_path, open_object
from kvkeep.storage.objects.remote import CLIENT_OPTIONS


def test_get_returns_the_content_and_tag_of_the_last_put(objects: ObjectStore) -> None:
    tag = objects.put("a/b.txt", b"one")
    assert objects.get("a/b.txt") == (b"one", tag)
    assert objects.info("a/b.txt").st_size == 3
    assert objects.info("a/b.txt").etag == tag
    other = objects.put("a/b.txt", b"two")
    assert other != tag
    assert objects.get("a/b.txt") == (b"two", other)


def test_conditional_puts_raise_conflict(objects: ObjectStore) -> None:
    first = objects.put("head", b"1", if_absent=True)
    with pytest.raises(Conflict):
        objects.put("head", b"2", if_absent=True)
    second = objects.put("head", b"2", if_match=first)
    with pytest.raises(Conflict):
        objects.put("head", b"3", if_match=first)
    with pytest.raises(Conflict):
        objects.put("none", b"3", if_match=second)
    assert objects.get("head") == (b"2", second)


def test_one_of_many_concurrent_conditional_puts_wins(objects: ObjectStore) -> None:
    tag = objects.put("head", b"0")

    def put_if_unchanged(number: int) -> bool:
        try:
            objects.put("head", b"%d" % number, if_match=tag)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(put_if_unchanged, range(1, 33)))
    assert sum(won) == 1
    assert objects.get("head")[0] == b"%d" % (won.index(True) + 1)


def test_objects_are_listed_by_prefix(objects: ObjectStore) -> None:
    assert list(objects.list_objects("")) == []
    for key in ("a/1", "a/2", "a/deep/3", "b/4"):
        objects.put(key, key.encode())
    assert {stored.key: stored.st_size for stored in objects.list_objects("a/")} == {
        "a/1": 3,
        "a/2": 3,
        "a/deep/3": 8,
    }
    assert {stored.key for stored in objects.list_objects("")} == {"a/1", "a/2", "a/deep/3", "b/4"}
    assert list(objects.list_objects("none/")) == []
    objects.delete("a/1")
    objects.delete("a/1")
    assert {stored.key for stored in objects.list_objects("a/")} == {"a/2", "a/deep/3"}


def test_objects_of_other_software_are_not_listed(tmp_path: Path, s3_url: str) -> None:
    folder, remote = open_object_store(tmp_path), open_object_store(s3_url)
    names = ("a/copy (1).kvkeep", "a/b~", "a/new folder/b")
    for store in (folder, remote):
        store.put("a/b", b"1")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        obstore.put(from_url(s3_url, client_options=CLIENT_OPTIONS), name, b"x")
    os.mkfifo(tmp_path / "a" / "pipe")
    for store in (folder, remote):
        assert [info.key for info in store.list_objects("")] == ["a/b"]
    assert all((tmp_path / name).exists() for name in names)


def test_unfinished_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    store = open_object_store(tmp_path)
    for key in ("a/1", "a/2", "b/1"):
        store.put(key, b"1")
    left = [tmp_path / folder / ".kvkeep-writing-0123456789abcdef" for folder in "ab"]
    for path in left:
        path.write_bytes(b"private")
    store.delete("a/1")
    assert [path.exists() for path in left] == [False, True]
    assert store.sweep_unfinished("") == [str(left[1].relative_to(tmp_path))]
    assert not left[1].exists()
    assert {info.key for info in store.list_objects("")} == {"a/2", "b/1"}


def test_reading_a_folder_creates_nothing(tmp_path: Path) -> None:
    store = open_object_store(tmp_path / "mistyped" / "folder")
    assert list(store.list_objects("")) == []
    assert store.sweep_unfinished("") == []
    store.delete("a")
    with pytest.raises(NoObject):
        store.get("a")
    assert not ObjectPath(store, "a").exists()
    assert list(tmp_path.iterdir()) == []
    store.put("a", b"1", if_absent=True)
    assert store.get("a")[0] == b"1"


def test_a_missing_object_raises_no_object(objects: ObjectStore) -> None:
    for read in (objects.get, objects.info):
        with pytest.raises(NoObject, match="none/at/all"):
            read("none/at/all")


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/.hidden", "a b", "a/", "é"])
def test_an_invalid_key_is_refused(objects: ObjectStore, key: str) -> None:
    with pytest.raises(InvalidArgument):
        objects.put(key, b"")


def test_a_large_object_is_written_in_chunks_and_read_by_ranges(objects: ObjectStore) -> None:
    content = os.urandom(21_000_001)
    calls = []

    def chunks() -> list[bytes]:
        calls.append(True)
        return [content[at : at + 1_000_000] for at in range(0, len(content), 1_000_000)]

    objects.put_chunks("large", chunks)
    assert calls
    stored = objects.info("large")
    assert stored.st_size == len(content)
    assert bytes(objects.get_range(stored, 5_000_000, 5_000_010)) == content[5_000_000:5_000_010]
    with open_object(objects, stored) as file:
        assert file.read(8) == content[:8]
        assert file.seek(-10, io.SEEK_END) == len(content) - 10
        assert file.read() == content[-10:]
        file.seek(0)
        assert file.read(20_000_000) == content[:20_000_000]
        assert file.read() == content[20_000_000:]


def test_a_range_of_a_replaced_object_raises_conflict(objects: ObjectStore) -> None:
    objects.put_chunks("a", lambda: [b"x" * 20_000_000])
    stored = objects.info("a")
    objects.put_chunks("a", lambda: [b"y" * 20_000_001])
    with pytest.raises(Conflict):
        objects.get_range(stored, 0, 10)


def test_store_urls_and_object_paths(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="s3://bucket"):
        open_object_store("ftp://somewhere")
    with pytest.raises(InvalidArgument, match="three slashes"):
        open_object_store("file://host/folder")
    assert open_object_store(tmp_path).url == tmp_path.as_uri()
    assert open_object_store(open_object_store(tmp_path).url).url == tmp_path.as_uri()
    with pytest.raises(InvalidArgument, match="is a store"):
        as_path("s3://bucket")
    path = as_path("memory://urls/a/b.kvkeep")
    assert isinstance(path, ObjectPath)
    assert (path.stem, path.key, str(path)) == ("b", "b.kvkeep", "memory://urls/a/b.kvkeep")
    assert not path.exists()
    assert as_path(str(tmp_path)) == tmp_path


def test_a_folder_that_cannot_be_created_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be a store"):
        open_object_store(tmp_path / "file" / "below")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_retried_or_raised(s3: ObjectServer, s3_url: str, fault: str) -> None:
    """A fifth of all requests fail. Every confirmed object is stored and intact."""
    objects, random_faults = open_object_store(s3_url), random.Random(1)
    s3.fault = lambda method, path: fault if random_faults.random() < 0.2 else None
    content, confirmed = os.urandom(100_000), []
    for number in range(12):
        try:
            objects.put_chunks(f"{number}", lambda: [content])
            confirmed.append(number)
        except StoreError:
            continue
    assert len(confirmed) >= 8
    intact = 0
    for number in confirmed:
        try:
            intact += objects.get(f"{number}")[0] == content
        except StoreError:
            assert fault in ("409", "412")  # which real stores do not return for a GET
    assert intact >= len(confirmed) // 2
    s3.fault = lambda method, path: None
    assert all(objects.get(f"{number}")[0] == content for number in confirmed)


@pytest.mark.parametrize("size", [1, 10_000])  # of parts: ETags of large objects are no hashes
def test_what_is_read_has_the_etag_and_the_size_of_its_own_version(
    tmp_path: Path, size: int
) -> None:
    """Also while another writer replaces the object. Versions differ in their sizes."""
    objects, ended = FolderObjectStore(tmp_path), threading.Event()
    versions = {objects.put("a", bytes([n]) * size * (n + 10)): n for n in range(3)}

    def replace_often() -> None:
        for n in itertools.cycle(range(3)):
            versions[objects.put("a", bytes([n]) * size * (n + 10))] = n
            if ended.is_set():
                return

    with ThreadPoolExecutor(1) as writer:
        replacing = writer.submit(replace_often)
        read = [(*objects.get("a"), objects.info("a")) for _ in range(150)]
        ended.set()
        replacing.result()
    for content, etag, info in read:
        assert content == bytes([versions[etag]]) * size * (versions[etag] + 10)
        assert info.st_size == size * (versions[info.etag] + 10)
