"""`kvkeep why`: how much of a prompt is in the prefix cache, and where stored ones differ."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from kvkeep.cli import options
from kvkeep.cli.memory import open_prefix_store
from kvkeep.cli.model_options import DTYPE_OPTION, MODEL_OPTION, load_by_name
from kvkeep.cli.prefixes import prefix_fingerprints
from kvkeep.errors import StoreError
from kvkeep.storage.prefixes import inventory
from kvkeep.types import DtypeName

if TYPE_CHECKING:
    from kvkeep import Model, PrefixStore
    from kvkeep.storage.snapshots.fingerprint import Fingerprint


_CONTEXT_TOKENS = 12  # tokens shown on each side of the first difference


@options.command(short_help="Show how much of a prompt is in the prefix cache.")
def why(
    prompt: str | None = options.option("-p", metavar="TEXT", help="The prompt."),
    file: str | None = options.option(
        "-f", metavar="FILE", help='File with the prompt; "-": standard input.'
    ),
    special: bool = options.SPECIAL_OPTION,
    model: str = MODEL_OPTION,
    dtype: DtypeName = DTYPE_OPTION,
    as_json: bool = options.JSON_OPTION,
    no_progress: bool = options.NO_PROGRESS_OPTION,
) -> None:
    """Show how much of a prompt is in the prefix cache, and where stored prompts differ from it.

    Nothing is evaluated. The cache holds whole blocks of 256 tokens from the start of a prompt: a
    date or counter near the start prevents reuse of everything after it. A model with local layers
    or states continues from the newest checkpoint in them. Prompts that --codec small or smaller
    has rounded are searched, too.
    """
    text = options.read_prompt(prompt, file)
    loaded = load_by_name(model, dtype, "cpu", weights=None, progress=not no_progress)
    ids = loaded.text.encode(text, special)
    # Of equal ones the first, which is exact.
    num_stored, differs_at, fingerprint, store = max(
        _stored_parts(loaded, ids), key=lambda x: x[:2]
    )
    rounded = store.codec if num_stored and store.codec != "exact" else ""
    resumes_at = _resumable_tokens(loaded, store, fingerprint, ids[:num_stored])
    has_uncached_block = len(ids) - num_stored >= inventory.BLOCK_TOKENS
    if as_json:
        counts = {"prompt_tokens": len(ids), "stored_tokens": num_stored}
        reuse = {"differs_at": differs_at if has_uncached_block else None}
        click.echo(json.dumps(counts | reuse | {"evaluated_from": resumes_at, "rounded": rounded}))
        return
    note = f", rounded: commands reuse them with --codec {rounded}" if rounded else ""
    click.echo(f"{num_stored:,} of {len(ids):,} tokens are in the prefix cache{note}")
    if resumes_at < num_stored:
        checkpoint = f"after {resumes_at:,} tokens" if resumes_at else "missing"
        click.echo(
            f"the newest checkpoint that this model needs is {checkpoint}: a prompt is evaluated "
            "again from there"
        )
    if has_uncached_block:
        click.echo(_difference(loaded, ids, differs_at))
    else:
        click.echo("the rest is less than a block, and is always evaluated")


def _difference(model: "Model", ids: Sequence[int], differs_at: int) -> str:
    """Return in words where the nearest stored prompt differs from a prompt."""
    if not differs_at:
        return "no prompt in the prefix cache begins with its first token"
    start = max(0, differs_at - _CONTEXT_TOKENS)
    decode = model.text.decode_continuation if start else model.text.decode
    common_ids, new_ids = ids[start:differs_at], ids[differs_at : differs_at + _CONTEXT_TOKENS]
    return (
        f"the nearest prompt differs, or ends, at token {differs_at:,}:\n"
        f"{decode(common_ids)}>>>{model.text.decode_continuation(new_ids)}"
    )


def _stored_parts(
    model: "Model", ids: Sequence[int]
) -> "Iterator[tuple[int, int, Fingerprint, PrefixStore]]":
    """Yield how many tokens of a prompt are stored, and where the nearest stored prompt differs.

    Exactly and by each codec that rounds, with the fingerprint and the store they are found by.
    """
    from kvkeep.storage.prefixes.coding import BLOCK_CODECS

    for codec in BLOCK_CODECS:
        store = open_prefix_store(codec=codec)
        try:
            for fingerprint in prefix_fingerprints(model):
                yield (*store.differs_at(fingerprint, ids), fingerprint, store)
        except StoreError:
            if codec == "exact":
                raise
            # The model has no basis, without which nothing is rounded.


def _resumable_tokens(
    model: "Model", prefix_store: "PrefixStore", fingerprint: "Fingerprint", ids: Sequence[int]
) -> int:
    """Return after how many of a prompt's stored tokens a session can continue."""
    from kvkeep.session.stored_prefix import checkpoint_need

    memory = model.session(policy="full").core.memory
    if not memory.overwrites:
        return len(ids)
    need = checkpoint_need(memory)
    return prefix_store.newest_checkpoint_end(fingerprint, ids, need)
