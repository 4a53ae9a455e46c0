"""`kvkeep completion`: shell completion of commands, options and names."""

import click
from click.shell_completion import CompletionItem, get_completion_class

from kvkeep.errors import InvalidArgument

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Write what lets SHELL complete commands, options, and the names of sessions and models.

    \b
    bash:  eval "$(kvkeep completion bash)"      in ~/.bashrc
    zsh:   eval "$(kvkeep completion zsh)"       in ~/.zshrc
    fish:  kvkeep completion fish | source       in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise InvalidArgument(f"completion for {shell} is not supported")
    root = context.find_root().command
    click.echo(kind(root, {}, "kvkeep", "_KVKEEP_COMPLETE").source())


def session_names(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the names of saved sessions."""
    from kvkeep.cli.store import saved_sessions

    return [CompletionItem(n) for n in saved_sessions().names() if n.startswith(incomplete)]


def model_names(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the names of known and pulled models; without a match, file names."""
    from kvkeep.models.hub.known_models import KNOWN_MODELS
    from kvkeep.models.hub.library import pulled_models

    names = sorted({*KNOWN_MODELS, *(model.name for model in pulled_models())})
    items = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return items or [CompletionItem(incomplete, type="file")]
