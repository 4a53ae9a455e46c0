"""Measures how many more prompts and sessions stores hold with the codecs of snapshots.

    python -m benchmarks.codec_stores --home FOLDER --out docs/results/codec-stores.json

Prompts with hidden facts are fed to sessions with a prefix cache: a folder with a quota, and an S3
server (moto, on this machine). Then new sessions take the prompts from the cache, and are asked for
the facts. A prompt fits if all its blocks are found again. FOLDER is that in which kvkeep keeps
the basis of the model.
"""

import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.codec import home_with_basis
from benchmarks.command import Measurement, ResultFile, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.fleet.servers import object_store
from benchmarks.progress import bar
from kvkeep import PrefixStore, load_model
from kvkeep.evaluate.datasets import NeedleDataset
from kvkeep.evaluate.haystack import TEXTS, Haystack
from kvkeep.evaluate.recall import measure_recall
from kvkeep.evaluate.samples import Sample
from kvkeep.model import Model
from kvkeep.storage.objects import open_object_store
from kvkeep.storage.prefixes.block import PrefixCache
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS, stored_blocks
from kvkeep.storage.prefixes.shared import SharedPrefixCache

CODECS = ("exact", "small", "smaller")
HAYSTACK = "docstrings"


@dataclass(frozen=True)
class StoreFigures:
    """A prefix cache after all prompts were fed, with one codec.

    prompts: fed. bytes_per_prompt: in a store without a quota. fit: prompts of which all blocks
    are in a store with one. found: facts in answers after a prompt came from the cache; of `facts`,
    of which an uncached session finds `uncached`.
    """

    store: str
    codec: str
    prompts: int
    tokens: int
    bytes_per_prompt: int
    fit: int | None
    facts: int
    uncached: int
    found: int


def samples(model: Model, tokens: int, count: int, seed: int) -> list[Sample]:
    text = Haystack.from_text(TEXTS[HAYSTACK](), lambda sentence: len(model.text.encode(sentence)))
    dataset = NeedleDataset(text, tokens, task="multiquery", seed=seed)
    return [dataset.sample(index) for index in range(count)]


def ask(model: Model, sample: Sample, cache: PrefixCache | None = None) -> int:
    """Return how many facts of a prompt are found."""
    session = model.session(policy="full", store=cache)
    reused = session.feed(sample.text).reused
    assert cache is None or reused >= BLOCK_TOKENS, "the prompt is not in the cache"
    return sum(answer.found for answer in measure_recall(session, sample.facts).answers)


def fill(model: Model, cache: PrefixCache, prompts: Sequence[Sample], label: str) -> None:
    with bar(len(prompts), label) as advance:
        for sample in prompts:
            model.session(policy="full", store=cache).feed(sample.text)
            advance(1)


def fitting_prompts(model: Model, prompts: Sequence[Sample], quota: int, codec: str) -> int:
    """Return how many prompts are wholly in a folder with a quota after all were fed."""
    fitting = 0
    with tempfile.TemporaryDirectory() as folder:
        cache = PrefixStore(folder, quota, codec)
        fill(model, cache, prompts, f"quota, {codec}")
        for sample in prompts:
            ids = model.text.encode(sample.text)
            stored, _ = cache.differs_at(model.fingerprint, ids)
            fitting += stored == len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    return fitting


def measure_cache(
    model: Model, prompts: Sequence[Sample], codec: str, store: str, url: str
) -> tuple[int, int]:
    """Return the bytes of prompts in a cache, and the facts found after taking them from it.

    store: "folder" or "s3". url: of the S3 server.
    """
    with tempfile.TemporaryDirectory() as folder:
        if store == "folder":
            folder_cache = PrefixStore(folder, codec=codec)
            fill(model, folder_cache, prompts, f"folder, {codec}")
            found = sum(ask(model, sample, folder_cache) for sample in prompts)
            return folder_cache.nbytes, found
    objects, secret = open_object_store(f"{url}/{codec}"), secrets.token_bytes(32)
    cache = SharedPrefixCache(objects, secret, model.arithmetic, codec=codec)
    fill(model, cache, prompts, f"s3, {codec}")
    cache.flush()
    found = sum(ask(model, sample, cache) for sample in prompts)
    return sum(block.nbytes for block in stored_blocks(objects)), found


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--tokens", default=1024, help="Of a prompt.")
@click.option("--prompts", "count", default=20, type=click.IntRange(1), help="Fed to each store.")
@click.option("--asked", default=6, type=click.IntRange(1), help="Prompts that facts are asked of.")
@click.option("--quota", default=50, help="Of the folder, in MB.")
@click.option("--calibrated", default=30000, help="Tokens of the manual that the basis is of.")
@click.option("--home", type=click.Path(exists=True, path_type=Path), help="With a basis.")
@click.option("--seed", default=72)
@out_option
def stores(
    name: str,
    tokens: int,
    count: int,
    asked: int,
    quota: int,
    calibrated: int,
    home: Path | None,
    seed: int,
    out: Path | None,
) -> None:
    """Measure how many prompts fit in prefix caches by codec, and facts found from them."""
    about = {"model": name, "seed": seed, "haystack": HAYSTACK, "quota_mb": quota}
    about["calibrated"] = None if home else calibrated  # tokens; of --home they are unknown
    result = ResultFile(out, about=about)
    model = load_model(name)
    prompts, rows = samples(model, tokens, count, seed), list[StoreFigures]()
    with home_with_basis(model, home, calibrated), object_store() as url:
        asked_prompts = prompts[:asked]
        uncached = sum(ask(model, sample) for sample in asked_prompts)
        for codec in CODECS:
            fit = fitting_prompts(model, prompts, quota * 1_000_000, codec)
            for store in ("folder", "s3"):
                nbytes, found = measure_cache(model, asked_prompts, codec, store, url)
                facts = sum(len(sample.facts) for sample in asked_prompts)
                sizes = nbytes // len(asked_prompts), fit if store == "folder" else None
                rows.append(
                    StoreFigures(store, codec, count, tokens, *sizes, facts, uncached, found)
                )
                result.write(stores=rows)
    exact_bytes = {row.store: row.bytes_per_prompt for row in rows if row.codec == "exact"}
    for row in rows:
        fitting = "" if row.fit is None else f"; {row.fit} of {row.prompts} fit in {quota} MB"
        click.echo(
            f"{row.store}, {row.codec}: {row.bytes_per_prompt / 1e6:.2f} MB for a prompt, "
            f"{rounded(exact_bytes[row.store] / row.bytes_per_prompt)} times as many{fitting}; "
            f"{row.found} facts found, {row.uncached} without a cache"
        )


if __name__ == "__main__":
    stores()
