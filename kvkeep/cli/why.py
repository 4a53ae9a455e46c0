"""`kvkeep why`: how much of a prompt is evaluated already, and what stops the rest."""

import json

import click

from kvkeep.cli.memory import open_prefix_store
from kvkeep.cli.text_input import SPECIAL, read_prompt
from kvkeep.cli.which_model import DTYPE, MODEL, load_named
from kvkeep.types import DtypeName

AROUND = 12  # tokens shown on each side


@click.command(short_help="Say why a prompt is not taken from the prefix cache.")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option("-f", "--file", metavar="FILE", help='File with the prompt; "-": standard input.')
@SPECIAL
@MODEL
@DTYPE
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--no-progress", is_flag=True, help="No progress bars.")
def why(
    prompt: str | None,
    file: str | None,
    special: bool,
    model: str,
    dtype: DtypeName,
    as_json: bool,
    no_progress: bool,
) -> None:
    """Say how much of a prompt the prefix cache holds, and where the rest goes another way.

    Nothing is evaluated. Stored are whole blocks of 256 tokens, from the beginning of a prompt: a
    date or a counter near the beginning keeps everything after it from being reused.
    """
    text = read_prompt(prompt, file)

    from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS

    loaded = load_named(model, dtype, "cpu", weights=None, progress=not no_progress)
    ids = loaded.text.encode(text, special)
    stored, differs = open_prefix_store().differs_at(loaded.fingerprint, ids)
    more = len(ids) - stored >= BLOCK_TOKENS
    if as_json:
        found = {"prompt_tokens": len(ids), "stored_tokens": stored}
        click.echo(json.dumps(found | {"differs_at": differs if more else None}))
        return
    click.echo(f"{stored:,} of {len(ids):,} tokens are stored")
    if not more:
        click.echo("what remains is less than a block, and is evaluated each time")
    elif not differs:
        click.echo("no stored prompt begins with its first token")
    else:
        first = max(0, differs - AROUND)
        before = (loaded.text.decode_inside if first else loaded.text.decode)(ids[first:differs])
        after = loaded.text.decode_inside(ids[differs : differs + AROUND])
        click.echo(f"the nearest stored prompt differs, or ends, at token {differs:,}:")
        click.echo(f"{before}>>>{after}")
