"""What a model will reach on this machine."""

import time
from dataclasses import dataclass
from statistics import median

from kvkeep.loader import load_model
from kvkeep.model_facts import ModelFacts
from kvkeep.types import DtypeName, WeightsName

_CELLS, _WARM, _TOKENS = 128, 8, 32


@dataclass(frozen=True)
class Outlook:
    """A model that is here. decode: who computes a written token, and why nobody faster.

    bytes_per_token: of weights. most_tokens_per_s: as many as memory can be read for, where few
    tokens are held: a token reads all of these bytes, and its cells. measured_tokens_per_s: None if
    that was not asked for.
    """

    name: str
    decode: str
    bytes_per_token: int
    most_tokens_per_s: float
    measured_tokens_per_s: float | None


def outlook(facts: ModelFacts, bandwidth: float, measured: float | None) -> Outlook:
    """bandwidth: bytes/s."""
    most = bandwidth / facts.bytes_per_token
    return Outlook(facts.name, facts.decode, facts.bytes_per_token, most, measured)


def measured_tokens_per_s(name: str, dtype: DtypeName, weights: WeightsName | None) -> float:
    """Of the model itself: the median of some tokens, few being held. Raises as `load_model`."""
    session = load_model(name, dtype=dtype, weights=weights).session(_CELLS)
    session.feed([1])
    seconds = list[float]()
    for _ in range(_WARM + _TOKENS):
        begun = time.perf_counter()
        session.next_token()
        seconds.append(time.perf_counter() - begun)
    return 1 / median(seconds[_WARM:])
