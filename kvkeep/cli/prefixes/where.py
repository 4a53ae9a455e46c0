"""Whose prompts `kvkeep prefixes` is about."""

from collections.abc import Callable
from typing import Any

import click

from kvkeep.storage.objects.address import is_url


def _url(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not is_url(value):
        raise click.BadParameter(f"a URL, as s3://bucket/prefix; found {value!r}")
    return value


def shared_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--store`. It is said each time: what $KVKEEP_STORE names is of others, too."""
    return click.option(
        "--store",
        metavar="URL",
        callback=_url,
        show_default="this machine's",
        help="Prompts that a fleet shares, as s3://bucket/prefix.",
    )(command)
