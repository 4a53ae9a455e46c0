"""Killed, or failed by the system, while saving: the file is the old one or the new one."""

import errno
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from small import small_model

from kvkeep.errors import StoreError
from kvkeep.storage.files import atomic
from kvkeep.storage.files.atomic import TEMPORARY
from kvkeep.storage.snapshots import container
from kvkeep.storage.snapshots.snapshot import Snapshot

MODEL = small_model()


@pytest.fixture(scope="module")
def two() -> list[Snapshot]:
    """Two snapshots of about 1 and 1.5 MB that have nothing in common: the second one's cells are
    ragged.
    """
    found = []
    for seed, count in ((0, 2000), (1, 4000)):
        draw = random.Random(seed)
        session = MODEL.session(policy="full")
        session.feed([draw.randrange(1, 256) for _ in range(count)])
        if seed:
            session.compress(1.5, "knorm", budget="heads")
        found.append(session.snapshot())
    return found


def which(path: Path, two: list[Snapshot]) -> int:
    """Which of the snapshots the file is, to the bit."""
    loaded = Snapshot.load(path)
    index = [len(each.tokens) for each in two].index(len(loaded.tokens))
    assert torch.equal(loaded.tokens, two[index].tokens)
    assert torch.equal(loaded.logits, two[index].logits)
    for mine, theirs in zip(two[index].segments, loaded.segments, strict=True):
        assert torch.equal(mine.read(0, mine.length).keys, theirs.read(0, theirs.length).keys)
    return index


def strays(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(TEMPORARY)]


def in_a_child(work: Callable[[], None]) -> int:
    """Forks: the child is warm at once. It never returns from here."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(1)


class KillsItself:
    """A file that takes so many bytes to the disk; with the next one its process is killed."""

    def __init__(self, file: BinaryIO, left: int):
        self._file, self._left = file, left

    def write(self, data: bytes) -> int:
        piece = memoryview(data).cast("B")
        if len(piece) > self._left:
            self._file.write(piece[: self._left])
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= len(piece)
        return self._file.write(piece)

    def __enter__(self) -> "KillsItself":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def killed_while_saving(snapshot: Snapshot, path: Path, after: int) -> None:
    """after: bytes of what the process writes; it is killed before the next one."""

    def work() -> None:
        make = atomic._temporary

        def failing(place: Path) -> tuple[BinaryIO, Path]:
            file, temporary = make(place)
            return KillsItself(file, after), temporary  # type: ignore[return-value]

        atomic._temporary = failing
        snapshot.save(path)

    _, status = os.waitpid(in_a_child(work), 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def bytes_written(snapshot: Snapshot, path: Path) -> int:
    """By saving it: the file, and its header once more when the checksums are known."""
    size = snapshot.save(path)
    return size + 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("kills", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_a_saving_process_killed_anywhere_leaves_the_file_that_was_there(
    tmp_path: Path, two: list[Snapshot], kills: int
) -> None:
    """Before its first byte, before its last one, and everywhere between."""
    path = tmp_path / "a.kvkeep"
    written = [bytes_written(each, path) for each in two]
    for index in range(kills):
        old, new = index % 2, 1 - index % 2
        two[old].save(path)
        assert os.listdir(tmp_path) == ["a.kvkeep"], "what the last one left is swept away"
        killed_while_saving(two[new], path, after=index * (written[new] - 1) // (kills - 1))
        assert len(strays(tmp_path)) == 1, "it was killed in the middle of a file"
        assert which(path, two) == old
    with pytest.raises(AssertionError):  # as many bytes as it writes: it was not killed
        killed_while_saving(two[0], path, after=written[0])


def raising(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


class FullDisk:
    """A file that takes `room` bytes, then no more."""

    def __init__(self, file: BinaryIO, room: int):
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


@pytest.fixture(params=["fsync", "rename", "open", "write", "write-in-the-middle"])
def failure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lets one thing that the system does for a save fail; returns what it then says."""
    room = {"write": 0, "write-in-the-middle": 500_000}
    if request.param == "fsync":
        monkeypatch.setattr(os, "fsync", raising(errno.EIO))
        return os.strerror(errno.EIO)
    if request.param == "rename":
        monkeypatch.setattr(os, "replace", raising(errno.EACCES))
        return os.strerror(errno.EACCES)
    if request.param == "open":
        monkeypatch.setattr(atomic, "_temporary", raising(errno.EROFS))
        return os.strerror(errno.EROFS)
    make, left = atomic._temporary, room[request.param]

    def full(path: Path) -> tuple[BinaryIO, Path]:
        file, temporary = make(path)
        return FullDisk(file, left), temporary  # type: ignore[return-value]

    FullDisk.__enter__ = lambda self: self  # type: ignore[attr-defined]
    FullDisk.__exit__ = lambda self, *_: self._file.close()  # type: ignore[attr-defined]
    monkeypatch.setattr(atomic, "_temporary", full)
    return os.strerror(errno.ENOSPC)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, two: list[Snapshot], failure: str, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "a.kvkeep"
    path.write_bytes(b"")
    with pytest.MonkeyPatch.context() as unbroken:
        for module, name in ((os, "fsync"), (os, "replace"), (atomic, "_temporary")):
            unbroken.setattr(module, name, ORIGINALS[name])
        two[0].save(path)
    with pytest.raises(StoreError, match=f"{failure}.*unchanged"):
        two[1].save(path)
    assert which(path, two) == 0
    assert os.listdir(tmp_path) == ["a.kvkeep"]


ORIGINALS = {"fsync": os.fsync, "replace": os.replace, "_temporary": atomic._temporary}


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """As on a disk that is full: the system refuses to let a file grow beyond 1 MB."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_the_system_cuts_off_does_not_take_the_old_ones_place(
    tmp_path: Path, small_files_only: None
) -> None:
    path, session = tmp_path / "a.kvkeep", MODEL.session(policy="full")
    session.feed([1] * 100)
    session.snapshot().save(path)
    before = path.read_bytes()
    session.feed([2] * 3900)
    with pytest.raises(StoreError, match=r"File too large.*unchanged"):
        session.snapshot().save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.kvkeep"]


def test_a_folder_that_cannot_be_put_on_disk_is_told(
    tmp_path: Path, two: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    two[0].save(tmp_path / "a.kvkeep")
    monkeypatch.setattr(atomic, "fsync_folder", raising(errno.EIO))
    with pytest.raises(StoreError, match="was written, but may be the old one again"):
        two[1].save(tmp_path / "a.kvkeep")
    assert which(tmp_path / "a.kvkeep", two) == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_beside_each_call_that_matters(
    tmp_path: Path, two: list[Snapshot], call: str, moment: str
) -> None:
    path = tmp_path / "a.kvkeep"
    two[0].save(path)

    def work() -> None:
        real = getattr(os, call)

        def killing(*args: object) -> None:
            if moment == "after":
                real(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, call, killing)
        two[1].save(path)

    _, status = os.waitpid(in_a_child(work), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert which(path, two) == ((call, moment) == ("replace", "after"))
    two[0].save(path)
    assert os.listdir(tmp_path) == ["a.kvkeep"]


def test_the_order_is_write_sync_rename_sync(
    tmp_path: Path, two: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):

        def noted(*args: object, name: str = name) -> None:
            done.append(name)
            ORIGINALS[name](*args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, noted)
    two[0].save(tmp_path / "a.kvkeep")
    assert done == ["fsync", "replace", "fsync"]


def test_what_another_process_is_writing_is_not_swept_away(
    tmp_path: Path, two: list[Snapshot]
) -> None:
    path, other = tmp_path / "a.kvkeep", tmp_path / "b.kvkeep"
    writing, saved = os.pipe(), os.pipe()

    def work() -> None:
        with atomic.atomic_writer(other) as file:
            file.write(b"of the other")
            os.write(writing[1], b"!")
            os.read(saved[0], 1)
        os._exit(0)

    child = in_a_child(work)
    os.close(writing[1])
    assert os.read(writing[0], 1) == b"!"
    two[0].save(path)
    assert len(strays(tmp_path)) == 1
    os.write(saved[1], b"!")
    assert os.waitpid(child, 0)[1] == 0
    for end in (writing[0], *saved):
        os.close(end)
    assert other.read_bytes() == b"of the other"
    assert sorted(os.listdir(tmp_path)) == ["a.kvkeep", "b.kvkeep"]


def test_permissions_and_links_stay(tmp_path: Path, two: list[Snapshot]) -> None:
    private, link = tmp_path / "private.kvkeep", tmp_path / "link.kvkeep"
    two[0].save(private)
    private.chmod(0o600)
    link.symlink_to(private)
    two[1].save(link)
    assert link.is_symlink()
    assert which(private, two) == 1
    assert private.stat().st_mode & 0o777 == 0o600


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, two: list[Snapshot]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(StoreError, match="not a regular file"):
            two[0].save(path)
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_replaced_while_it_is_read_is_read_whole(
    tmp_path: Path, two: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the header and the tensors, the file at the path becomes another one."""
    path, read = tmp_path / "a.kvkeep", container.read_header
    two[0].save(path)

    def replaced_after(*args: object) -> object:
        header = read(*args)  # type: ignore[arg-type]
        two[1].save(path)
        return header

    monkeypatch.setattr(container, "read_header", replaced_after)
    assert torch.equal(Snapshot.load(path).tokens, two[0].tokens)
