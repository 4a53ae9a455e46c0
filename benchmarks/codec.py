"""Measures the codecs of snapshots: how much smaller, what they lose, and how fast they are.

    python -m benchmarks.codec --out docs/results/codec.json

A basis is measured on the beginning of Python's manual, or taken from `--home`. Passages of the
manual and of docstrings are prefilled, saved by each codec and restored. The KL divergence is that
of the next 256 tokens from the session that was not saved; facts that were hidden in texts are
asked for before and after. Ratios are of the bytes of keys and values, without logits and tokens;
times of a passage of 4,096 tokens, medians.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median

import click
import torch
from torch import Tensor

from benchmarks.command import (
    Measurement,
    ResultFile,
    model_option,
    out_option,
    parse_lengths,
    require_text,
)
from benchmarks.figures import rounded
from benchmarks.progress import bar
from kvkeep import Session, Snapshot, load_model
from kvkeep.evaluate.basis import measure_basis
from kvkeep.evaluate.datasets import NeedleDataset
from kvkeep.evaluate.haystack import TEXTS, Haystack
from kvkeep.evaluate.recall import measure_recall
from kvkeep.model import Model
from kvkeep.session.evaluation import evaluate
from kvkeep.storage.lossy.basis import add_basis
from kvkeep.storage.snapshots.codec import Codec
from kvkeep.storage.snapshots.header import SNAPSHOT_FORMAT, SNAPSHOT_KIND, read_header

CODECS: tuple[Codec, ...] = ("exact", "zstd", "int8", "small", "smaller")
KL_TOKENS = 256
CALIBRATED_ON = "manual"
TIMED_TOKENS = 4096


@dataclass(frozen=True)
class CodecLoss:
    """One codec, over all passages of a text.

    ratio: times smaller than exact keys and values. kl: in nats, the mean of the next tokens;
    kl_samples: of each passage.
    """

    haystack: str
    tokens: int
    codec: str
    ratio: float
    kl: float
    kl_samples: tuple[float, ...]


@dataclass(frozen=True)
class CodecRecall:
    """Facts that answers after restoring are right about. uncompressed: without saving."""

    haystack: str
    tokens: int
    codec: str
    facts: int
    found: int
    uncompressed: int


@dataclass(frozen=True)
class CodecTimes:
    """Seconds to save and to load a session of 4,096 tokens, and the size of its file."""

    codec: str
    bytes: int
    save: tuple[float, ...]
    load: tuple[float, ...]


def kv_bytes(path: Path) -> int:
    """Return the bytes of keys and values in a file, and of what replaces them."""
    with path.open("rb") as file:
        header = read_header(file, path, SNAPSHOT_KIND, SNAPSHOT_FORMAT)
    parts = (".keys", ".values")
    return sum(
        extent.end - extent.begin
        for name, extent in header.extents.items()
        if any(part in name for part in parts)
    )


def restored(model: Model, session: Session, codec: Codec, path: Path, saves: int = 1) -> Session:
    """Return a session that was saved and restored so many times."""
    for _ in range(saves):
        session.snapshot().save(path, codec)
        session = model.restore(Snapshot.load(path))
    return session


def passages(
    model: Model, haystack: str, tokens: int, count: int, seed: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield passages of so many tokens from random places, each with the tokens that follow."""
    ids, random = model.text.encode(TEXTS[haystack]()), Random(seed)
    for _ in range(count):
        start = random.randrange(len(ids) - tokens - KL_TOKENS)
        end = start + tokens
        yield ids[start:end], ids[end : end + KL_TOKENS]


@torch.inference_mode()
def predict(session: Session, following: list[int]) -> Tensor:
    """Return the log-probabilities of the tokens that follow, `[n, vocab]`."""
    memory = session.core.memory.fork()
    assert memory.hidden is not None
    hidden = [memory.hidden, *(r.hidden for r in evaluate(memory, following, KL_TOKENS))]
    logits: Tensor = memory.decoder.logits(torch.cat(hidden)[:-1])
    return logits.log_softmax(-1)


def measure_loss(
    model: Model, haystack: str, tokens: int, count: int, seed: int, saves: int, folder: Path
) -> list[CodecLoss]:
    path, sizes = folder / "a.kvkeep", {codec: list[int]() for codec in CODECS}
    kl = {codec: list[float]() for codec in CODECS}
    with bar(count, f"{haystack}, {tokens} tokens") as advance:
        for passage, following in passages(model, haystack, tokens, count, seed):
            session = model.session(policy="full")
            session.feed(passage)
            exact = predict(session, following)
            for codec in CODECS:
                other = restored(model, session, codec, path, saves)
                sizes[codec].append(kv_bytes(path))
                difference = exact.exp() * (exact - predict(other, following))
                kl[codec].append(float(difference.sum(-1).mean()))
            advance(1)
    return [
        CodecLoss(
            *(haystack, tokens, codec),
            ratio=rounded(sum(sizes["exact"]) / sum(sizes[codec])),
            kl=rounded(mean(kl[codec])),
            kl_samples=tuple(rounded(value) for value in kl[codec]),
        )
        for codec in CODECS
    ]


def measure_facts(
    model: Model, haystack: str, tokens: int, count: int, seed: int, folder: Path
) -> list[CodecRecall]:
    text = Haystack.from_text(TEXTS[haystack](), lambda sentence: len(model.text.encode(sentence)))
    dataset = NeedleDataset(text, tokens, task="multiquery", seed=seed)
    found, facts, before = dict.fromkeys(CODECS, 0), 0, 0
    with bar(count, f"facts in {haystack}") as advance:
        for index in range(count):
            sample = dataset.sample(index)
            session = model.session(policy="full")
            session.feed(sample.text)
            facts += len(sample.facts)
            before += sum(a.found for a in measure_recall(session, sample.facts).answers)
            for codec in CODECS:
                other = restored(model, session, codec, folder / "a.kvkeep")
                answers = measure_recall(other, sample.facts).answers
                found[codec] += sum(answer.found for answer in answers)
            advance(1)
    return [CodecRecall(haystack, tokens, c, facts, found[c], before) for c in CODECS]


def measure_times(model: Model, repeats: int, folder: Path) -> list[CodecTimes]:
    session = model.session(policy="full")
    session.feed(model.text.encode(TEXTS["docstrings"]())[:TIMED_TOKENS])
    snapshot = session.snapshot()
    saves = {codec: list[float]() for codec in CODECS}
    loads = {codec: list[float]() for codec in CODECS}
    sizes = dict[str, int]()
    for repeat in range(repeats + 1):
        for codec in CODECS:
            path, start = folder / f"{codec}.kvkeep", time.perf_counter()
            sizes[codec] = snapshot.save(path, codec)
            saved = time.perf_counter()
            model.restore(Snapshot.load(path))
            if repeat:  # the first reads the basis
                saves[codec].append(rounded(saved - start))
                loads[codec].append(rounded(time.perf_counter() - saved))
    return [CodecTimes(c, sizes[c], tuple(saves[c]), tuple(loads[c])) for c in CODECS]


@contextmanager
def home_with_basis(model: Model, home: Path | None, tokens: int) -> Iterator[None]:
    """Use a folder with a basis of the model; measure one on the manual in a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        before = os.environ.get("KVKEEP_HOME")
        os.environ["KVKEEP_HOME"] = str(home or temporary)
        try:
            if home is None:
                ids = model.text.encode(TEXTS[CALIBRATED_ON]())[:tokens]
                add_basis(measure_basis(model, ids))
            yield
        finally:
            if before is None:
                del os.environ["KVKEEP_HOME"]
            else:
                os.environ["KVKEEP_HOME"] = before


def table(losses: Sequence[CodecLoss]) -> str:
    lines = ["| Text | tokens | Codec | times smaller | KL |", "|---|---:|---|---:|---:|"]
    lines += [
        f"| {r.haystack} | {r.tokens:,} | {r.codec} | {r.ratio:.1f} | {r.kl:.5f} |" for r in losses
    ]
    return "\n".join(lines)


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--tokens", default="1000,4000", type=parse_lengths, help="Lengths of passages.")
@click.option("--samples", "count", default=8)
@click.option("--saves", default=1, help="How often a passage is saved and restored.")
@click.option("--facts", default=10, help="Texts with hidden facts; 0 for none.")
@click.option("--repeats", default=5, help="Of timed saves and loads; 0 for none.")
@click.option("--calibrated", default=30000, help="Tokens of the manual that the basis is of.")
@click.option("--home", type=click.Path(exists=True, path_type=Path), help="With a basis.")
@click.option("--seed", default=71)
@out_option
def codec(
    name: str,
    tokens: tuple[int, ...],
    count: int,
    saves: int,
    facts: int,
    repeats: int,
    calibrated: int,
    home: Path | None,
    seed: int,
    out: Path | None,
) -> None:
    """Measure ratio, loss, facts found and times of the codecs of snapshots."""
    about = {"model": name, "seed": seed, "samples": count, "saves": saves}
    about["calibrated"] = None if home else calibrated  # tokens; of --home they are unknown
    result = ResultFile(out, about=about)
    model = load_model(name)
    for haystack in TEXTS:
        num_tokens = len(model.text.encode(TEXTS[haystack]()))
        require_text(haystack, num_tokens, max(tokens) + KL_TOKENS + 1)
    losses, recalls, times = list[CodecLoss](), list[CodecRecall](), list[CodecTimes]()
    with home_with_basis(model, home, calibrated), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for haystack in TEXTS:
            for length in tokens:
                losses += measure_loss(model, haystack, length, count, seed, saves, folder)
                result.write(losses=losses, facts=recalls, times=times)
            if facts:
                recalls += measure_facts(model, haystack, 1000, facts, seed, folder)
                result.write(losses=losses, facts=recalls, times=times)
        if repeats:
            times = measure_times(model, repeats, folder)
            result.write(losses=losses, facts=recalls, times=times)
    click.echo(table(losses))
    for row in recalls:
        found = f"{row.found} of {row.facts} facts, {row.uncompressed} without saving"
        click.echo(f"{row.haystack}, {row.codec}: {found}")
    for timed in times:
        seconds = f"{median(timed.save):.3f} s to save, {median(timed.load):.3f} s to load"
        click.echo(f"{timed.codec}: {timed.bytes / 1e6:.1f} MB, {seconds}")


if __name__ == "__main__":
    codec()
