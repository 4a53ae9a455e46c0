"""Reuse of a long prompt between servers through an object store.

    python -m benchmarks.fleet.reuse --out docs/results/fleet_reuse.json

Two engines, one after the other, share only an S3 server (moto, in its own process on this
machine): the first evaluates the prompt and stores its blocks; the second loads them, prefills a
short question after them, and generates one token. Compared with an engine without a store.
"""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click

from benchmarks.command import Measurement, ResultFile, out_option
from benchmarks.figures import rounded
from benchmarks.fleet.servers import object_store
from kvkeep import Model, load_model
from kvkeep.engine import Engine, GenerationRequest
from kvkeep.evaluate.haystack import manual_text
from kvkeep.storage.objects import ObjectStore, open_object_store
from kvkeep.storage.prefixes.shared import SharedPrefixCache

SETTINGS = {"max_kv_size": 8192}


def first_token(model: Model, ids: Sequence[int], shared: SharedPrefixCache | None) -> float:
    """Return the seconds to the first token in a new engine; its blocks are stored afterwards."""
    with Engine(model, settings=SETTINGS, stores=shared.for_owner if shared else None) as engine:
        start = time.perf_counter()
        engine.generate(GenerationRequest(tuple(ids), 1, ignore_eos=True)).text()
        seconds = time.perf_counter() - start
    if shared is not None:
        shared.flush()
    return seconds


def latencies(objects: ObjectStore) -> tuple[float, float]:
    """Return the seconds of a put and of a get of 1 kB."""
    puts, gets = list[float](), list[float]()
    for index in range(50):
        start = time.perf_counter()
        objects.put(f"latency/{index}", bytes(1000))
        puts.append(time.perf_counter() - start)
        start = time.perf_counter()
        objects.get(f"latency/{index}")
        gets.append(time.perf_counter() - start)
    return median(puts), median(gets)


@click.command(cls=Measurement)
@click.option("--tokens", default=4096, type=click.IntRange(1), help="Length of the shared prompt.")
@click.option(
    "--question", default=16, type=click.IntRange(1), help="Length of the question, in tokens."
)
@click.option("--rounds", default=5, type=click.IntRange(1))
@out_option
def main(tokens: int, question: int, rounds: int, out: Path | None) -> None:
    """Measure the time to first token with a prompt that another server has evaluated."""
    result = ResultFile(out, tokens=tokens, question=question)
    model = load_model()
    text = model.text.encode(manual_text())
    alone, stored, reused = list[float](), list[float](), list[float]()
    with object_store() as url:
        objects = open_object_store(url)
        put, get = latencies(objects)
        for index in range(rounds):
            ids, secret = text[1000 * index :][: tokens + question], secrets.token_bytes(32)
            alone.append(first_token(model, ids, None))
            stored.append(
                first_token(model, ids, SharedPrefixCache(objects, secret, model.arithmetic))
            )
            reused.append(
                first_token(model, ids, SharedPrefixCache(objects, secret, model.arithmetic))
            )
            click.echo(f"{alone[-1]:.2f} s, stored {stored[-1]:.2f}, reused {reused[-1]:.2f}")
            size = sum(x.st_size for x in objects.list_objects("prefixes/")) / (index + 1)
            ratio = median(a / b for a, b in zip(alone, reused, strict=True))
            result.write(
                rounds=index + 1,
                evaluated=rounded(median(alone)),
                evaluated_and_stored=rounded(median(stored)),
                reused=rounded(median(reused)),
                ratio=rounded(ratio),
                bytes=round(size),
                put=rounded(put),
                get=rounded(get),
            )
    click.echo(f"{ratio:.1f} times as fast; a put {1e3 * put:.1f} ms, a get {1e3 * get:.1f} ms")


if __name__ == "__main__":
    main()
