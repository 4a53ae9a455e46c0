"""After a kill or a system error during a save, the file is the old one or the new one, whole."""

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
from small_models import small_model

from kvkeep.errors import StoreError
from kvkeep.storage.files import atomic
from kvkeep.storage.files.atomic import TEMPORARY_PREFIX
from kvkeep.storage.snapshots import container
from kvkeep.storage.snapshots.snapshot import Snapshot

MODEL = small_model()


@pytest.fixture(scope="module")
def snapshots() -> list[Snapshot]:
    """Two unrelated snapshots of about 1 and 1.5 MB. The second one has ragged cells."""
    snapshots_made = []
    for seed, count in ((0, 2000), (1, 4000)):
        draw = random.Random(seed)
        session = MODEL.session(policy="full")
        session.feed([draw.randrange(1, 256) for _ in range(count)])
        if seed:
            session.compress(1.5, "knorm", budget="heads")
        snapshots_made.append(session.snapshot())
    return snapshots_made


def saved_index(path: Path, snapshots: list[Snapshot]) -> int:
    """Return the index of the snapshot that the file equals bit for bit."""
    loaded = Snapshot.load(path)
    index = [len(snapshot.tokens) for snapshot in snapshots].index(len(loaded.tokens))
    assert torch.equal(loaded.tokens, snapshots[index].tokens)
    assert torch.equal(loaded.logits, snapshots[index].logits)
    for expected, actual in zip(snapshots[index].segments, loaded.segments, strict=True):
        assert torch.equal(
            expected.read(0, expected.length).keys, actual.read(0, actual.length).keys
        )
    return index


def temporary_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(TEMPORARY_PREFIX)]


def run_in_fork(work: Callable[[], None]) -> int:
    """Run `work` in a forked child, which has every import already. Returns the child's PID.

    The child exits here and never returns.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    finally:
        os._exit(1)


class FileThatKillsItsProcess:
    """A file that writes a number of bytes to disk and kills its process at the next byte."""

    def __init__(self, file: BinaryIO, remaining_bytes: int):
        self._file, self._remaining = file, remaining_bytes

    def write(self, data: bytes) -> int:
        piece = memoryview(data).cast("B")
        if len(piece) > self._remaining:
            self._file.write(piece[: self._remaining])
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self._remaining -= len(piece)
        return self._file.write(piece)

    def __enter__(self) -> "FileThatKillsItsProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def save_and_be_killed(snapshot: Snapshot, path: Path, after: int) -> None:
    """Save in a child that is killed once it has written `after` bytes."""

    def work() -> None:
        make = atomic._create_temporary_file

        def with_kill(place: Path) -> tuple[BinaryIO, Path]:
            file, temporary = make(place)
            return FileThatKillsItsProcess(file, after), temporary  # type: ignore[return-value]

        atomic._create_temporary_file = with_kill
        snapshot.save(path)

    _, status = os.waitpid(run_in_fork(work), 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def bytes_written(snapshot: Snapshot, path: Path) -> int:
    """Return the bytes that a save writes: the file, and its header again with the checksums."""
    size = snapshot.save(path)
    return size + 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("kills", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_a_save_killed_at_any_byte_leaves_the_old_file(
    tmp_path: Path, snapshots: list[Snapshot], kills: int
) -> None:
    """Kills are spread evenly from before the first byte to before the last one."""
    path = tmp_path / "a.kvkeep"
    written = [bytes_written(snapshot, path) for snapshot in snapshots]
    for index in range(kills):
        old, new = index % 2, 1 - index % 2
        snapshots[old].save(path)
        assert os.listdir(tmp_path) == ["a.kvkeep"], (
            "the temporary file of the last kill was removed"
        )
        save_and_be_killed(snapshots[new], path, after=index * (written[new] - 1) // (kills - 1))
        assert len(temporary_files(tmp_path)) == 1, "the kill came in the middle of a file"
        assert saved_index(path, snapshots) == old
    with pytest.raises(AssertionError):  # it writes exactly that many bytes, so it is not killed
        save_and_be_killed(snapshots[0], path, after=written[0])


def raise_os_error(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


class FullDisk:
    """A file on a disk with `room` free bytes."""

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
    """Make one system call of a save fail. Returns the system's error message."""
    room = {"write": 0, "write-in-the-middle": 500_000}
    if request.param == "fsync":
        monkeypatch.setattr(os, "fsync", raise_os_error(errno.EIO))
        return os.strerror(errno.EIO)
    if request.param == "rename":
        monkeypatch.setattr(os, "replace", raise_os_error(errno.EACCES))
        return os.strerror(errno.EACCES)
    if request.param == "open":
        monkeypatch.setattr(atomic, "_create_temporary_file", raise_os_error(errno.EROFS))
        return os.strerror(errno.EROFS)
    make, remaining_bytes = atomic._create_temporary_file, room[request.param]

    def on_full_disk(path: Path) -> tuple[BinaryIO, Path]:
        file, temporary = make(path)
        return FullDisk(file, remaining_bytes), temporary  # type: ignore[return-value]

    FullDisk.__enter__ = lambda self: self  # type: ignore[attr-defined]
    FullDisk.__exit__ = lambda self, *_: self._file.close()  # type: ignore[attr-defined]
    monkeypatch.setattr(atomic, "_create_temporary_file", on_full_disk)
    return os.strerror(errno.ENOSPC)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, snapshots: list[Snapshot], failure: str, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "a.kvkeep"
    path.write_bytes(b"")
    with pytest.MonkeyPatch.context() as unbroken:
        for module, name in ((os, "fsync"), (os, "replace"), (atomic, "_create_temporary_file")):
            unbroken.setattr(module, name, ORIGINALS[name])
        snapshots[0].save(path)
    with pytest.raises(StoreError, match=f"{failure}.*unchanged"):
        snapshots[1].save(path)
    assert saved_index(path, snapshots) == 0
    assert os.listdir(tmp_path) == ["a.kvkeep"]


ORIGINALS = {
    "fsync": os.fsync,
    "replace": os.replace,
    "_create_temporary_file": atomic._create_temporary_file,
}


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """Limit files to 1 MB, so that a larger write fails as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_file_beyond_the_size_limit_does_not_replace_the_old_one(
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


def test_a_failed_folder_sync_is_reported(
    tmp_path: Path, snapshots: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots[0].save(tmp_path / "a.kvkeep")
    monkeypatch.setattr(atomic, "fsync_folder", raise_os_error(errno.EIO))
    with pytest.raises(StoreError, match="was written, but may revert"):
        snapshots[1].save(tmp_path / "a.kvkeep")
    assert saved_index(tmp_path / "a.kvkeep", snapshots) == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_before_or_after_fsync_and_replace_leaves_a_whole_file(
    tmp_path: Path, snapshots: list[Snapshot], call: str, moment: str
) -> None:
    path = tmp_path / "a.kvkeep"
    snapshots[0].save(path)

    def work() -> None:
        real = getattr(os, call)

        def killing(*args: object) -> None:
            if moment == "after":
                real(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, call, killing)
        snapshots[1].save(path)

    _, status = os.waitpid(run_in_fork(work), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert saved_index(path, snapshots) == ((call, moment) == ("replace", "after"))
    snapshots[0].save(path)
    assert os.listdir(tmp_path) == ["a.kvkeep"]


def test_a_save_syncs_the_file_renames_it_and_syncs_the_folder(
    tmp_path: Path, snapshots: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):

        def recorded(*args: object, name: str = name) -> None:
            calls.append(name)
            ORIGINALS[name](*args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, recorded)
    snapshots[0].save(tmp_path / "a.kvkeep")
    assert calls == ["fsync", "replace", "fsync"]


def test_temporary_files_of_other_running_writers_are_not_removed(
    tmp_path: Path, snapshots: list[Snapshot]
) -> None:
    path, other = tmp_path / "a.kvkeep", tmp_path / "b.kvkeep"
    writing, saved = os.pipe(), os.pipe()

    def work() -> None:
        with atomic.atomic_writer(other) as file:
            file.write(b"of the other")
            os.write(writing[1], b"!")
            os.read(saved[0], 1)
        os._exit(0)

    child = run_in_fork(work)
    os.close(writing[1])
    assert os.read(writing[0], 1) == b"!"
    snapshots[0].save(path)
    assert len(temporary_files(tmp_path)) == 1
    os.write(saved[1], b"!")
    assert os.waitpid(child, 0)[1] == 0
    for end in (writing[0], *saved):
        os.close(end)
    assert other.read_bytes() == b"of the other"
    assert sorted(os.listdir(tmp_path)) == ["a.kvkeep", "b.kvkeep"]


def test_a_save_keeps_permissions_and_symbolic_links(
    tmp_path: Path, snapshots: list[Snapshot]
) -> None:
    private, link = tmp_path / "private.kvkeep", tmp_path / "link.kvkeep"
    snapshots[0].save(private)
    private.chmod(0o600)
    link.symlink_to(private)
    snapshots[1].save(link)
    assert link.is_symlink()
    assert saved_index(private, snapshots) == 1
    assert private.stat().st_mode & 0o777 == 0o600


def test_pipes_and_folders_are_not_replaced(tmp_path: Path, snapshots: list[Snapshot]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(StoreError, match="not a regular file"):
            snapshots[0].save(path)
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_replaced_during_a_load_is_read_whole(
    tmp_path: Path, snapshots: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file at the path is replaced after the header and before the tensors are read."""
    path, read = tmp_path / "a.kvkeep", container.read_header
    snapshots[0].save(path)

    def replaced_after(*args: object) -> object:
        header = read(*args)  # type: ignore[arg-type]
        snapshots[1].save(path)
        return header

    monkeypatch.setattr(container, "read_header", replaced_after)
    assert torch.equal(Snapshot.load(path).tokens, snapshots[0].tokens)
