"""`kvkeep prefixes`: the evaluated beginnings of prompts that --prefix-cache keeps."""

import click

from kvkeep.cli.lazy import Lazy, LazyGroup

_CLEARING = "kvkeep.cli.prefixes.clearing"
PREFIXES = {
    "list": Lazy("kvkeep.cli.prefixes.listing:list_", "List prompts, the one used last first."),
    "clear": Lazy(f"{_CLEARING}:clear", "Remove all of them."),
    "gc": Lazy(f"{_CLEARING}:gc", "Remove those used longest ago, down to a size."),
}


@click.group(cls=LazyGroup, lazy=PREFIXES)
def prefixes() -> None:
    """List and remove the beginnings of prompts that --prefix-cache keeps."""
