"""Many documents asked one thing: `kvkeep batch` beside one `kvkeep generate` after another.

Both have the prompts in the prefix cache, which a first, unmeasured round fills; a third way has no
cache at all. Every text of the batch is compared with that of the command by itself.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep import load_model
from kvkeep.evaluate.manual import manual_text
from kvkeep.model import Model
from kvkeep.models.hub.source import home
from kvkeep.storage.files.atomic import write_json

QUESTION = "\n\nIn one sentence, the text above is about"


@dataclass(frozen=True)
class Found:
    """Seconds of each way, for all documents. equal: texts of the batch that are the command's."""

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
    """Pieces of the manual, of lengths from the shortest to the longest, in tokens."""
    ids, draw, found = model.text.encode(manual_text()), random.Random(0), list[str]()
    for number in range(count):
        length = shortest + (longest - shortest) * number // max(1, count - 1)
        first = draw.randrange(len(ids) - length)
        found.append(model.text.decode(ids[first : first + length]).strip("\ufffd"))
    return found


def compare(
    texts: Sequence[str], name: str, written: int, folder: Path, done: Callable[[int], None]
) -> tuple[float, float, float, int]:
    """Seconds one by one, of the batch, of the batch without a cache; and equal texts."""
    common = ("-m", name, "-n", str(written), "--temperature", "0", "-q")
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"id": str(n), "prompt": text}) for n, text in enumerate(texts)]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    files = [folder / f"{number}.txt" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    alone: list[str] = []
    seconds = 0.0
    for measured in (False, True):
        begun = time.perf_counter()
        for file in files:
            said = _kvkeep(folder, "generate", "-f", str(file), "--prefix-cache", *common)
            if measured:
                alone.append(said)
            done(1)
        seconds = time.perf_counter() - begun
    times = list[float]()
    for number, cached in enumerate((("--prefix-cache",), ())):
        out = folder / f"out-{number}.jsonl"
        begun = time.perf_counter()
        _kvkeep(folder, "batch", str(prompts), "-o", str(out), *cached, *common)
        times.append(time.perf_counter() - begun)
        done(1)
    answers = [json.loads(line) for line in (folder / "out-0.jsonl").read_text().splitlines()]
    together = {int(each["id"]): each["text"] for each in answers}
    equal = sum(together[n].rstrip("\n") == said.rstrip("\n") for n, said in enumerate(alone))
    return seconds, times[0], times[1], equal


def _kvkeep(home: Path, *arguments: str) -> str:
    """What a command of its own says on standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep", *arguments],
        env=os.environ | {"KVKEEP_HOME": str(home)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.decode()


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--count", default=20, type=click.IntRange(2), help="Documents.")
@click.option("--shortest", default=1_000, type=click.IntRange(16), help="Of them, in tokens.")
@click.option("--longest", default=4_000, type=click.IntRange(16), help="Of them, in tokens.")
@click.option("--written", default=64, type=click.IntRange(1), help="Tokens of an answer.")
@model_option
@out_option
def batch(
    count: int, shortest: int, longest: int, written: int, name: str, out: Path | None
) -> None:
    """Print the seconds that each way takes, and how many texts are equal."""
    check_outputs(out)
    model = load_model(name, progress=True)
    texts = [text + QUESTION for text in documents(model, count, shortest, longest)]
    tokens = sum(len(model.text.encode(text)) for text in texts)
    del model
    with (
        tempfile.TemporaryDirectory() as folder,
        bar(2 * count + 2, "commands", unit=" runs") as shown,
    ):
        place = Path(folder)
        for each in home().iterdir():  # the models, but no prefixes
            if each.is_dir() and each.name != "prefixes":
                (place / each.name).symlink_to(each)
        found = Found(count, tokens, *compare(texts, name, written, place, shown))
    click.echo(
        f"{count} documents, {tokens:,} tokens: one by one {found.one_by_one:.1f} s, batch "
        f"{found.batch:.1f} s ({found.ratio:.1f} times as fast; {found.batch_cold:.1f} s without a "
        f"cache); {found.equal} of {count} texts equal"
    )
    settings = {"model": name, "written": written, "shortest": shortest, "longest": longest}
    result = {
        "machine": asdict(describe_machine()),
        "settings": settings,
        "found": {
            **{what: rounded(value) for what, value in asdict(found).items()},
            "ratio": rounded(found.ratio),
        },
    }
    write_json(out, result)


if __name__ == "__main__":
    batch()
