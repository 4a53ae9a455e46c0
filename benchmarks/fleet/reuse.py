"""A long prompt that one server has evaluated, taken from an object store by another.

    python -m benchmarks.fleet.reuse --out docs/results/fleet_reuse.json

Two engines in turn, with nothing in common but a server of S3 in a process of its own (moto, on
this machine): the first evaluates the prompt, and its blocks go to the store; the second takes them
from there, reads a short question after them, and writes one token. Against that, an engine without
a store.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import click

from benchmarks.command import out_option
from benchmarks.figures import rounded
from benchmarks.fleet.servers import object_store
from benchmarks.machine import describe_machine
from kvkeep import Model, load_model
from kvkeep.engine import Engine, GenerationRequest
from kvkeep.evaluate.haystack import manual_text
from kvkeep.storage.files.atomic import write_json
from kvkeep.storage.objects import ObjectStore, open_object_store
from kvkeep.storage.prefixes.shared import SharedPrefixCache

SETTINGS = {"max_kv_size": 8192}


def first_token(model: Model, ids: Sequence[int], shared: SharedPrefixCache | None) -> float:
    """Seconds to the first token, in a new engine; what it leaves in the store is there then."""
    with Engine(model, settings=SETTINGS, stores=shared.for_owner if shared else None) as engine:
        begun = time.perf_counter()
        engine.generate(GenerationRequest(tuple(ids), 1, ignore_eos=True)).text()
        spent = time.perf_counter() - begun
    if shared is not None:
        shared.flush()
    return spent


def latencies(objects: ObjectStore) -> tuple[float, float]:
    """Seconds of a put and of a get of 1 kB."""
    puts, gets = list[float](), list[float]()
    for number in range(50):
        begun = time.perf_counter()
        objects.put(f"latency/{number}", bytes(1000))
        puts.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        objects.get(f"latency/{number}")
        gets.append(time.perf_counter() - begun)
    return median(puts), median(gets)


@click.command()
@click.option("--tokens", default=4096, help="Of the prompt that both have.")
@click.option("--question", default=16, help="Tokens that come after it.")
@click.option("--rounds", default=5)
@out_option
def main(tokens: int, question: int, rounds: int, out: Path | None) -> None:
    """Measure what a prompt costs that another server has evaluated."""
    model = load_model()
    text = model.text.encode(manual_text())
    alone, stored, reused = list[float](), list[float](), list[float]()
    with object_store() as url:
        objects = open_object_store(url)
        put, get = latencies(objects)
        for number in range(rounds):
            ids, secret = text[1000 * number :][: tokens + question], secrets.token_bytes(32)
            alone.append(first_token(model, ids, None))
            stored.append(
                first_token(model, ids, SharedPrefixCache(objects, secret, model.arithmetic))
            )
            reused.append(
                first_token(model, ids, SharedPrefixCache(objects, secret, model.arithmetic))
            )
            click.echo(f"{alone[-1]:.2f} s, stored {stored[-1]:.2f}, reused {reused[-1]:.2f}")
        size = sum(stored.size for stored in objects.list_objects("prefixes/")) / rounds
    ratio = median(a / b for a, b in zip(alone, reused, strict=True))
    click.echo(f"{ratio:.1f} times as fast; a put {1e3 * put:.1f} ms, a get {1e3 * get:.1f} ms")
    result = {
        "machine": asdict(describe_machine()),
        "tokens": tokens,
        "question": question,
        "evaluated": rounded(median(alone)),
        "evaluated_and_stored": rounded(median(stored)),
        "reused": rounded(median(reused)),
        "ratio": rounded(ratio),
        "bytes": round(size),
        "put": rounded(put),
        "get": rounded(get),
    }
    write_json(out, result)


if __name__ == "__main__":
    main()
