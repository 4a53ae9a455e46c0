"""Random cases of speculation: sessions and groups, each to the bit as without it.

    python -m tests.speculation_cases --cases 5000 --first 0

A case is a number, from which everything is drawn: the model (attention, local windows, experts,
states), the policies and numbers of bits, compressed cells, forks, sampling, constraints, stops,
and drafts that are right, wrong, or right up to a mistake.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import click
import pytest
import torch

if __name__ == "__main__":  # as tests import each other
    sys.path.insert(0, str(Path(__file__).parent))

from test_small_steps import EXACT, KINDS, PROMPT, SETTINGS, model_of, require_same_bits

from kvkeep import Sampling
from kvkeep.session.checkpoints import num_rewindable
from kvkeep.session.draft_source import DraftSource
from kvkeep.session.drafts import Draft, DraftPlanner, Offer
from kvkeep.session.session import Session
from kvkeep.session.speculation import Speculation, end_check, sample_runs

STATE_KINDS = KINDS[-3:]


@dataclass
class Alternating:
    """A constraint that allows some tokens after an even number of tokens, and others else."""

    limit: int
    count: int = 0

    @property
    def complete(self) -> bool:
        return self.count >= self.limit

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(logits, -torch.inf)
        first = 5 + 3 * (self.count % 2)
        masked[first : first + 2] = logits[first : first + 2]
        return masked

    def accept(self, token: int) -> None:
        assert token in range(5 + 3 * (self.count % 2), 7 + 3 * (self.count % 2))
        self.count += 1


@dataclass
class Generated:
    """One generation: its sampling, and what came of it."""

    sampling: Sampling
    count: int
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    ended: bool = False

    def end_check(self, session: Session) -> Callable[[int], bool]:
        core, stop = session.core, self.sampling.stop
        ends_after = end_check(core, stop, core.model.end_token_ids)

        def check(token: int) -> bool:
            self.ended = ends_after(token) or self.sampling.complete
            return self.ended

        return check

    def may_go_on(self, session: Session) -> bool:
        return len(self.tokens) < self.count and not self.ended and session.room != 0


@dataclass
class Drafts:
    """Drafts from known texts, which are right, or right up to a mistake; or from the text itself.

    known: texts that begin with the tokens of a session.
    """

    random: Random
    known: Collection[Sequence[int]] = ()

    def draft(self, source: DraftSource, next_token: int, count: int) -> Draft | None:
        text = [*source.tokens, next_token]
        continued = next((t for t in self.known if list(t[: len(text)]) == text), ())
        right = [*continued[len(text) :], *range(1, count + 1)][:count]
        size = self.random.randint(1, count)
        right_count = size if self.random.random() < 0.5 else self.random.randrange(size)
        return Draft([*right[:right_count], *range(5, 5 + size - right_count)], 3)

    @contextmanager
    def used(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                DraftSource, "draft", lambda source, token, n: self.draft(source, token, n)
            )
            patch.setattr(DraftPlanner, "choose", whole_drafts)
            yield


def whole_drafts(planner: DraftPlanner, offers: Sequence[Offer], limit: int) -> list[int]:
    """Try all of each draft, within the limit of all."""
    lengths = list[int]()
    for offer in offers:
        count = len(offer.draft.tokens) if offer.draft else 0
        lengths.append(min(count, limit - sum(lengths)))
    return lengths


def sampling_settings(random: Random) -> dict[str, Any]:
    few_tokens = [(token, 60.0) for token in range(20, 20 + random.randint(1, 3))]
    return {
        "temperature": random.choice([0.0, 0.0, 0.7, 1.5]),
        "seed": random.randint(0, 3),
        "top_k": random.choice([0, 0, 30]),
        "top_p": random.choice([1.0, 0.9]),
        "min_p": random.choice([0.0, 0.0, 0.05]),
        "repetition_penalty": random.choice([1.0, 1.2]),
        "repetition_window": random.choice([64, 5]),
        "presence_penalty": random.choice([0.0, 0.5]),
        "frequency_penalty": random.choice([0.0, 0.3]),
        "logit_bias": random.choice([(), few_tokens]),
        "stop": random.choice([(), ("7",), ("a", "zz")]),
    }


def run_case(number: int) -> tuple[int, int]:
    """Run a case, and return how many tokens were accepted and drafted. Raises AssertionError."""
    random = Random(number)
    kind, size = random.choice(KINDS), random.choice([1, 1, 2, 3, 5])
    made = random.random()
    speculating, others = (_sessions(Random(made), kind, size) for _ in range(2))
    drafts, is_known = Drafts(Random(number + 1)), random.random() < 0.7
    accepted = drafted = 0
    for _ in range(random.randint(1, 3)):
        plans = [(sampling_settings(random), random.randint(1, 40)) for _ in others]
        limits = [random.choice([0, 0, 25]) for _ in others]
        expected, found = (
            [
                Generated(Sampling(**how, constraint=Alternating(limit) if limit else None), count)
                for (how, count), limit in zip(plans, limits, strict=True)
            ]
            for _ in range(2)
        )
        for session, plan in zip(others, expected, strict=True):
            _generate_alone(session, plan)
        drafts.known = [session.tokens for session in others]
        with drafts.used() if is_known else nullcontext():
            counts = _generate_together(speculating, found)
        accepted, drafted = accepted + counts[0], drafted + counts[1]
        pairs = list(zip(speculating, others, strict=True))
        for plan, other, pair in zip(found, expected, pairs, strict=True):
            assert plan.tokens == other.tokens
            assert plan.ended == other.ended
            assert all(map(torch.equal, plan.logits, other.logits))
            assert plan.sampling.constraint == other.sampling.constraint
            _require_same(*pair)
        _change(random, pairs)
    return accepted, drafted


def _sessions(random: Random, kind: str, count: int) -> list[Session]:
    """Return sessions of a model, some of which share cells."""
    sessions = list[Session]()
    for _ in range(count):
        if sessions and random.random() < 0.4:
            sessions.append(random.choice(sessions).fork())
            if random.random() < 0.5:
                sessions[-1].feed(PROMPT[7 : 7 + random.randint(1, 20)])
            continue
        name = random.choice(EXACT if kind in STATE_KINDS else sorted(SETTINGS))
        bits = random.choice([None, None, "8", "8/4", "4"])
        session = model_of(kind).session(**{**SETTINGS[name], "kv_bits": bits})
        length, period = random.randint(1, 150), random.choice([4, 7, 900])
        session.feed([PROMPT[i % period] for i in range(length)])
        if name == "full" and length > 40 and random.random() < 0.5:
            session.compress(2.0, random.choice(["knorm", None]), recent=8)
            session.feed(PROMPT[3:5])
        sessions.append(session)
    return sessions


def _generate_alone(session: Session, plan: Generated) -> None:
    """Sample the tokens of a generation one by one."""
    ends_after = plan.end_check(session)
    while plan.may_go_on(session):
        assert session.logits is not None
        plan.logits.append(session.logits)
        plan.tokens.append(session.next_token(plan.sampling))
        ends_after(plan.tokens[-1])


def _generate_together(sessions: Sequence[Session], plans: Sequence[Generated]) -> tuple[int, int]:
    """Sample the tokens of all generations with speculation; return accepted and drafted ones."""
    planner, speculations = DraftPlanner(), list[Speculation]()
    for session, plan in zip(sessions, plans, strict=True):
        speculations.append(Speculation(session.core, plan.sampling, plan.end_check(session)))
    members = list(zip(sessions, plans, speculations, strict=True))
    while working := [each for each in members if each[1].may_go_on(each[0])]:
        limits = [plan.count - len(plan.tokens) for _, plan, _ in working]
        runs = sample_runs([each for _, _, each in working], limits, planner)
        for (_, plan, _), run in zip(working, runs, strict=True):
            plan.tokens += run.tokens
            plan.logits += run.logits
    counts = [each.counts for each in speculations]
    return sum(each.accepted for each in counts), sum(each.drafted for each in counts)


def _change(random: Random, pairs: Sequence[tuple[Session, Session]]) -> None:
    """Rewind, fork or restore some sessions, in the same way with and without speculation."""
    for pair in pairs:
        back = random.randint(0, 2)
        if num_rewindable(pair[0].core.memory) > back + 1:
            for session in pair:
                session.rewind(back)
            _require_same(*pair)
        if random.random() < 0.1:
            restored = [s.core.model.restore(s.snapshot()) for s in pair]
            _require_same(*restored)


def _require_same(one: Session, other: Session) -> None:
    require_same_bits(one, other)
    samplers = [session.core.state.sampler.state() for session in (one, other)]
    assert samplers[0] == samplers[1]
    checkpoints = [session.core.memory.checkpoints.entries for session in (one, other)]
    assert [c.num_tokens for c in checkpoints[0]] == [c.num_tokens for c in checkpoints[1]]


@click.command()
@click.option("--cases", default=5000, show_default=True, help="How many cases to run.")
@click.option("--first", default=0, show_default=True, help="The number of the first one.")
def main(cases: int, first: int) -> None:
    """Run random cases of speculation, and report those that differ."""
    failed, accepted, drafted, started = list[int](), 0, 0, time.perf_counter()
    for number in range(first, first + cases):
        try:
            counts = run_case(number)
            accepted, drafted = accepted + counts[0], drafted + counts[1]
        except Exception as error:
            failed.append(number)
            print(f"case {number} failed: {error!r}", flush=True)
        if (number + 1 - first) % 250 == 0:
            seconds = time.perf_counter() - started
            print(f"{number + 1 - first} cases in {seconds:.0f} s, failed: {failed}", flush=True)
    print(f"{cases} cases from {first}: {accepted} of {drafted} drafted tokens were accepted")
    print(f"{len(failed)} failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
