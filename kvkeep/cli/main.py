"""The `kvkeep` command: its subcommands, error messages and exit statuses."""

import io
import signal
import sys
from typing import Any, NoReturn

import click
from click.shell_completion import get_completion_class

import kvkeep
from kvkeep.cli.evaluate import EVALUATIONS
from kvkeep.cli.lazy import EQUIVALENTS, LazyCommand, LazyGroup
from kvkeep.cli.output import redirect_to_null, say
from kvkeep.cli.terminal import interrupt_on_termination, termination_signal
from kvkeep.errors import InvalidArgument, KvkeepError

# Exit statuses; shells report 128 + N for signal N.
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE
COMMANDS = {
    "generate": LazyCommand("generate:generate", "Continue a text."),
    "chat": LazyCommand("chat:chat", "Chat with a model."),
    "batch": LazyCommand("batch:batch", "Answer many prompts at once."),
    "serve": LazyCommand("serve:serve", "Serve a model over the OpenAI and Anthropic APIs."),
    "fleet": LazyCommand("fleet:fleet", "Serve a model from several processes or machines."),
    "launch": LazyCommand("launch:launch", "Run an agent, such as Codex, with a model."),
    "sessions": LazyCommand("sessions:sessions", "List, check, copy and remove saved sessions."),
    "prefixes": LazyCommand("prefixes:prefixes", "List and remove prompts in the prefix cache."),
    "why": LazyCommand("why:why", "Show how much of a prompt is in the prefix cache."),
    "keys": LazyCommand("keys:keys", "Make API keys for a server, stored as hashes."),
    "models": LazyCommand("models:models", "List, show, export and remove models."),
    "pull": LazyCommand("models:pull", "Download or convert a model."),
    "calibrate": LazyCommand(
        "compression:calibrate", "Measure a model's attention, for compression."
    ),
    "evaluate": LazyCommand(
        "evaluate:evaluate", "Measure perplexity and recall of a bounded or compressed cache."
    ),
    # The commands of `evaluate` are also available at the top level.
    **EVALUATIONS,
    "doctor": LazyCommand("doctor:doctor", "Show which kernels run on this machine."),
    "disk": LazyCommand("doctor:disk", "Show disk usage."),
    "completion": LazyCommand("main:completion", "Print a shell completion script."),
}


class RootGroup(LazyGroup):
    """The root group. Bad input ends in one line on standard error and exit status 2."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # characters that the terminal lacks
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # refused later, with a clear message
        kwargs["standalone_mode"] = False
        try:
            status = super().main(*args, **kwargs)
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(EXIT_BAD_INPUT)
        except click.ClickException as error:
            context = error.ctx if isinstance(error, click.UsageError) else None
            help_hint = f" (see {context.command_path} --help)" if context else ""
            _exit_with_error(f"{error.format_message()}{help_hint}")
        except KvkeepError as error:
            _exit_with_error(str(error))
        except BrokenPipeError:
            redirect_to_null(sys.stdout)
            sys.exit(EXIT_PIPE_CLOSED)
        except OSError as error:
            prefix = f"{error.filename}: " if error.filename else ""
            _exit_with_error(f"{prefix}{error.strerror or error}")
        except UnicodeEncodeError as error:
            _exit_with_error(f"the input is not UTF-8 text ({error}); expected text in UTF-8")
        except click.Abort:
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(status if isinstance(status, int) else 0)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:  # while writing help; click itself would exit with status 1
            redirect_to_null(sys.stdout)
            raise click.exceptions.Exit(EXIT_PIPE_CLOSED) from None

    def invoke(self, ctx: click.Context) -> Any:
        # Caught here because click's own main exits with status 1 for both.
        try:
            with interrupt_on_termination():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(128 + (termination_signal() or signal.SIGINT)) from None
        except BrokenPipeError:
            redirect_to_null(sys.stdout)
            raise click.exceptions.Exit(EXIT_PIPE_CLOSED) from None


@click.group(
    "kvkeep",
    cls=RootGroup,
    lazy_commands=COMMANDS,
    equivalents=EQUIVALENTS,
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 100,
    },
)
@click.version_option(kvkeep.__version__, "-V", "--version", message="kvkeep %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """A KV cache for local language models that you can bound, save, edit and compress."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print a script with which SHELL completes commands, options, sessions and models.

    \b
    bash:  eval "$(kvkeep completion bash)"      in ~/.bashrc
    zsh:   eval "$(kvkeep completion zsh)"       in ~/.zshrc
    fish:  kvkeep completion fish | source       in ~/.config/fish/config.fish
    """
    shell_class = get_completion_class(shell)
    if shell_class is None:
        raise InvalidArgument(f"completion for {shell} is not supported")
    click.echo(shell_class(main, {}, "kvkeep", "_KVKEEP_COMPLETE").source())


def _exit_with_error(message: str) -> NoReturn:
    """Print an error message in one line and exit with status 2."""
    try:
        sys.stdout.flush()
    except OSError:
        redirect_to_null(sys.stdout)
    say("kvkeep: error: " + " ".join(message.split("\n")))
    sys.exit(EXIT_BAD_INPUT)
