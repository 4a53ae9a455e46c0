"""`kvkeep sessions list`, `show` and `verify`."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.model_options import SAVED_MODEL_OPTION, require_local
from kvkeep.cli.options import JSON_OPTION, command, option
from kvkeep.cli.output import echo_json, echo_table, format_mb, plural, say, without_control
from kvkeep.cli.session_file import UNREAD_KEY, checked_notes
from kvkeep.cli.store import STORE_OPTION, complete_sessions, open_session_store
from kvkeep.errors import FingerprintMismatch, InvalidArgument, StoreError
from kvkeep.session.conversation import CHAT_NOTES_KEY
from kvkeep.storage.objects.paths import ReadablePath
from kvkeep.storage.snapshots.header import read_summary

if TYPE_CHECKING:
    from kvkeep import Snapshot
    from kvkeep.models.text.codec import TextCodec

_HEADER_FIELDS = ("model", "policy", "max_kv_size", "tokens", "cells", "rounded")


@command("list")
def list_(as_json: bool = JSON_OPTION, store: str | None = STORE_OPTION) -> None:
    """List sessions, newest first.

    Only the header of each file is read; `kvkeep sessions verify` checks whole files.
    """
    paths = open_session_store(store).newest_first()
    rows = [row for path in paths if (row := _session_row(path)) is not None]
    if as_json:
        echo_json(rows)
    elif not rows:
        say("no sessions; create one with --session NAME of generate or chat")
    else:
        titles = ("NAME", "SAVED", "SIZE", "TOKENS", "CELLS", "POLICY", "MODEL")
        echo_table([titles, *map(_table_row, rows)], right_aligned=range(1, 5))


def _session_row(path: ReadablePath) -> dict[str, Any] | None:
    """Return the entry of a session in `list`; None if it was removed meanwhile.

    If its header cannot be read, fields of the header are None, and "error" is the reason.
    """
    header, error = dict[str, Any].fromkeys(("kind", *_HEADER_FIELDS)), None
    try:
        file_status = path.stat()
        summary = read_summary(path)
    except FileNotFoundError:
        return None
    except StoreError as unreadable:
        if not path.exists():
            return None
        error = str(unreadable)
    else:
        header = {name: getattr(summary, name) for name in _HEADER_FIELDS}
        header = {"kind": "chat" if CHAT_NOTES_KEY in summary.notes else "text", **header}
    file_fields = {"name": path.stem, "bytes": file_status.st_size, "saved": file_status.st_mtime}
    return {**file_fields, **header, "error": error}


def _table_row(row: dict[str, Any]) -> tuple[str, ...]:
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["saved"]))
    file_cells = (row["name"], saved, format_mb(row["bytes"]))
    if row["error"] is not None:
        return (*file_cells, "-", "-", "-", f"({row['error']})")
    cells = f"{row['cells']:,} of {row['max_kv_size']:,}"
    rounded = f", rounded: {row['rounded']}" if row["rounded"] else ""
    return (*file_cells, f"{row['tokens']:,}", cells, row["policy"] + rounded, row["model"])


@command()
@click.argument("name", metavar="NAME|FILE", shell_complete=complete_sessions)
def show(
    name: str,
    model: str | None = SAVED_MODEL_OPTION,
    forgotten: bool = option(is_flag=True, help="Also show forgotten and compressed text."),
    store: str | None = STORE_OPTION,
) -> None:
    """Show a session's model, settings, cells and text.

    Forgotten or compressed tokens are shown as a count in brackets.
    """
    from kvkeep import Snapshot

    file = _session_or_file(name, store)
    snapshot = Snapshot.load(file)
    for label, value in _description(file, snapshot):
        click.echo(without_control(f"{label:<8} {value}"))
    click.echo()
    text_codec = _open_text_codec(file, snapshot, model)
    status = "compressed" if _compressed_cell_count(snapshot) else "forgotten"
    decode: Callable[[Sequence[int]], str] = text_codec.decode
    shown = without_control if sys.stdout.isatty() else str
    for is_remembered, ids in _token_runs(snapshot):
        if is_remembered:
            sys.stdout.write(shown(decode(ids)))
        else:
            sys.stdout.write(_gap_mark(len(ids), status, shown(decode(ids)) if forgotten else None))
        decode = text_codec.decode_continuation
    click.echo()


def _token_runs(snapshot: "Snapshot") -> Iterator[tuple[bool, list[int]]]:
    """Yield runs of token ids, and whether the cache holds them: a cell has its token's serial."""
    live_serials = {serial for segment in snapshot.segments for serial in segment.serials()}
    tokens = zip(snapshot.serials.tolist(), snapshot.tokens.tolist(), strict=True)
    for is_remembered, run in groupby(tokens, lambda token: token[0] in live_serials):
        yield is_remembered, [token_id for _, token_id in run]


def _compressed_cell_count(snapshot: "Snapshot") -> int:
    return sum(segment.length for segment in snapshot.segments if segment.compressed)


def _description(file: ReadablePath, snapshot: "Snapshot") -> Iterator[tuple[str, str]]:
    """Yield the label and text of each line about a session."""
    policy = snapshot.policy
    settings = ", ".join(f"{key} {value}" for key, value in policy.items() if key != "name")
    dtype = str(snapshot.layout.dtype).removeprefix("torch.")
    num_tokens = len(snapshot.tokens)
    yield "file", f"{file}, {format_mb(file.stat().st_size)}"
    yield "saved", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.created))
    yield "model", f"{snapshot.model}, {dtype}"
    yield "policy", f"{policy['name']}: {settings}"
    if bits := snapshot.bits.kv or snapshot.bits.far:
        yield "cells", f"in {bits} bits" + ("" if snapshot.bits.kv else ", except in the window")
    if snapshot.rounded:
        yield "rounded", f"by codec {snapshot.rounded}: it does not continue exactly"
    count = _compressed_cell_count(snapshot)
    compressed = f", the others compressed to {plural(count, 'cell')}" if count else ""
    yield "tokens", f"{num_tokens:,}, {snapshot.cells - count:,} of them in the cache{compressed}"
    if entries := snapshot.checkpoints.entries:
        places = ", ".join(f"{each.num_tokens:,}" for each in entries)
        yield "rewinds", f"from {plural(len(entries), 'checkpoint')}, after {places} tokens"
    if unread_ids := checked_notes(file, snapshot).get(UNREAD_KEY):
        yield "unread", f"{plural(len(unread_ids), 'token')} of an interrupted prompt"


def _open_text_codec(
    file: ReadablePath, snapshot: "Snapshot", model_name: str | None
) -> "TextCodec":
    """Open the tokenizer of the model that a snapshot names, or of `--model`."""
    from kvkeep.models.hub.names import split_prefix
    from kvkeep.models.hub.source import resolve
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.storage.snapshots.fingerprint import matches_tokenizer

    if model_name is None:
        require_local(snapshot.model, file)
    name = model_name or snapshot.model
    prefix, source = split_prefix(name)
    folder = resolve(source, progress=True, any_architecture=bool(prefix))
    text_codec = TextCodec.open(folder)
    if not matches_tokenizer(snapshot.fingerprint, text_codec.tokenizer):
        raise FingerprintMismatch(
            f"the text of {file} cannot be shown: the tokenizer of {name} has changed since it was "
            "saved"
        )
    return text_codec


def _gap_mark(count: int, status: str, text: str | None) -> str:
    """Return the mark shown in place of tokens that are not in the cache. text: shown in it."""
    tokens = f"{count:,} {status} {'token' if count == 1 else 'tokens'}"
    mark = f"[... {tokens} ...]" if text is None else f"[{tokens}: {text}]"
    return click.style(mark, dim=True) if sys.stdout.isatty() else mark


@command()
@click.argument("names", metavar="[NAME|FILE]...", nargs=-1, shell_complete=complete_sessions)
def verify(names: tuple[str, ...], store: str | None = STORE_OPTION) -> None:
    """Check every byte of sessions or snapshot files; without names, of all sessions.

    Prints OK or the damage for each, and exits with status 2 if any is damaged. Changes nothing.
    """
    from kvkeep import Snapshot

    files = [(name, _session_or_file(name, store)) for name in names]
    failures = 0
    for name, file in files or sorted(
        (path.stem, path) for path in open_session_store(store).newest_first()
    ):
        try:
            snapshot = Snapshot.load(file)
            size = file.stat().st_size
        except (StoreError, FileNotFoundError) as error:
            if not names and not file.exists():
                continue  # removed meanwhile
            failures += 1
            click.echo(without_control(f"BAD  {name}: {error}"))
        else:
            contents = plural(len(snapshot.tokens), "token")
            if entries := snapshot.checkpoints.entries:
                contents += f", {plural(len(entries), 'checkpoint')}"
            click.echo(f"OK   {name}: {contents}, {format_mb(size)}")
    if failures:
        raise click.exceptions.Exit(2)


def _session_or_file(name: str, store: str | None) -> ReadablePath:
    """Return a session's file, or else the file at that path."""
    path = Path(name)
    if "/" in name and not path.is_file():
        raise InvalidArgument(f"there is no file {name}")
    try:
        return open_session_store(store).existing_path(name)
    except InvalidArgument:
        if path.is_file():
            return path
        raise
