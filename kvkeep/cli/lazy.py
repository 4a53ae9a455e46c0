"""Click command classes: lazily imported commands, and suggestions for other tools' names."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

OWN_OPTIONS = "Options"  # the section of a command's own options


@dataclass(frozen=True)
class LazyCommand:
    """A command, imported on first use. target: "module:function", in this package."""

    target: str
    summary: str  # its line in the help of its group

    def load(self) -> click.Command:
        module, _, attribute = self.target.partition(":")
        command = getattr(import_module(f"kvkeep.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command


class LazyGroup(click.Group):
    """A group of commands, by name. equivalents: suggestions for the names of other tools."""

    def __init__(
        self,
        *args: Any,
        lazy_commands: Mapping[str, LazyCommand],
        equivalents: Mapping[str, str] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.lazy_commands, self.equivalents = lazy_commands, equivalents or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = self.lazy_commands.get(cmd_name)
        return None if command is None else command.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, item.summary) for name, item in self.lazy_commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command. Raises UsageError with a similar or equivalent one as suggestion."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            name = args[0].lower()
            similar_names = get_close_matches(name, self.lazy_commands, 1)
            if name in self.equivalents:
                argument = next((word for word in args[1:] if not word.startswith("-")), "MODEL")
                suggestion = f"`{self.equivalents[name].replace('MODEL', argument)}`"
            elif name in self.lazy_commands:
                suggestion = name
            elif similar_names:
                suggestion = similar_names[0]
            else:
                raise
            raise click.UsageError(f"{error.message} Did you mean {suggestion}?", ctx) from None


# What to suggest for the names of commands of ollama, llama.cpp and docker, within backticks.
EQUIVALENTS: Mapping[str, str] = {
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
    "create": "kvkeep models add NAME PATH",
    "help": "kvkeep --help",
    "version": "kvkeep --version",
}
# The same within `kvkeep models`.
MODELS_EQUIVALENTS: Mapping[str, str] = {"ls": "kvkeep models list"}


class SectionedOption(click.Option):
    """An option. section: the heading under which help lists it."""

    def __init__(self, *args: Any, section: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.section = section


_MAX_SUGGESTIONS = 3  # options


class SectionedCommand(click.Command):
    """A command whose help lists options by section, its own ones first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; for an unknown option suggest those that begin with it, too."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            flags = [flag for parameter in self.get_params(ctx) for flag in parameter.opts]
            longer = sorted(flag for flag in flags if flag.startswith(name))[:_MAX_SUGGESTIONS]
            if not longer or not name.startswith("--"):
                raise
            suggestion = " or ".join(map(repr, longer))
            raise click.UsageError(f"{error.message} Did you mean {suggestion}?", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {OWN_OPTIONS: []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                sections.setdefault(getattr(parameter, "section", OWN_OPTIONS), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class OptionsOnlyCommand(SectionedCommand):
    """A command without arguments. hint: what to do instead of passing the argument "{}"."""

    def __init__(self, *args: Any, hint: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.hint = hint

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        extra_args = super().parse_args(ctx, args)
        if extra_args and not ctx.resilient_parsing:
            shown_args = " ".join(extra_args)
            hint = self.hint.format(f'"{shown_args}"' if " " in shown_args else shown_args)
            raise click.UsageError(f"unexpected argument {shown_args!r}: {hint}", ctx)
        return extra_args
