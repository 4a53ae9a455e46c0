"""Grids: every compression method at every ratio on every task, on the same samples."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.facts import Sample, Samples
from kvkeep.evaluate.recall import Recall, recall, way
from kvkeep.types import KvBits

if TYPE_CHECKING:
    from kvkeep.compression.calibration.calibration import Calibration
    from kvkeep.model import Model
    from kvkeep.session.session import Session

UNCOMPRESSED = "uncompressed"  # in the place of a method, at ratio 1


@dataclass(frozen=True)
class Setting:
    """The setting of one result. seed, sample: identify the text of the task."""

    task: str
    seed: int
    sample: int
    method: str
    ratio: float


@dataclass(frozen=True)
class Reading:
    """The result of one sample in one setting.

    found: whether every question was answered; None for a continuation. log_probability: the mean
    of a token of the answer or continuation. cells, nbytes: held when the question was asked.
    """

    of: Setting
    found: bool | None
    log_probability: float
    cells: int
    nbytes: int


@dataclass
class Grid:
    """The results of a grid, one for each setting.

    about: what they have in common, such as the model. asked: the options of the run, so that the
    missing results can be measured later.
    """

    about: dict[str, Any]
    readings: dict[Setting, Reading] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)

    def add(self, reading: Reading) -> None:
        self.readings[reading.of] = reading

    def of(self, task: str, method: str, ratio: float) -> list[Reading]:
        """Return the results of all samples in one field of the grid."""
        wanted = (task, method, ratio)
        return [
            each
            for each in self.readings.values()
            if (each.of.task, each.of.method, each.of.ratio) == wanted
        ]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(of.task for of in self.readings))

    @property
    def methods(self) -> list[str]:
        """The methods, without the uncompressed baseline."""
        found = dict.fromkeys(of.method for of in self.readings)
        return [method for method in found if method != UNCOMPRESSED]

    @property
    def ratios(self) -> list[float]:
        return sorted({of.ratio for of in self.readings if of.method != UNCOMPRESSED})

    def require_same(self, about: Mapping[str, Any]) -> None:
        """Raise InvalidArgument if results with `about` cannot be joined with these."""
        for name in {**self.about, **about}:
            if self.about.get(name) != about.get(name):
                raise InvalidArgument(
                    f"these are of different grids: {name} is {self.about.get(name)!r} in one and "
                    f"{about.get(name)!r} in the other"
                )

    def join(self, other: "Grid") -> None:
        """Add another grid's results; in a setting of both, those of this grid stay.

        Raises InvalidArgument if the two were measured differently.
        """
        self.require_same(other.about)
        self.readings = {**other.readings, **self.readings}

    def as_json(self) -> dict[str, Any]:
        rows = []
        for reading in self.readings.values():
            row = dataclasses.asdict(reading)
            rows.append({**row.pop("of"), **row})
        return {"about": self.about, "asked": self.asked, "readings": rows}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """Return the grid of a JSON object. Raises KeyError, TypeError or AttributeError."""
        grid = cls(dict(found["about"]), asked=dict(found.get("asked", {})))
        names = [each.name for each in dataclasses.fields(Setting)]
        for row in found["readings"]:
            of = Setting(**{name: row.pop(name) for name in names})
            grid.add(Reading(of=of, **row))
        return grid


@dataclass(frozen=True)
class GridPlan:
    """The fields of a grid: all methods at all ratios on all tasks. seed: of the tasks' samples."""

    tasks: Mapping[str, Samples]
    methods: Sequence[str]
    ratios: Sequence[float]
    seed: int = 0

    def missing(self, grid: Grid, task: str, sample: int) -> list[Setting]:
        """Return the settings of a sample that have no result yet, the uncompressed one first."""
        fields = [(UNCOMPRESSED, 1.0)]
        fields += [(method, ratio) for method in self.methods for ratio in self.ratios]
        asked = [Setting(task, self.seed, sample, method, ratio) for method, ratio in fields]
        return [setting for setting in asked if setting not in grid.readings]


def read_sample(
    model: "Model",
    sample: Sample,
    settings: Sequence[Setting],
    calibration: "Calibration | None" = None,
    prefill_step: int = 512,
    kv_bits: KvBits | None = None,
) -> Iterator[Reading]:
    """Prefill a text once, then compress a fork for each setting and ask its questions.

    kv_bits: of all cells, those of the uncompressed session included; None for no quantisation.

    Raises ContextFull if the text is too long for the model, InvalidArgument if nothing of it
    precedes the continuation.
    """
    session = model.session(policy="full", prefill_step=prefill_step, kv_bits=kv_bits)
    ids = model.text.encode(sample.text)
    read = len(ids) - sample.foretold
    if read < 1:
        raise InvalidArgument(
            f"the last {sample.foretold} tokens of a text are foretold; found one of {len(ids)}: "
            "ask for more tokens"
        )
    session.feed(ids[:read])
    for of in settings:
        memory = session.fork()
        if of.method != UNCOMPRESSED:
            method, budget = way(of.method)
            memory.compress(
                of.ratio, method, seed=of.seed + of.sample, calibration=calibration, budget=budget
            )
        yield (
            _reading(of, recall(memory, sample.asked))
            if sample.asked
            else _foretold(of, memory, ids[read:])
        )


def _reading(of: Setting, answered: Recall) -> Reading:
    return Reading(of, answered.found, answered.log_probability, answered.cells, answered.nbytes)


def _foretold(of: Setting, memory: "Session", ids: list[int]) -> Reading:
    cells, nbytes = memory.cache.cells, memory.cache.nbytes
    return Reading(of, None, float(memory.score(ids).mean()), cells, nbytes)
