"""What a memory answers to questions about what it has read, compressed and not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.evaluate.facts import Fact, Sample
from kvkeep.session.session import Session

if TYPE_CHECKING:
    from kvkeep.compression.calibration.calibration import Calibration
    from kvkeep.compression.methods import Compression
    from kvkeep.model import Model

SPARE = 3  # tokens written beyond those of the key: the model may put a space or a quote before it
ROOM_TO_ASK = 128  # tokens, more than any question and its answer take


@dataclass(frozen=True)
class Answer:
    """text: written greedily after the question. found: whether it begins with the key.

    log_probability: natural, of the key's tokens, their mean; each given those before it.
    """

    text: str
    found: bool
    log_probability: float


@dataclass(frozen=True)
class Recall:
    """What one memory answered. cells, nbytes: held before it was asked."""

    answers: tuple[Answer, ...]
    cells: int
    nbytes: int

    @property
    def found(self) -> bool:
        return all(answer.found for answer in self.answers)

    @property
    def log_probability(self) -> float:
        return sum(answer.log_probability for answer in self.answers) / len(self.answers)


def way(label: str) -> tuple[str, Any]:
    """The method and the budget of "keydiff:heads"; None for a budget that is not said."""
    method, _, budget = label.partition(":")
    return method, budget or None


@dataclass(frozen=True)
class Compressing:
    """How a memory is made smaller.

    method: and how heads share its cells, if that is said: "keydiff" or "keydiff:heads".
    max_kv_size: of a memory that is compressed while it reads; None for as many cells as would be
    left if it were compressed afterwards.
    """

    method: str
    ratio: float
    seed: int = 0
    calibration: "Calibration | None" = None
    max_kv_size: int | None = None

    def cells(self, tokens: int) -> int:
        """Those of a memory that is compressed while it reads so many tokens."""
        return self.max_kv_size or math.ceil(tokens / self.ratio)


@dataclass(frozen=True)
class Outcome:
    """A sample's answers from both memories, and what the compression was like.

    tokens: of the text. uncompressed: None where the whole text does not fit.
    """

    sample: Sample
    tokens: int
    compressed: Recall
    uncompressed: Recall | None
    chunks: "tuple[Compression, ...]"


def recall(session: Session, asked: Sequence[Fact]) -> Recall:
    """Asks for each fact in a fork of its own: the session stays as it is."""
    answers = tuple(_answer(session.fork(), fact) for fact in asked)
    return Recall(answers, session.cache.cells, session.cache.nbytes)


def compress_after_reading(
    model: "Model",
    sample: Sample,
    how: Compressing,
    prefill_step: int = 512,
) -> Outcome:
    """Reads the text whole, asks, and asks again of a fork that was compressed.

    Raises ContextFull where the model cannot read as much.
    """
    session = model.session(policy="full", prefill_step=prefill_step)
    tokens = session.feed(sample.text).tokens
    uncompressed = recall(session, sample.asked)
    compressed = session.fork()
    method, budget = way(how.method)
    report = compressed.compress(
        how.ratio, method, seed=how.seed, calibration=how.calibration, budget=budget
    )
    answered = recall(compressed, sample.asked)
    return Outcome(sample, tokens, answered, uncompressed, report.chunks)


def compress_while_reading(
    model: "Model",
    sample: Sample,
    how: Compressing,
    prefill_step: int = 512,
) -> Outcome:
    """Reads the text twice: into a memory that is compressed as it grows, and into a whole one.

    A text that is longer than the model can read whole is read by the first alone.
    """
    ids, (method, budget) = model.text.encode(sample.text), way(how.method)
    session = model.session(
        how.cells(len(ids)),
        policy="archive",
        prefill_step=prefill_step,
        method=method,
        budget=budget,
        ratio=how.ratio,
        calibration=how.calibration,
    )
    fed = session.feed(ids)
    whole = model.session(policy="full", prefill_step=prefill_step)
    uncompressed = None
    if whole.room is None or fed.tokens + ROOM_TO_ASK <= whole.room:
        whole.feed(ids)
        uncompressed = recall(whole, sample.asked)
    answered = recall(session, sample.asked)
    return Outcome(sample, fed.tokens, answered, uncompressed, fed.compressions)


def _answer(session: Session, fact: Fact) -> Answer:
    session.feed(fact.question)
    scores = session.fork().score(f" {fact.answer}")
    text = "".join(session.stream(len(scores) + SPARE))
    return Answer(text, text.strip().startswith(fact.answer), float(scores.mean()))
