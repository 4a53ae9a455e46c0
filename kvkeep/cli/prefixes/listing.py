"""`kvkeep prefixes list`."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from kvkeep.cli.prefixes.where import shared_option
from kvkeep.cli.report import counted, megabytes
from kvkeep.cli.stderr import say
from kvkeep.cli.which_model import MODEL
from kvkeep.models.hub.library import home
from kvkeep.storage.objects.address import open_object_store
from kvkeep.storage.prefixes.inventory import StoredPrompt, prompts_of, stored_prompts

_SHOWN = 60  # characters of a text


@click.command("list")
@click.option("--text", "with_text", is_flag=True, help="Show how each begins; reads the model.")
@MODEL
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@shared_option
def list_(with_text: bool, model: str, as_json: bool, store: str | None) -> None:
    """List the prompts of which the prefix cache holds the beginning, the one used last first.

    SIZE is what a prompt takes beside those above it, with which it may begin alike. With --text,
    those of --model are shown alone. In a --store, USED is when it was written, and the prompts of
    all owners are listed.
    """
    found = _stored(store, with_text)
    texts = _texts(found, model) if with_text else {}
    if with_text:
        found = [each for each in found if _name(each) in texts]
    if as_json:
        click.echo(json.dumps([_entry(each, texts.get(_name(each))) for each in found], indent=2))
        return
    if not found:
        say("no prompts; --prefix-cache of generate, chat and batch keeps them")
        return
    click.echo(
        f"{'USED':<16}  {'TOKENS':>7}  {'SIZE':>9}  MODEL     {'TEXT' if texts else ''}".rstrip()
    )
    for each in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used))
        line = f"{used}  {each.tokens:>7,}  {megabytes(each.nbytes):>9}  {each.root[:8]}"
        click.echo(f"{line}  {texts.get(_name(each), '')}".rstrip())
    total = megabytes(sum(each.nbytes for each in found))
    say(f"{counted(len(found), 'prompt')}, {total}")


def _stored(store: str | None, with_text: bool) -> list[StoredPrompt]:
    if store is None:
        return stored_prompts(home() / "prefixes")
    if with_text:
        raise click.UsageError("--text reads the prompts of this machine alone, not of a --store")
    from kvkeep.storage.prefixes.inventory import stored_blocks

    return prompts_of(stored_blocks(open_object_store(store)))


def _name(prompt: StoredPrompt) -> str:
    return prompt.blocks[-1].key


def _entry(prompt: StoredPrompt, text: str | None) -> dict[str, object]:
    found: dict[str, object] = {
        "key": _name(prompt),
        "model": prompt.root,
        "tokens": prompt.tokens,
        "bytes": prompt.nbytes,
        "used": prompt.used,
    }
    return found if text is None else {**found, "text": text}


def _texts(found: Sequence[StoredPrompt], name: str) -> dict[str, str]:
    """How the prompts of a model begin, by the key of their last block."""
    from kvkeep.cli.which_model import load_named
    from kvkeep.storage.prefixes.block import tokens_in

    model = load_named(name, "bfloat16", "cpu", weights=None, progress=True)
    root = model.fingerprint.digest()[:32]

    def each() -> Iterator[tuple[str, str]]:
        for prompt in found:
            if prompt.root == root:
                text = " ".join(model.text.decode(tokens_in(Path(prompt.blocks[0].where))).split())
                yield _name(prompt), text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."

    return dict(each())
