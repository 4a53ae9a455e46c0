"""Prompts that were evaluated again from some token on, for who asks why."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.engine.reuse import Match

_AROUND = 40  # tokens that are shown of each text
_numbers = itertools.count(1)


@dataclass(frozen=True)
class TextDifference:
    """Where two texts part: the tokens around it, from `start` of both on. at: the first that
    differs."""

    start: int
    at: int
    prompt: tuple[int, ...]
    nearest: tuple[int, ...]


@dataclass(frozen=True)
class CacheMiss:
    """A prompt of which not all was reused. number: by which it is asked for. when: in seconds
    since 1970. tokens: of the prompt; reused: of those. session: that they are from. reason: see
    `kvkeep.engine.reuse`. differing: None where no text begins like it."""

    number: int
    when: float
    tokens: int
    reused: int
    session: str | None
    reason: str
    difference: TextDifference | None


def text_difference(prompt: Sequence[int], match: Match) -> TextDifference | None:
    """A prompt beside the text that is nearest to it."""
    if match.nearest is None or match.common >= len(prompt):
        return None
    first, last = max(0, match.common - _AROUND), match.common + _AROUND
    shown = tuple(prompt[first:last]), tuple(match.nearest[first:last])
    return TextDifference(first, match.common, *shown)


def cache_miss(prompt: Sequence[int], match: Match) -> CacheMiss:
    name, shown = match.record.name if match.record else None, text_difference(prompt, match)
    number = next(_numbers)
    return CacheMiss(number, time.time(), len(prompt), match.tokens, name, match.reason, shown)
