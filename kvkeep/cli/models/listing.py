"""What models are on this machine, and which have a name."""

import json
from dataclasses import dataclass

import click

from kvkeep.cli.report import megabytes


def list_models(as_json: bool) -> None:
    rows = _rows()
    if as_json:
        click.echo(json.dumps([vars(row) for row in rows], indent=2, ensure_ascii=False))
        return
    table = [("NAME", "SIZE", "SOURCE", "FOLDER")]
    for row in rows:
        size = megabytes(row.bytes) if row.bytes is not None else "-"
        table.append((row.name, size, row.source, row.folder or "(not pulled)"))
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for name, size, source, folder in table:
        click.echo(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {source:<{widths[2]}}  {folder}")


@dataclass(frozen=True)
class _Row:
    """folder and bytes: None for a model that was not pulled yet."""

    name: str
    bytes: int | None
    source: str
    folder: str | None


def _rows() -> list[_Row]:
    from kvkeep.models.hub.known_models import KNOWN_MODELS
    from kvkeep.models.hub.source import pulled_models

    rows = [
        _Row(model.name, model.bytes, model.source, str(model.folder)) for model in pulled_models()
    ]
    here = {row.name for row in rows}
    rows += [
        _Row(name, None, k.requirement, None)
        for name, k in KNOWN_MODELS.items()
        if name not in here
    ]
    return rows
