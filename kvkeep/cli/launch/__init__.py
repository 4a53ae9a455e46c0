"""`kvkeep launch`: run an agent or another client with a server of this machine."""

import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from kvkeep.cli.launch.clients import CLIENTS, LaunchedClient, RunningServer
from kvkeep.cli.launch.process import run_client, shell_script, write_files
from kvkeep.cli.launch.server import (
    find_server,
    parse_serve_options,
    server_to_start,
    serves,
    started_server,
    warn_of_short_context,
)
from kvkeep.cli.model_options import complete_models
from kvkeep.cli.options import command, option
from kvkeep.cli.output import say
from kvkeep.client.client import DEFAULT_URL
from kvkeep.errors import InvalidArgument

_PORT = 8080  # of a server that a printed script starts


@command()
@click.argument("client", type=click.Choice(tuple(CLIENTS)))
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]...")
def launch(
    client: str,
    arguments: tuple[str, ...],
    model: str | None = option(
        "-m",
        metavar="NAME",
        shell_complete=complete_models,
        show_default="the running server's, or the default model",
        help="Model to run; if the running server has a different one, a new server is started.",
    ),
    server: str = option(
        metavar="URL", default=DEFAULT_URL, help="Server to use, if it is running."
    ),
    api_key: str | None = option(
        metavar="KEY",
        envvar="KVKEEP_API_KEY",
        show_envvar=True,
        help="API key of the server, also of one that is started with keys.",
    ),
    serve: str = option(
        metavar="OPTIONS",
        default="",
        show_default=False,
        help="Options of a server that is started, in quotes.",
    ),
    print_only: bool = option(
        "--print", is_flag=True, help="Print the settings as a shell script; run nothing."
    ),
) -> None:
    """Run CLIENT, an agent or a chat page, with a model of this machine.

    A running `kvkeep serve` is used; without one, a server is started until the client ends. The
    client gets its settings by arguments, environment variables and temporary files: none of your
    files is changed. ARGUMENTS after -- are the client's own.

    \b
    kvkeep launch claude
    kvkeep launch codex -m qwen3-coder.gguf --serve "--max-kv-size 65536 --memory 16GB"
    kvkeep launch opencode -- run "Explain this repository"
    """
    chosen = CLIENTS[client]
    serve_options = parse_serve_options(serve)
    running, port = find_server(server, api_key), _PORT
    if running is not None and not serves(running, model):
        say(f"kvkeep: the server at {running.url} has the model {running.model}, not {model}")
        running, port = None, _PORT + 1
    if print_only:
        start = None
        if running is None:
            start, running = server_to_start(model, serve_options, api_key, port)
        click.echo(_script(chosen, running, start, arguments))
        return
    program = shutil.which(chosen.program)
    if program is None:
        raise InvalidArgument(f"{chosen.program} is not installed: run `{chosen.install}`")
    with ExitStack() as stack:
        if running is None:
            running = stack.enter_context(started_server(model, serve_options, api_key))
        warn_of_short_context(running)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvkeep-launch-")))
        settings = chosen.settings(running, folder)
        write_files(settings, folder)
        status = run_client([program, *settings.arguments, *arguments], settings.environment)
    click.get_current_context().exit(status)


def _script(
    client: LaunchedClient,
    server: RunningServer,
    start: Sequence[str] | None,
    arguments: Sequence[str],
) -> str:
    """Return the shell script of a launch. start: the server's arguments, unless it runs."""
    folder = Path(tempfile.gettempdir()) / f"kvkeep-{client.program}-{os.getuid()}"
    lines = []
    if start is not None:
        lines = [f"# first, in another terminal: {shlex.join(['kvkeep', *start])}"]
    settings = client.settings(server, folder)
    words = [client.program, *settings.arguments, *arguments]
    return "\n".join([*lines, shell_script(settings, folder, words)])
