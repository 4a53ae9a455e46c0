"""`kvkeep sessions list`."""

import json
import time
from dataclasses import asdict, dataclass

import click

from kvkeep.cli.report import megabytes
from kvkeep.cli.stderr import say
from kvkeep.cli.store import saved_sessions, store_option
from kvkeep.errors import StoreError
from kvkeep.session.conversation import CHAT
from kvkeep.storage.objects.paths import Source
from kvkeep.storage.snapshots.header import read_summary


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@store_option
def list_(as_json: bool) -> None:
    """List sessions, the one saved last first.

    Only the beginning of each file is read; `kvkeep sessions verify` reads them whole.
    """
    rows = [row for path in saved_sessions().newest() if (row := _row(path)) is not None]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return
    if not rows:
        say("no sessions; --session NAME of generate and chat begins one")
        return
    table = [("NAME", "SAVED", "SIZE", "TOKENS", "CELLS", "POLICY", "MODEL"), *map(_shown, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(6)]
    for name, *numbers, policy, model in table:
        middle = "  ".join(f"{n:>{w}}" for n, w in zip(numbers, widths[1:5], strict=True))
        click.echo(f"{name:<{widths[0]}}  {middle}  {policy:<{widths[5]}}  {model}")


@dataclass(frozen=True)
class _Row:
    """saved: seconds since 1970. error: why the rest is not known, where it is not."""

    name: str
    bytes: int
    saved: float
    kind: str | None = None
    model: str | None = None
    policy: str | None = None
    max_kv_size: int | None = None
    tokens: int | None = None
    cells: int | None = None
    error: str | None = None


def _row(path: Source) -> _Row | None:
    """None for a session that somebody removes meanwhile."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    try:
        found = read_summary(path)
        return _Row(
            path.stem,
            status.st_size,
            status.st_mtime,
            "chat" if CHAT in found.notes else "text",
            found.model,
            found.policy,
            found.max_kv_size,
            found.tokens,
            found.cells,
        )
    except StoreError as error:
        if not path.exists():
            return None
        why = str(error)
    return _Row(path.stem, status.st_size, status.st_mtime, error=why)


def _shown(row: _Row) -> tuple[str, ...]:
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.saved))
    if row.error is not None:
        return (row.name, saved, megabytes(row.bytes), "-", "-", "-", f"({row.error})")
    return (
        row.name,
        saved,
        megabytes(row.bytes),
        f"{row.tokens:,}",
        f"{row.cells:,} of {row.max_kv_size:,}",
        str(row.policy),
        str(row.model),
    )
