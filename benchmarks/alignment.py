"""Prompts that an agent rewrote, aligned in place, compared with a fresh evaluation.

    python -m benchmarks.alignment --out docs/results/alignment.json

With `--case` the file keeps what it has of the other cases, so that they can be measured in turn.

The prompt is an agent's session of real text: a system prompt, and turns with a user's message,
thinking, a tool result (docstrings) with a fact in it, and an answer. It is rewritten in one of
several ways, and a session that holds the old prompt is aligned with the new one. The fresh
session's greedy continuation is then fed to both, to compare the predictions of each next token;
and each fact is asked for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, Literal, get_args

import click
from torch import Tensor

from benchmarks.command import Measurement, ResultFile, model_option, out_option
from benchmarks.compaction import MAX_FACTS, draw_facts, passages
from benchmarks.figures import rounded
from kvkeep import Model, Session, load_model
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.recall import Recall, measure_recall
from kvkeep.evaluate.samples import Fact
from kvkeep.session.alignment import DEFAULT_REREAD_SHARE
from kvkeep.session.token_diff import common_length

Case = Literal["header changed", "reminder removed", "thinking dropped", "tools inserted", "all"]
REREADS = (0, 16, 64)
COMPARED_TOKENS = 64
_REMINDER = (
    "<system-reminder>The list of tasks is empty. Do not mention this to the user. Files may have "
    "changed since you read them; read them again before you edit them.</system-reminder>\n"
)
_TOOL = (
    '{"name": "search_%d", "description": "Search the project for a regular expression, and return '
    'the lines that match with their file and number.", "parameters": {"pattern": {"type": '
    '"string"}, "folder": {"type": "string"}}}\n'
)


@dataclass(frozen=True)
class AlignmentReading:
    """The comparison of an aligned session with a fresh one, over several prompts.

    evaluated: share of the prompt, by alignment. exact: the same, by reuse of the common beginning.
    kl: in nats, of the next tokens from a fresh evaluation, the mean. agreement: share of them with
    the same greedy choice. found: of `findable`, the facts that the fresh session finds.
    """

    case: Case
    reread: int
    prompt_tokens: int
    seams: float
    exact: float
    evaluated: float
    kl: float
    agreement: float
    findable: int
    found: int


@dataclass(frozen=True)
class AlignmentSample:
    """An old and a new prompt, what follows the new one by a fresh evaluation, and its recall."""

    old: list[int]
    new: list[int]
    facts: Sequence[Fact]
    fresh: Session
    continuation: list[int]
    log_probs: list[Tensor]
    recall: Recall


def prompt(model: Model, case: Case, changed: bool, facts: Sequence[Fact], seed: int) -> list[int]:
    """Return the tokens of an agent's session, before or after it was rewritten."""
    rng, text_of = Random(seed), passages(Random(seed))

    def is_rewritten(one: Case) -> bool:
        return changed and case in (one, "all")

    day = "Friday, 14 August" if is_rewritten("header changed") else "Monday, 3 August"
    tools = [_TOOL % number for number in range(4)]
    inserted = [_TOOL % number for number in range(10, 12)]
    tools[2:2] = inserted if is_rewritten("tools inserted") else []
    system = f"Session {rng.randrange(10**6)}, {day}.\nYou are an agent.\n{''.join(tools)}"
    parts = [("system", system + next(text_of))]
    for number, fact in enumerate(facts):
        has_reminder = number % 3 == 0 and not is_rewritten("reminder removed")
        reminder = _REMINDER if has_reminder else ""
        parts.append(("user", f"{reminder}Please continue with step {number + 1}."))
        thinking = f"<think>\n{next(text_of)[:300]}\n</think>\n"
        keeps_thinking = not is_rewritten("thinking dropped")
        call = f'{{"name": "search_1", "arguments": {{"pattern": "step {number}"}}}}'
        parts.append(("assistant", (thinking if keeps_thinking else "") + call))
        parts.append(("tool", f"{next(text_of)} {fact.sentence} {next(text_of)}"))
        parts.append(("assistant", f"Step {number + 1} is done."))
    parts.append(("user", "Summarise what you have found." if changed else "Go on."))
    rendered = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in parts)
    return model.text.encode(f"{rendered}<|im_start|>assistant\n", special=True)


def sample(model: Model, case: Case, fact_count: int, seed: int) -> AlignmentSample:
    """Evaluate the new prompt in a fresh session."""
    facts = draw_facts(Random(seed), fact_count)
    old, new = (prompt(model, case, changed, facts, seed) for changed in (False, True))
    fresh = model.session(policy="full")
    fresh.feed(new)
    continuation, log_probs = list[int](), list[Tensor]()
    session = fresh.fork()
    for _ in range(COMPARED_TOKENS):
        log_probs.append(next_log_probs(session))
        continuation.append(int(log_probs[-1].argmax()))
        session.feed(continuation[-1:])
    recall = measure_recall(fresh, facts)
    return AlignmentSample(old, new, facts, fresh, continuation, log_probs, recall)


def measure(
    model: Model, case: Case, samples: Sequence[AlignmentSample], share: float
) -> list[AlignmentReading]:
    """Align a session of each sample's old prompt with its new one, for each `reread`.

    share: `reread_share`.
    """
    figures: dict[int, list[dict[str, float]]] = {reread: [] for reread in REREADS}
    for each in samples:
        source = model.session(policy="full")
        source.feed(each.old)
        exact = len(each.new) - common_length(each.old, each.new)
        for reread in REREADS:
            aligned = source.fork()
            report = aligned.align(each.new, min_saved=0, reread=reread, reread_share=share)
            answers = measure_recall(aligned, each.facts).answers
            pairs = list(zip(each.recall.answers, answers, strict=True))
            figures[reread].append(
                {
                    "seams": report.seams,
                    "exact": exact / len(each.new),
                    "evaluated": report.evaluated / len(each.new),
                    **compare(aligned, each),
                    "findable": sum(fresh.found for fresh, _ in pairs),
                    "found": sum(fresh.found and other.found for fresh, other in pairs),
                }
            )
    prompt_tokens = round(mean(len(each.new) for each in samples))
    return [
        AlignmentReading(
            case,
            reread,
            prompt_tokens,
            findable=sum(int(each["findable"]) for each in rows),
            found=sum(int(each["found"]) for each in rows),
            **{
                name: rounded(mean(each[name] for each in rows))
                for name in ("seams", "exact", "evaluated", "kl", "agreement")
            },
        )
        for reread, rows in figures.items()
    ]


def compare(aligned: Session, each: AlignmentSample) -> dict[str, float]:
    """Compare the predictions along the fresh session's continuation."""
    session, divergences, agreements = aligned.fork(), list[float](), list[bool]()
    for token, expected in zip(each.continuation, each.log_probs, strict=True):
        log_probs = next_log_probs(session)
        divergences.append(float((expected.exp() * (expected - log_probs)).sum()))
        agreements.append(int(log_probs.argmax()) == token)
        session.feed([token])
    return {"kl": mean(divergences), "agreement": mean(agreements)}


def next_log_probs(session: Session) -> Tensor:
    """Return the log probabilities of the next token, `[vocab]` float64."""
    assert session.logits is not None
    return session.logits.double().log_softmax(-1)


def table(readings: Sequence[AlignmentReading]) -> str:
    lines = [
        f"{'case':<17} {'reread':>6} {'seams':>5} {'exact':>7} {'in place':>8} {'KL':>8} "
        f"{'top-1':>7} {'found':>7}"
    ]
    lines += [
        f"{r.case:<17} {r.reread:>6} {r.seams:>5.1f} {r.exact:>7.1%} {r.evaluated:>8.1%} "
        f"{r.kl:>8.4f} {r.agreement:>7.1%} {f'{r.found}/{r.findable}':>7}"
        for r in readings
    ]
    return "\n".join(lines)


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option(
    "--facts", default=6, type=click.IntRange(1, MAX_FACTS), help="Turns, each with a fact."
)
@click.option("--prompts", default=2, type=click.IntRange(1), help="Prompts of each case.")
@click.option("--share", default=DEFAULT_REREAD_SHARE, help="Of the prompt: `reread_share`.")
@click.option("--case", "cases", multiple=True, type=click.Choice(get_args(Case)))
@out_option
def alignment(
    name: str, facts: int, prompts: int, share: float, cases: tuple[Case, ...], out: Path | None
) -> None:
    """Compare prompts that are aligned in place with a fresh evaluation."""
    settings = {"model": name, "facts": facts, "prompts": prompts, "share": share}
    result = ResultFile(out, settings=settings)
    readings = read_readings(out, settings) if cases else []
    model = load_model(name)
    for case in cases or get_args(Case):
        samples = [sample(model, case, facts, seed) for seed in range(prompts)]
        measured = measure(model, case, samples, share)
        readings = [reading for reading in readings if reading.case != case] + measured
        click.echo(table(measured))
        result.write(readings=readings)


def read_readings(path: Path | None, settings: Mapping[str, Any]) -> list[AlignmentReading]:
    """Return the readings of an earlier run. Raises InvalidArgument if its settings differ."""
    if path is None or not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        readings = [AlignmentReading(**entry) for entry in content["readings"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{path} is no result of this benchmark: write to another file"
        ) from error
    if (earlier := content.get("settings")) != settings:
        raise InvalidArgument(
            f"{path} has results of other settings, {earlier}: write to another file"
        )
    return readings


if __name__ == "__main__":
    alignment()
