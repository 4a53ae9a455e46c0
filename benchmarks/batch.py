"""`kvkeep batch` against one `kvkeep generate` per document.

Both find the prompts in the prefix cache, filled by an unmeasured first round; a third run uses no
prefix cache. Each text of the batch is compared with the output of the single command.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.command import Measurement, ResultFile, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.progress import bar
from kvkeep import load_model
from kvkeep.evaluate.haystack import manual_text
from kvkeep.model import Model
from kvkeep.models.hub.library import home

QUESTION = "\n\nIn one sentence, the text above is about"


@dataclass(frozen=True)
class Comparison:
    """Seconds for all documents. equal: number of texts that are the same in the batch."""

    documents: int
    tokens: int
    one_by_one: float
    batch: float
    batch_cold: float
    equal: int

    @property
    def ratio(self) -> float:
        return self.one_by_one / self.batch


def documents(model: Model, count: int, shortest: int, longest: int) -> list[str]:
    """Return `count` excerpts of the manual, `shortest` to `longest` tokens long."""
    ids, random_source, texts = model.text.encode(manual_text()), random.Random(0), list[str]()
    for number in range(count):
        length = shortest + (longest - shortest) * number // max(1, count - 1)
        first = random_source.randrange(len(ids) - length)
        texts.append(model.text.decode(ids[first : first + length]).strip("\ufffd"))
    return texts


def compare(
    texts: Sequence[str], name: str, written: int, folder: Path, advance: Callable[[int], None]
) -> Iterator[tuple[str, float]]:
    """Yield the fields of a `Comparison` that are measured, by name."""
    common = ("-m", name, "-n", str(written), "--temperature", "0", "-q", "--no-speculate")
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"id": str(n), "prompt": text}) for n, text in enumerate(texts)]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    files = [folder / f"{number}.txt" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    single_texts: list[str] = []
    seconds = 0.0
    for measured in (False, True):
        start = time.perf_counter()
        for file in files:
            text = _kvkeep(folder, "generate", "-f", str(file), "--prefix-cache", *common)
            if measured:
                single_texts.append(text)
            advance(1)
        seconds = time.perf_counter() - start
    yield "one_by_one", seconds
    for field, cached in (("batch", ("--prefix-cache",)), ("batch_cold", ())):
        out = folder / f"{field}.jsonl"
        start = time.perf_counter()
        _kvkeep(folder, "batch", str(prompts), "-o", str(out), *cached, *common)
        yield field, time.perf_counter() - start
        advance(1)
    answers = [json.loads(line) for line in (folder / "batch.jsonl").read_text().splitlines()]
    batch_texts = {int(answer["id"]): answer["text"] for answer in answers}
    equal = sum(
        batch_texts[n].rstrip("\n") == text.rstrip("\n") for n, text in enumerate(single_texts)
    )
    yield "equal", equal


def _kvkeep(home: Path, *arguments: str) -> str:
    """Run a kvkeep command in a new process; return its standard output."""
    advance = subprocess.run(
        [sys.executable, "-m", "kvkeep", *arguments],
        env=os.environ | {"KVKEEP_HOME": str(home)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return advance.stdout.decode()


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--count", default=20, type=click.IntRange(2), help="Number of documents.")
@click.option(
    "--shortest", default=1_000, type=click.IntRange(16), help="Document length in tokens."
)
@click.option(
    "--longest", default=4_000, type=click.IntRange(16), help="Document length in tokens."
)
@click.option("--written", default=64, type=click.IntRange(1), help="Tokens per answer.")
@model_option
@out_option
def batch(
    count: int, shortest: int, longest: int, written: int, name: str, out: Path | None
) -> None:
    """Compare `kvkeep batch` with single commands: seconds, and how many texts are equal."""
    settings = {"model": name, "written": written, "shortest": shortest, "longest": longest}
    result = ResultFile(out, settings=settings)
    model = load_model(name, progress=True)
    texts = [text + QUESTION for text in documents(model, count, shortest, longest)]
    tokens = sum(len(model.text.encode(text)) for text in texts)
    del model
    with (
        tempfile.TemporaryDirectory() as folder,
        bar(2 * count + 2, "commands", unit=" runs") as shown,
    ):
        home_folder = Path(folder)
        for cached in home().iterdir():  # the models, but no prefixes
            if cached.is_dir() and cached.name != "prefixes":
                (home_folder / cached.name).symlink_to(cached)
        found: dict[str, Any] = {"documents": count, "tokens": tokens}
        for field, value in compare(texts, name, written, home_folder, shown):
            found[field] = value
            result.write(found={field: rounded(value) for field, value in found.items()})
    comparison = Comparison(**found)
    result.write(
        found={field: rounded(value) for field, value in found.items()}
        | {"ratio": rounded(comparison.ratio)}
    )
    click.echo(
        f"{count} documents, {tokens:,} tokens: one by one {comparison.one_by_one:.1f} s, batch "
        f"{comparison.batch:.1f} s ({comparison.ratio:.1f} times as fast; "
        f"{comparison.batch_cold:.1f} s without a cache); "
        f"{comparison.equal} of {count} texts equal"
    )


if __name__ == "__main__":
    batch()
