"""What a benchmark finds: readings round by round, and what they are readings of."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measure:
    """Something that is measured of each variant.

    key: what readings call it, such as "prefill/512". unit: "tokens/s", "ms", "s", "MB" or "x", a
    plain ratio. more: whether more of it is better.
    """

    key: str
    title: str
    unit: str
    more: bool

    @property
    def part(self) -> str:
        return self.key.partition("/")[0]


@dataclass(frozen=True)
class Reading:
    """measure: a key. variant: a label, such as "llama.cpp Q4_0"."""

    measure: str
    variant: str
    round: int
    value: float


@dataclass(frozen=True)
class Trace:
    """A variant's endless run, block by block.

    tokens: written at the end of each block. median_ms, slowest_ms: of the block's tokens.
    held: bytes above what was held with the weights in memory and no context.
    """

    variant: str
    tokens: list[int]
    median_ms: list[float]
    slowest_ms: list[float]
    held: list[int]


@dataclass
class Result:
    """All of a run; it grows as readings come in.

    quick: made at small sizes, for a first look. ended: "whole", "interrupted", or why it failed.
    about: version and settings, by variant. skipped: what was left out, and why.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    measures: list[Measure]
    quick: bool = False
    ended: str = "interrupted"
    about: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Result":
        """Raises KeyError or TypeError for what is not such a result."""
        known = {each.name: found[each.name] for each in dataclasses.fields(cls)}
        known["measures"] = [Measure(**each) for each in known["measures"]]
        known["readings"] = [Reading(**each) for each in known["readings"]]
        known["traces"] = [Trace(**each) for each in known["traces"]]
        return cls(**known)
