"""Every method of compression at every ratio on every task, on the same samples."""

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
    """What a reading is of. seed, sample: which text of the task."""

    task: str
    seed: int
    sample: int
    method: str
    ratio: float


@dataclass(frozen=True)
class Reading:
    """found: every question of the sample answered; None where the text's end is foretold.

    log_probability: of a token of a key, or of that end. cells, nbytes: held when it was asked.
    """

    of: Setting
    found: bool | None
    log_probability: float
    cells: int
    nbytes: int


@dataclass
class Grid:
    """Readings, none of them twice. about: what they have in common, such as the model. asked: all
    that was asked for, so that what is left of it can be measured later.

    It grows as readings come in.
    """

    about: dict[str, Any]
    readings: dict[Setting, Reading] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)

    def add(self, reading: Reading) -> None:
        self.readings[reading.of] = reading

    def of(self, task: str, method: str, ratio: float) -> list[Reading]:
        """All samples of one field of the grid."""
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
        """Without the uncompressed one."""
        found = dict.fromkeys(of.method for of in self.readings)
        return [method for method in found if method != UNCOMPRESSED]

    @property
    def ratios(self) -> list[float]:
        return sorted({of.ratio for of in self.readings if of.method != UNCOMPRESSED})

    def require_same(self, about: Mapping[str, Any]) -> None:
        """Raises InvalidArgument where readings made under `about` do not belong to these."""
        for name in {**self.about, **about}:
            if self.about.get(name) != about.get(name):
                raise InvalidArgument(
                    f"these are of different grids: {name} is {self.about.get(name)!r} in one and "
                    f"{about.get(name)!r} in the other"
                )

    def join(self, other: "Grid") -> None:
        """Takes over another grid's readings; of the same setting, the ones here stay.

        Raises InvalidArgument where the two were not made alike.
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
        """Raises KeyError, TypeError or AttributeError for what is no grid."""
        grid = cls(dict(found["about"]), asked=dict(found.get("asked", {})))
        names = [each.name for each in dataclasses.fields(Setting)]
        for row in found["readings"]:
            of = Setting(**{name: row.pop(name) for name in names})
            grid.add(Reading(of=of, **row))
        return grid


@dataclass(frozen=True)
class GridPlan:
    """tasks: by name. methods, ratios: each with each. seed: that the tasks' samples come of."""

    tasks: Mapping[str, Samples]
    methods: Sequence[str]
    ratios: Sequence[float]
    seed: int = 0

    def missing(self, grid: Grid, task: str, sample: int) -> list[Setting]:
        """What there is to measure of a sample; the uncompressed one first."""
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
    """Reads a text once, then compresses a fork of that memory in each way and asks it.

    kv_bits: that all cells are kept in, those of the uncompressed memory, too; None for all bits.

    Raises ContextFull where the model cannot read as much, InvalidArgument for a text of which
    nothing is left to read.
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
