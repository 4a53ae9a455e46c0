"""Grids: every compression method at every ratio on every task, on the same samples."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.recall import CompressionSettings, measure_recall
from kvkeep.evaluate.samples import Sample
from kvkeep.types import KvBits

if TYPE_CHECKING:
    from kvkeep.compression.calibration.calibration import Calibration
    from kvkeep.model import Model
    from kvkeep.session.session import Session

UNCOMPRESSED = "uncompressed"  # the method of the baseline, at ratio 1
_LATER_FIELDS = ("device", "fingerprint")  # of the metadata; files of earlier versions lack them


@dataclass(frozen=True)
class GridSetting:
    """The key of a result: a compression of one sample. seed: of the dataset. sample: its index."""

    task: str
    seed: int
    sample: int
    method: str
    ratio: float


@dataclass(frozen=True)
class GridResult:
    setting: GridSetting
    found: bool | None  # whether all answers are right; None for a continuation
    log_probability: float  # mean over the tokens of the answers, or of the continuation
    cells: int  # held before the first question
    nbytes: int


@dataclass
class Grid:
    metadata: dict[str, Any]  # common to all results, such as the model
    results: dict[GridSetting, GridResult] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the run, to resume it

    def add(self, result: GridResult) -> None:
        self.results[result.setting] = result

    def select(self, task: str, method: str, ratio: float) -> list[GridResult]:
        key, results = (task, method, ratio), self.results.items()
        return [result for s, result in results if (s.task, s.method, s.ratio) == key]

    def missing_settings(
        self, task: str, seed: int, sample: int, methods: Sequence[str], ratios: Sequence[float]
    ) -> list[GridSetting]:
        """Return a sample's settings without a result, the uncompressed one first."""
        variants = [(UNCOMPRESSED, 1.0), *itertools.product(methods, ratios)]
        settings = [GridSetting(task, seed, sample, *variant) for variant in variants]
        return [setting for setting in settings if setting not in self.results]

    def baseline(self, task: str) -> list[GridResult]:
        return self.select(task, UNCOMPRESSED, 1)

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(setting.task for setting in self.results))

    @property
    def methods(self) -> list[str]:
        methods = dict.fromkeys(setting.method for setting in self.results)
        return [method for method in methods if method != UNCOMPRESSED]

    @property
    def ratios(self) -> list[float]:
        return sorted({setting.ratio for setting in self.results if setting.method != UNCOMPRESSED})

    def require_same_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Raise InvalidArgument if other results, with this metadata, cannot be merged.

        Fields that files of earlier releases lack are taken over.
        """
        names = {**self.metadata, **metadata}
        for name in _LATER_FIELDS:
            if name not in self.metadata or name not in metadata:
                names.pop(name, None)
        for name in names:
            if self.metadata.get(name) != metadata.get(name):
                raise InvalidArgument(
                    f"the results are from different grids: {name} is {self.metadata.get(name)!r} "
                    f"in one and {metadata.get(name)!r} in the other"
                )
        for name in _LATER_FIELDS:
            if name in metadata:
                self.metadata.setdefault(name, metadata[name])

    def merge(self, other: "Grid") -> None:
        """Add another grid's results for missing settings. Raises as `require_same_metadata`."""
        self.require_same_metadata(other.metadata)
        self.results = {**other.results, **self.results}

    def as_json(self) -> dict[str, Any]:
        rows = []
        for result in self.results.values():
            row = dataclasses.asdict(result)
            rows.append({**row.pop("setting"), **row})
        return {"about": self.metadata, "asked": self.options, "readings": rows}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Return the grid of a JSON object. Raises KeyError, TypeError or AttributeError."""
        grid = cls(dict(content["about"]), options=dict(content.get("asked", {})))
        setting_names = [item.name for item in dataclasses.fields(GridSetting)]
        for row in content["readings"]:
            setting = GridSetting(**{name: row.pop(name) for name in setting_names})
            grid.add(GridResult(setting, **row))
        return grid


def measure_sample(
    model: "Model",
    sample: Sample,
    settings: Sequence[GridSetting],
    calibration: "Calibration | None" = None,
    prefill_step: int = 512,
    kv_bits: KvBits | None = None,
    skip: Callable[[GridSetting, InvalidArgument], None] | None = None,
) -> Iterator[GridResult]:
    """Prefill a text once, and measure a compressed fork for each setting.

    kv_bits: of all cells, also the uncompressed ones. skip: called for each setting that this text
    cannot be compressed with, which is then left out; None to raise InvalidArgument. Raises
    ContextFull if the text is too long for the model, InvalidArgument if it has no tokens before
    the continuation.
    """
    session = model.session(policy="full", prefill_step=prefill_step, kv_bits=kv_bits)
    ids = model.text.encode(sample.text)
    context_tokens = len(ids) - sample.continuation_tokens
    if context_tokens < 1:
        raise InvalidArgument(
            f"the perplexity of the last {sample.continuation_tokens} tokens is measured, but the "
            f"text has only {len(ids)} tokens: ask for more"
        )
    session.feed(ids[:context_tokens])
    for setting in settings:
        fork = session.fork()
        if setting.method != UNCOMPRESSED:
            seed = setting.seed + setting.sample
            compression = CompressionSettings(setting.method, setting.ratio, seed, calibration)
            try:
                compression.compress(fork)
            except InvalidArgument as error:
                if skip is None:
                    raise
                skip(setting, error)
                continue
        yield _measure(fork, setting, sample, ids[context_tokens:])


def _measure(
    session: "Session", setting: GridSetting, sample: Sample, continuation: Sequence[int]
) -> GridResult:
    """Ask for the sample's facts; of a sample without any, score the token ids that follow."""
    cells, nbytes = session.cache.cells, session.cache.nbytes
    if sample.facts:
        recall = measure_recall(session, sample.facts)
        return GridResult(setting, recall.found, recall.log_probability, cells, nbytes)
    return GridResult(setting, None, float(session.score(continuation).mean()), cells, nbytes)
