"""`kvkeep sessions fork`, `rm`, `export`, `import` and `gc`."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import click

from kvkeep.cli.memory import CODEC_HELP, CODEC_NAMES
from kvkeep.cli.model_options import SAVED_MODEL_OPTION, load_by_name
from kvkeep.cli.options import choice_option, command, file_option, integer_option, option
from kvkeep.cli.output import format_mb, plural
from kvkeep.cli.session_file import FIRST_PROMPT_KEY, UNREAD_KEY, checked_notes, dtype_name, restore
from kvkeep.cli.store import STORE_OPTION, complete_sessions, open_session_store
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.models.hub.library import home
from kvkeep.storage.files.atomic import atomic_writer, sweep_temporary_files
from kvkeep.storage.objects import is_url, open_object_store
from kvkeep.storage.objects.paths import ReadablePath
from kvkeep.storage.snapshots.header import check_output_path, read_file

if TYPE_CHECKING:
    from kvkeep import Snapshot
    from kvkeep.storage.sessions.shared import SessionPath
    from kvkeep.storage.snapshots.codec import Codec

_CHUNK_BYTES = 1 << 20


@command()
@click.argument("source", metavar="NAME")
@click.argument("target", metavar="NEW")
def fork(
    source: str,
    target: str,
    at: int | None = integer_option(
        minimum=0,
        help="Copy only the first N tokens; the cell of the last of them must still be held.",
    ),
    calibration: Path | None = file_option(
        exists=True, help="With --at: the calibration that the session was created with."
    ),
    model: str | None = SAVED_MODEL_OPTION,
    store: str | None = STORE_OPTION,
) -> None:
    """Copy a session under another name."""
    from kvkeep import Snapshot

    sessions = open_session_store(store)
    file = sessions.existing_path(source)
    with sessions.lock(target) as target_file:
        _require_unused(target_file, target)

        def read_or_copy(opened: BinaryIO) -> Snapshot:
            snapshot = Snapshot.read(opened, file)
            if at is None or at == len(snapshot.tokens):
                _copy_session(opened, target_file, snapshot)
            return snapshot

        snapshot = read_file(file, read_or_copy)
        total = len(snapshot.tokens)
        if at is not None and at > total:
            raise InvalidArgument(f"--at must be 0 to {total}, the length of {source}; found {at}")
        if at is not None and at < total:
            notes, dtype = checked_notes(file, snapshot), dtype_name(snapshot.layout.dtype)
            load = partial(load_by_name, dtype=dtype, device="cpu", weights=None, progress=False)
            _, session = restore(file, source, snapshot, model, calibration, load)
            session.rewind(total - at)
            copy = replace(session.snapshot(), notes=_notes_at(notes, at))
            copy.save_by(target_file, cast("Codec", snapshot.codec))
        tokens = plural(total if at is None else at, "token")
        click.echo(f"{target} has the first {tokens} of {source}, {_size_text(target_file)}")


def _notes_at(notes: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return the notes of a copy, as they were after `num_tokens` tokens."""
    from kvkeep.engine.session_files import notes_of_copy

    remaining_notes = notes_of_copy(notes)
    remaining_notes.pop(UNREAD_KEY, None)
    if remaining_notes.get(FIRST_PROMPT_KEY, 0) > num_tokens:
        del remaining_notes[FIRST_PROMPT_KEY]
    return remaining_notes


@command()
@click.argument("name", metavar="NAME", shell_complete=complete_sessions)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
def export(
    name: str,
    file: Path,
    codec: "Codec | None" = choice_option(CODEC_NAMES, CODEC_HELP, show_default="as it is"),
    force: bool = option(is_flag=True, help="Replace an existing snapshot file."),
    store: str | None = STORE_OPTION,
) -> None:
    """Write a session to a file, to import on another machine."""
    source = open_session_store(store).existing_path(name)
    check_output_path(file, "snapshot")
    if file.exists() and file.stat().st_size and not force:
        raise InvalidArgument(f"{file} exists; --force replaces it")
    from kvkeep import Snapshot

    file = file.resolve()

    def write(opened: BinaryIO) -> None:
        snapshot = Snapshot.read(opened, source)
        if codec is None:
            _copy(opened, file)
        else:
            snapshot.save(file, codec)

    read_file(source, write)
    click.echo(f"{name} written to {file}, {_size_text(file)}")


@command("import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("name", metavar="NAME", shell_complete=complete_sessions)
def import_(
    file: Path,
    name: str,
    force: bool = option(is_flag=True, help="Replace an existing session of this name."),
    store: str | None = STORE_OPTION,
) -> None:
    """Create a session from a file that `export` or `generate --cache-prompt` wrote.

    The file's checksums are verified first.
    """
    with open_session_store(store).lock(name) as target_file:
        if not force:
            _require_unused(target_file, name)
        from kvkeep import Snapshot

        def copy(opened: BinaryIO) -> Snapshot:
            snapshot = Snapshot.read(opened, file)
            _copy_session(opened, target_file, snapshot)
            return snapshot

        snapshot = read_file(file, copy)
        tokens = plural(len(snapshot.tokens), "token")
        click.echo(f"{name} has {tokens}, {_size_text(target_file)}")


def _copy_session(source: BinaryIO, target: "Path | SessionPath", snapshot: "Snapshot") -> None:
    """Copy a session's file, without the name and revision that an engine noted in it.

    source: the open file that the snapshot was read from.
    """
    from kvkeep.engine.session_files import notes_of_same_text

    notes = notes_of_same_text(snapshot.notes)
    if notes != snapshot.notes:
        copy = replace(snapshot, notes=notes)
        copy.save_by(target, cast("Codec", snapshot.codec))
    else:
        _copy(source, target)


def _copy(source: BinaryIO, target: "Path | SessionPath") -> None:
    """Copy a snapshot atomically. Raises StoreError."""
    if not isinstance(target, Path):
        target.write_chunks(lambda: _chunks(source))
        return
    try:
        with atomic_writer(target) as file:
            file.writelines(_chunks(source))
    except OSError as error:
        raise StoreError(
            f"{target} could not be written ({error.strerror or error}); an earlier session of "
            "this name is unchanged"
        ) from error


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield all of an open file."""
    file.seek(0)
    yield from iter(partial(file.read, _CHUNK_BYTES), b"")


def _require_unused(target_file: ReadablePath, name: str) -> None:
    if target_file.exists():
        raise InvalidArgument(
            f"session {name!r} already exists; use another name, or remove it with `kvkeep "
            f"sessions rm {name}`"
        )


def _size_text(file: ReadablePath) -> str:
    return format_mb(file.stat().st_size)


@command()
@click.argument(
    "names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_sessions
)
def rm(names: tuple[str, ...], store: str | None = STORE_OPTION) -> None:
    """Remove sessions."""
    sessions = open_session_store(store)
    for name in names:
        sessions.existing_path(name)  # an unknown name raises before any is removed
    for name in dict.fromkeys(names):
        click.echo(f"removed {name}, {format_mb(sessions.remove(name))}")


@command()
def gc(store: str | None = STORE_OPTION) -> None:
    """Remove files that killed processes left behind; no session is removed.

    These are partly written files of sessions and of the prefix cache, and locks of removed
    sessions. In an object store, also unreferenced snapshots, of all owners.
    """
    prefixes = home() / "prefixes"
    if store is not None and is_url(store):
        from kvkeep.storage.sessions.shared import sweep_all

        removed = list[object](sweep_all(open_object_store(store)))
    else:
        removed = list[object](open_session_store(store).sweep())
    if prefixes.is_dir():
        removed += sweep_temporary_files(prefixes)
    for file in removed:
        click.echo(f"removed {file}")
    click.echo(f"{plural(len(removed), 'file')} removed")
