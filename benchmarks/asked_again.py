"""Tokens that an engine evaluates again when a long prompt comes again.

A prompt, the same again, the same with another last question, and a chat of several turns, each
with the result of a tool: as agents send them, the whole text every time. Each answer is compared,
to the bit of its last logits, with that of a new engine which evaluates the whole text.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep import load_model
from kvkeep.engine import Engine, Failed, GeneratedToken, GenerationRequest
from kvkeep.evaluate.haystack import manual_text
from kvkeep.model import Model
from kvkeep.storage.files.atomic import write_json

ANSWER_TOKENS, QUESTION_TOKENS, CALL_TOKENS, RESULT_TOKENS, TURNS = 20, 40, 18, 60, 5


@dataclass(frozen=True)
class Ask:
    """A prompt. shared: how many of its first tokens an earlier prompt had."""

    name: str
    prompt: tuple[int, ...]
    shared: int


@dataclass(frozen=True)
class Answer:
    """One reading. again: shared tokens that were evaluated again. ms: until the first token."""

    name: str
    tokens: int
    shared: int
    again: int
    ms: float
    ms_alone: float
    same_bits: bool


def asks(ids: Sequence[int], tokens: int) -> Iterator[Ask]:
    """Yield the prompts in order. ids: of a text that is long enough for all of them."""
    shared, rest = tuple(ids[: tokens - QUESTION_TOKENS]), iter(ids[tokens - QUESTION_TOKENS :])

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(rest) for _ in range(count))

    first = shared + take(QUESTION_TOKENS)
    yield Ask("new", first, 0)
    yield Ask("the same", first, len(first))
    yield Ask("another question", shared + take(QUESTION_TOKENS), len(shared))
    prompt, num_shared = shared + take(QUESTION_TOKENS), len(shared)
    for turn in range(1, TURNS + 1):
        yield Ask(f"turn {turn}", prompt, num_shared)
        num_shared = len(prompt)
        prompt += take(CALL_TOKENS) + take(RESULT_TOKENS)


def measure(model: Model, tokens: int) -> Iterator[Answer]:
    """Yield the reading of each prompt."""
    ids = model.text.encode(manual_text())
    settings = {"policy": "full", "max_kv_size": tokens + 1000}
    with Engine(model, settings=settings) as engine:
        for ask in asks(ids, tokens):
            ms, reused, logits = _answer(engine, ask.prompt)
            with Engine(model, settings=settings) as new_engine:
                ms_alone, _, logits_alone = _answer(new_engine, ask.prompt)
            same_bits = torch.equal(logits, logits_alone)
            again = max(0, ask.shared - reused)
            size = len(ask.prompt)
            yield Answer(ask.name, size, ask.shared, again, ms, ms_alone, same_bits)


def _answer(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int, torch.Tensor]:
    """Return milliseconds to the first token, reused tokens, and the last logits."""
    logits = list[torch.Tensor | None]()
    request = GenerationRequest(
        prompt,
        ANSWER_TOKENS,
        ignore_eos=True,
        on_end=lambda session, *_: logits.append(session.logits),
    )
    start, seconds = time.perf_counter(), 0.0
    generation = engine.generate(request)
    for event in generation:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, GeneratedToken) and not seconds:
            seconds = time.perf_counter() - start
    engine.call(lambda: None).result()  # what follows a generation is done
    (last,) = logits
    assert last is not None
    return rounded(1000 * seconds), generation.usage.reuse.tokens, last


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--tokens", default=4000, type=click.IntRange(200), help="Of the long prompt.")
@model_option
@out_option
def asked_again(tokens: int, name: str, out: Path | None) -> None:
    """Print how much of prompts that come again is evaluated again."""
    check_outputs(out)
    model, answers = load_model(name, progress=True), list[Answer]()
    click.echo("prompt              tokens   shared    again   first token     alone  bits")
    with bar(3 + TURNS, "prompts", " prompts") as shown:
        for answer in measure(model, tokens):
            answers.append(answer)
            shown(1)
            click.echo(
                f"{answer.name:<18} {answer.tokens:>7,}  {answer.shared:>7,}  {answer.again:>7,}  "
                f"{answer.ms:>9,.0f} ms {answer.ms_alone:>6,.0f} ms  "
                f"{'equal' if answer.same_bits else 'DIFFER'}"
            )
    result = {
        "machine": dataclasses.asdict(describe_machine()),
        "settings": {"model": name, "path": str(model.path), "tokens": tokens},
        "answers": [dataclasses.asdict(answer) for answer in answers],
    }
    write_json(out, result)


if __name__ == "__main__":
    asked_again()
