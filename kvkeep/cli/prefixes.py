"""`kvkeep prefixes`: the prompt prefixes that --prefix-cache keeps."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import options
from kvkeep.cli.lazy import LazyCommand, LazyGroup
from kvkeep.cli.memory import open_prefix_store
from kvkeep.cli.model_options import DTYPE_OPTION, MODEL_OPTION, load_by_name
from kvkeep.cli.output import echo_table, format_mb, plural, say
from kvkeep.models.hub.library import home
from kvkeep.storage.objects import is_url, open_object_store
from kvkeep.storage.objects.paths import ObjectPath
from kvkeep.storage.prefixes import inventory
from kvkeep.storage.prefixes.quota import DEFAULT_MAX_BYTES
from kvkeep.types import DtypeName

if TYPE_CHECKING:
    from kvkeep import Model
    from kvkeep.storage.snapshots.fingerprint import Fingerprint

SUBCOMMANDS = {
    "list": LazyCommand("prefixes:list_", "List prompts, most recently used first."),
    "clear": LazyCommand("prefixes:clear", "Remove all prompts."),
    "gc": LazyCommand("prefixes:gc", "Remove the least recently used blocks, down to a size."),
    "verify": LazyCommand("prefixes:verify", "Check blocks and checkpoints for damage."),
}


@click.group(cls=LazyGroup, lazy_commands=SUBCOMMANDS)
def prefixes() -> None:
    """List and remove prompts in the prefix cache that --prefix-cache writes."""


def _require_url(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not is_url(value):
        raise click.BadParameter(f"a URL, such as s3://bucket/prefix; found {value!r}")
    return value


_MAX_BEGINNING_CHARS = 60
# Values of `--prefill-step`. Prompts of batches with other ones are not found.
_BATCH_PREFILL_STEPS = (512, 16, 32, 64, 128, 256, 1024, 2048, 4096)
# Not read from $KVKEEP_STORE, since that store also holds the prompts of other users.
_SHARED_STORE_OPTION = options.option(
    metavar="URL",
    callback=_require_url,
    show_default="this machine's",
    help="Object store that a fleet shares (s3://bucket/prefix).",
)


@options.command("list")
def list_(
    with_text: bool = options.option(
        "--text",
        is_flag=True,
        help="Show the beginning of each prompt; loads the tokenizer of --model.",
    ),
    model: str = MODEL_OPTION,
    dtype: DtypeName = DTYPE_OPTION,
    as_json: bool = options.JSON_OPTION,
    store: str | None = _SHARED_STORE_OPTION,
) -> None:
    """List the prompts in the prefix cache, most recently used first.

    SIZE leaves out blocks that a prompt shares with those listed above it. ROUNDED is the codec
    that rounded its cells. CHECKPOINTS says after which tokens a model with local layers or states
    can continue. With --text, only the prompts of --model in --dtype are listed. In an object
    store, the prompts of all owners are listed, and USED is the time of writing.
    """
    prompts, roundings = _stored_prompts(store, with_text)
    num_stored = len(prompts)
    beginnings = dict[str, str]()
    if with_text:
        beginnings = _beginnings(prompts, roundings, model, dtype)
        prompts = [prompt for prompt in prompts if _prompt_key(prompt) in beginnings]
    if as_json:
        entries = [_json_entry(x, roundings, beginnings.get(_prompt_key(x))) for x in prompts]
        click.echo(json.dumps(entries, indent=2))
        return
    if not prompts:
        other_models = f"has no prompt of {model} in {dtype}, but {plural(num_stored, 'other')}"
        nothing = "is empty; --prefix-cache of generate, chat and batch fills it"
        say(f"the prefix cache {other_models if num_stored else nothing}")
        return
    titles = ("USED", "TOKENS", "SIZE", "MODEL", "ROUNDED", "CHECKPOINTS", "TEXT")
    rows = [_table_row(x, roundings, beginnings.get(_prompt_key(x), "")) for x in prompts]
    columns = [
        (title, *cells)
        for title, cells in zip(titles, zip(*rows, strict=True), strict=True)
        if any(cells)
    ]
    echo_table(list(zip(*columns, strict=True)), right_aligned=(1, 2))
    total_size = format_mb(sum(prompt.nbytes for prompt in prompts))
    say(f"{plural(len(prompts), 'prompt')}, {total_size}")


def _json_entry(
    prompt: inventory.StoredPrompt, roundings: Mapping[str, inventory.Rounding], text: str | None
) -> dict[str, Any]:
    """Return the entry of a prompt in a list as JSON. text: its beginning, if that is shown."""
    rounding = roundings.get(prompt.model_digest)
    return {
        "key": _prompt_key(prompt),
        "model": prompt.model_digest,
        "tokens": prompt.token_count,
        "bytes": prompt.nbytes,
        "used": prompt.last_used,
        "rounded": rounding.codec if rounding else "",
        "checkpoints": prompt.checkpoint_ends,
        **({} if text is None else {"text": text}),
    }


def _table_row(
    prompt: inventory.StoredPrompt, roundings: Mapping[str, inventory.Rounding], text: str
) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(prompt.last_used))
    rounding = roundings.get(prompt.model_digest)
    return (
        *(used, f"{prompt.token_count:,}", format_mb(prompt.nbytes), prompt.model_digest[:8]),
        rounding.codec if rounding else "",
        ", ".join(f"{end:,}" for end in prompt.checkpoint_ends),
        text,
    )


def _stored_prompts(
    store: str | None, with_text: bool
) -> tuple[list[inventory.StoredPrompt], Mapping[str, inventory.Rounding]]:
    """Return the prompts in this machine's prefix cache, or in a shared store, and how some of
    them were rounded, by `model_digest`.
    """
    if store is None:
        prompts = inventory.stored_prompts(home() / "prefixes")
        return prompts, inventory.roundings(prompts)
    if with_text:
        raise click.UsageError("--text shows prompts on this machine only, not those in a --store")
    objects = open_object_store(store)
    prompts = inventory.prompts_of(inventory.stored_blocks(objects))
    return prompts, inventory.roundings(prompts, partial(ObjectPath, objects))


def _prompt_key(prompt: inventory.StoredPrompt) -> str:
    """Return the key of a prompt's last block, which identifies the prompt."""
    return prompt.blocks[-1].key


def _beginnings(
    prompts: Sequence[inventory.StoredPrompt],
    roundings: Mapping[str, inventory.Rounding],
    model_name: str,
    dtype: DtypeName,
) -> dict[str, str]:
    """Return the first characters of the prompts of one model, by `_prompt_key`."""
    from kvkeep.storage.prefixes.block import read_tokens
    from kvkeep.storage.prefixes.coding import rounded_root

    model = load_by_name(model_name, dtype, "cpu", weights=None, progress=True)
    # Of the length that the prefix cache stores.
    model_digests = {fingerprint.digest()[:32] for fingerprint in prefix_fingerprints(model)}
    rounded = {(each.codec, each.basis) for each in roundings.values()}
    model_digests |= {rounded_root(exact, *each) for exact in model_digests for each in rounded}
    beginnings = dict[str, str]()
    for prompt in prompts:
        if prompt.model_digest in model_digests:
            text = " ".join(model.text.decode(read_tokens(Path(prompt.blocks[0].location))).split())
            if len(text) > _MAX_BEGINNING_CHARS:
                text = f"{text[: _MAX_BEGINNING_CHARS - 3]}..."
            beginnings[_prompt_key(prompt)] = text
    return beginnings


@options.command()
def clear(store: str | None = _SHARED_STORE_OPTION) -> None:
    """Remove all prompts from the prefix cache. They are prefilled again when needed."""
    _evict_to_size(store, 0)


@options.command()
def gc(
    max_bytes: int | None = options.size_option(
        show_default=f"{format_mb(DEFAULT_MAX_BYTES)} on this machine", help="Size to keep."
    ),
    store: str | None = _SHARED_STORE_OPTION,
) -> None:
    """Remove the least recently used blocks, down to a size, and files of killed processes.

    In an object store, removes the oldest blocks of all owners, as reads are not recorded there.
    """
    if store is not None and max_bytes is None:
        raise click.UsageError("--store needs --max-bytes, since the store is shared")
    _evict_to_size(store, DEFAULT_MAX_BYTES if max_bytes is None else max_bytes)


@options.command()
def verify() -> None:
    """Check every byte of the blocks and checkpoints in this machine's prefix cache.

    Prints the damaged ones, and exits with status 2 if there are any. Changes nothing: damaged
    files are never used, and are replaced when their prompt is evaluated again.
    """
    from kvkeep.storage.prefixes.store import is_intact

    folder = home() / "prefixes"
    files = list(inventory.folder_files(folder)) if folder.is_dir() else []
    damaged = [file for file in files if not is_intact(file) and Path(file.location).exists()]
    for file in damaged:
        click.echo(f"BAD  {file.location}")
    total_size = format_mb(sum(file.nbytes for file in files))
    say(f"{plural(len(files), 'file')}, {total_size}: {len(damaged) or 'none'} damaged")
    if damaged:
        raise click.exceptions.Exit(2)


def _evict_to_size(shared_store: str | None, max_bytes: int) -> None:
    """Remove blocks from the store at a URL, or from this machine's; print what was removed."""
    if shared_store is None:
        store = open_prefix_store()
        freed_bytes, left_bytes, store_note = store.gc(max_bytes), store.nbytes, ""
    else:
        freed_bytes, left_bytes = inventory.evict_blocks(open_object_store(shared_store), max_bytes)
        store_note = f" in {shared_store}"
    click.echo(f"removed {format_mb(freed_bytes)}, {format_mb(left_bytes)} left{store_note}")


def prefix_fingerprints(model: "Model") -> "list[Fingerprint]":
    """Return the model's fingerprints in prefix caches: of `generate`, and of `batch`."""
    from kvkeep.engine.steps import StepGrid

    grids = [StepGrid.for_model(step, model) for step in _BATCH_PREFILL_STEPS]
    return [model.fingerprint, *(replace(model.fingerprint, steps=grid.name) for grid in grids)]
