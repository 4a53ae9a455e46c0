"""`kvkeep sessions show`: a session's text, and what of it is still remembered."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import click

from kvkeep.cli.completion import session_names
from kvkeep.cli.report import counted, megabytes
from kvkeep.cli.restore import UNREAD, checked_notes
from kvkeep.cli.sessions.verify import session_or_file
from kvkeep.cli.store import store_option
from kvkeep.cli.which_model import SAVED_MODEL, require_here
from kvkeep.errors import FingerprintMismatch
from kvkeep.storage.objects.paths import Source

if TYPE_CHECKING:
    from kvkeep import Snapshot
    from kvkeep.models.text.codec import TextCodec


@click.command()
@click.argument("name", metavar="NAME|FILE", shell_complete=session_names)
@SAVED_MODEL
@click.option(
    "--forgotten", is_flag=True, help="Show the text that is forgotten or compressed, too."
)
@store_option
def show(name: str, model: str | None, forgotten: bool) -> None:
    """Show what a session holds, and its text.

    Where tokens are forgotten or compressed, a mark in brackets says how many.
    """
    from kvkeep import Snapshot

    file = session_or_file(name)
    snapshot = Snapshot.load(file)
    for what, value in _facts(file, snapshot):
        click.echo(f"{what:<8} {value}")
    click.echo()
    text = _tokenizer(file, snapshot, model)
    gone = "compressed" if compressed_cells(snapshot) else "forgotten"
    decode: Callable[[Sequence[int]], str] = text.decode
    for remembered, ids in runs(snapshot):
        if remembered:
            sys.stdout.write(decode(ids))
        else:
            sys.stdout.write(_mark(len(ids), gone, decode(ids) if forgotten else None))
        decode = text.decode_inside
    click.echo()


def runs(snapshot: "Snapshot") -> Iterator[tuple[bool, list[int]]]:
    """All token ids in order, in runs that are remembered (True) or not (False)."""
    live = {serial for segment in snapshot.segments for serial in segment.serials()}
    tokens = zip(snapshot.serials.tolist(), snapshot.tokens.tolist(), strict=True)
    for remembered, run in groupby(tokens, lambda token: token[0] in live):
        yield remembered, [index for _, index in run]


def compressed_cells(snapshot: "Snapshot") -> int:
    return sum(segment.length for segment in snapshot.segments if segment.compressed)


def _facts(file: Source, snapshot: "Snapshot") -> Iterator[tuple[str, str]]:
    policy = snapshot.policy
    settings = ", ".join(f"{key} {value}" for key, value in policy.items() if key != "name")
    dtype = str(snapshot.layout.dtype).removeprefix("torch.")
    total = len(snapshot.tokens)
    yield "file", f"{file}, {megabytes(file.stat().st_size)}"
    yield "saved", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.created))
    yield "model", f"{snapshot.model}, {dtype}"
    yield "policy", f"{policy['name']}: {settings}"
    if bits := snapshot.bits.kv or snapshot.bits.far:
        yield "cells", f"in {bits} bits" + ("" if snapshot.bits.kv else ", but for the window's")
    compressed = compressed_cells(snapshot)
    others = f", the others compressed to {counted(compressed, 'cell')}" if compressed else ""
    yield "tokens", f"{total:,}, of which {snapshot.cells - compressed:,} are remembered{others}"
    if unread := checked_notes(file, snapshot).get(UNREAD):
        yield "unread", f"{counted(len(unread), 'token')} of a prompt that was interrupted"


def _tokenizer(file: Source, snapshot: "Snapshot", named: str | None) -> "TextCodec":
    from kvkeep.models.hub.source import resolve
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.storage.snapshots.fingerprint import is_tokenizer_of

    if named is None:
        require_here(snapshot.model, file)
    name = named or snapshot.model
    text = TextCodec.open(resolve(name, progress=True))
    if not is_tokenizer_of(snapshot.fingerprint, text.tokenizer):
        raise FingerprintMismatch(
            f"the text of {file} cannot be shown: the tokenizer of {name} is another one than when "
            "it was saved"
        )
    return text


def _mark(count: int, gone: str, text: str | None) -> str:
    what = f"{count:,} {gone} {'token' if count == 1 else 'tokens'}"
    mark = f"[... {what} ...]" if text is None else f"[{what}: {text}]"
    return click.style(mark, dim=True) if sys.stdout.isatty() else mark
