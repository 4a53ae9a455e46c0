"""Suggestions for commands and arguments that other tools have under other names."""

from collections.abc import Mapping
from typing import Any

import click

# What users of ollama, llama.cpp and docker try, and the command that does it here.
ELSEWHERE: Mapping[str, str] = {
    "run": "kvkeep chat -m MODEL",
    "list": "kvkeep models` or `kvkeep sessions list",
    "ls": "kvkeep models` or `kvkeep sessions list",
    "ps": "kvkeep sessions list",
    "rm": "kvkeep models rm NAME` or `kvkeep sessions rm NAME",
    "show": "kvkeep models show NAME` or `kvkeep sessions show NAME",
    "export": "kvkeep models export NAME FOLDER` or `kvkeep sessions export NAME FILE",
    "import": "kvkeep sessions import FILE NAME",
    "verify": "kvkeep sessions verify",
    "fork": "kvkeep sessions fork NAME NEW",
    "gc": "kvkeep sessions gc` or `kvkeep prefixes gc",
    "download": "kvkeep pull NAME",
    "install": "kvkeep pull NAME",
    "complete": "kvkeep generate -p TEXT",
    "prompt": "kvkeep generate -p TEXT",
    "ask": "kvkeep generate -p TEXT",
    "help": "kvkeep --help",
    "version": "kvkeep --version",
}
# Within `kvkeep models`, which lists them by itself.
OF_MODELS: Mapping[str, str] = dict.fromkeys(("list", "ls"), "kvkeep models")


class OptionsOnly(click.Command):
    """A command without positional arguments, whose error for one says which option is meant.

    hint: the message for an argument; "{}" stands for the argument.
    """

    def __init__(self, *args: Any, hint: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.hint = hint

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            shown = " ".join(rest)
            hint = self.hint.format(f'"{shown}"' if " " in shown else shown)
            raise click.UsageError(f"unexpected argument {shown!r}: {hint}", ctx)
        return rest
