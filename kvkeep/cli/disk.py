"""`kvkeep disk`: the disk space that kvkeep takes, by kind of data."""

import json

import click

from kvkeep.cli.output import megabytes
from kvkeep.cli.store import session_folder
from kvkeep.models.hub.library import home
from kvkeep.storage.files.atomic import folder_bytes

# Folders in kvkeep's home: a description, and the command that frees space there.
_KINDS = {
    "models": ("models, in Hugging Face layout", "kvkeep models rm NAME"),
    "packed": ("their weights, packed", "kvkeep models rm NAME"),
    "unpacked": ("their weights, unpacked for bf16", "kvkeep models rm NAME"),
    "prefixes": ("evaluated beginnings of prompts", "kvkeep prefixes gc | clear"),
    "calibrations": ("what compression knows of models", ""),
    "server": ("sessions and prompts of `kvkeep serve`", ""),
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def disk(as_json: bool) -> None:
    """Say what kvkeep takes on disk, by kind, and what makes room."""
    folder = session_folder()
    sessions = sum(path.stat().st_size for path in folder.newest())
    rows = [("sessions", sessions, "saved sessions", "kvkeep sessions rm NAME", str(folder.place))]
    for kind, (what, remedy) in _KINDS.items():
        place = home() / kind
        rows.append((kind, folder_bytes(place), what, remedy, str(place)))
    other = folder_bytes(home()) - sum(folder_bytes(home() / kind) for kind in _KINDS)
    if folder.place.is_relative_to(home()):
        other -= folder_bytes(folder.place)
    rows.append(("other", max(0, other), "locks and the like", "", str(home())))
    if as_json:
        names = ("kind", "bytes", "what", "remedy", "place")
        click.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    for kind, size, what, remedy, _ in rows:
        click.echo(f"{kind:<12}  {megabytes(size):>10}  {what:<39}  {remedy}".rstrip())
    click.echo(f"{'all':<12}  {megabytes(sum(row[1] for row in rows)):>10}  in {home()}")
