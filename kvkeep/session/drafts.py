"""Drafts of the next tokens, and how many of them are worth trying.

How long a draft may be depends on how often such drafts were right, on what a row of a forward
costs, and on the other sessions of the forward, which wait for these rows.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.session.ngram_index import MATCH_TOKENS

_WEIGHT = 0.15  # of a new measurement, in averages
_ROW_COST = 0.17  # of one more row, relative to a forward of one, until it is measured
_PRIOR_ROWS = 4  # that were measured count as much as that assumption
_COST_WEIGHT = 0.05  # the least of a new forward, in averages
_WORTH_TRYING = 1.03  # the least expected gain
_MATCH_STEPS = (1, MATCH_TOKENS, 2 * MATCH_TOKENS, 4 * MATCH_TOKENS)  # between kinds of drafts
# Steps without an accepted draft, after which drafts are looked for in one step of four. Looking
# takes time that is wasted on text that repeats nothing; text that begins to repeat usually goes on
# for many tokens, so that finding it up to three steps later costs little.
_PATIENCE, _REST = 16, 4
_FIRST_CREDIT, _CREDIT_PER_TOKEN, _MAX_CREDIT = 1.0, 0.005, 16.0  # see `Acceptance`


@dataclass(frozen=True)
class DraftCounts:
    """Counts of drafted tokens, and of those accepted, since they were sampled."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class SpeculationOptions:
    """Whether generations of an engine try drafts, and how much later others may get their tokens.

    max_delay: see `DraftPlanner`.
    """

    enabled: bool = True
    max_delay: float | None = 0.05


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next, after a run of `matched` tokens that had come before.

    matched: 0 after a token that differs from the repeated text; see `DraftSource`.
    """

    tokens: Sequence[int]
    matched: int


class Acceptance:
    """Estimates how often the next token of a draft is right, from the drafts that were tried.

    Each length of a match, doubled, has an acceptance of its own: no matched token, 1 or 2, 3 to 5,
    6 to 11, and more. If `a` of `n` tokens were right, the estimate moves towards a / (a + 1), or
    1 for all. Without a gain now, a draft is tried again after a pause that doubles each time, and
    is counted in steps in which a draft was found.

    Wrong drafts cannot make a text slower than by 0.5%, and one forward: rows are paid from
    a credit, to which accepted tokens and a small part of each token are added. With a row that
    costs 0.2 of a forward, the first draft has at most 5 tokens; if all are accepted, the credit is
    1 - 5 * 0.2 + 5 + 0.03 = 5.03, for 25 rows.

    pace: the average number of tokens of a step. credit: what drafts may cost from now on, in the
    time of forwards of one row.
    """

    def __init__(self) -> None:
        self.pace, self.credit = 1.0, _FIRST_CREDIT
        self._rates = [0.3, 0.3, 0.45, 0.75, 0.85]
        self._pauses, self._waits = [1] * 5, [0] * 5

    def rate(self, draft: Draft) -> float:
        """Return the probability that a token of a draft is right if those before it are."""
        return self._rates[_kind(draft)]

    def ends_pause(self, draft: Draft) -> bool:
        """Return whether to try a draft that is expected to be wrong; counts the pause."""
        kind = _kind(draft)
        self._waits[kind] += 1
        if self._waits[kind] < self._pauses[kind]:
            return False
        self._waits[kind], self._pauses[kind] = 0, min(256, 2 * self._pauses[kind])
        return True

    def affordable_rows(self, cost: float) -> int:
        """Return how many rows may be tried. cost: of one, relative to a forward of one row."""
        return max(0, int(self.credit / cost))

    def learn(self, draft: Draft | None, tried: int, accepted: int, cost: float) -> None:
        """Take the result of a step into account.

        accepted: of the `tried` tokens of a draft. cost: of a row, as in `affordable_rows`.
        """
        self.pace += _WEIGHT * (1 + accepted - self.pace)
        gain = accepted - cost * tried + _CREDIT_PER_TOKEN * (1 + accepted)
        self.credit = min(self.credit + gain, _MAX_CREDIT)
        if draft is None or not tried:
            return
        kind = _kind(draft)
        rate = 1.0 if accepted == tried else accepted / (accepted + 1)
        self._rates[kind] += _WEIGHT * (rate - self._rates[kind])
        if accepted == tried:
            self._pauses[kind] = 1


class RowCost:
    """Cost of one more row of a forward, relative to a forward of one row: an average.

    value: the cost; an assumption until some rows have been measured.
    """

    def __init__(self) -> None:
        self.value, self._num_rows = _ROW_COST, 0

    def learn(self, rows: int, cost: float) -> None:
        """Take the mean cost of some rows of a forward into account."""
        self._num_rows += rows
        weight = max(_COST_WEIGHT, rows / (self._num_rows + _PRIOR_ROWS))
        self.value += weight * (min(max(cost, 0.02), 1.0) - self.value)


class ForwardTime:
    """Average duration of a forward of one row, and from it the cost of further rows.

    A forward of n rows is expected to take 1 + (n - 1) * cost times as long. Forwards without
    drafts tell the duration, those with drafts the cost. It holds for the same sessions alone: a
    longer text takes longer.
    """

    def __init__(self, cost: RowCost) -> None:
        self._cost, self._num_forwards, self._seconds = cost, 0, 0.0

    def learn(self, rows: int, drafted: int, seconds: float) -> None:
        """Take the duration of a forward into account. drafted: how many of the rows are drafts."""
        if self._num_forwards:
            # One that was interrupted by other work counts no more than twice as long.
            seconds = min(seconds, 2 * self._expected(rows))
            extra = seconds - self._expected(rows - drafted)
            if drafted and extra > 0:
                self._cost.learn(drafted, extra / (self._seconds * drafted))
                return
            if drafted:  # faster than without drafts: earlier ones were slow, as the first can be
                self._num_forwards = 0
        self._num_forwards += 1
        weight = max(_COST_WEIGHT, 1 / self._num_forwards)
        self._seconds += weight * (seconds / (1 + self._cost.value * (rows - 1)) - self._seconds)

    def _expected(self, rows: int) -> float:
        """Return the expected seconds of a forward."""
        return self._seconds * (1 + self._cost.value * (rows - 1))


@dataclass(frozen=True)
class Offer:
    """A session of a forward: its draft, if it has one, and what is known of its drafts."""

    draft: Draft | None
    acceptance: Acceptance


class DraftPlanner:
    """Chooses how many tokens of their drafts the sessions of a forward try.

    The lengths with which most tokens are expected in a second, of all sessions together. But none
    may get its own tokens later by more than `max_delay`, since it has no draft itself and waits
    for the rows of others: relative to a forward without drafts; None for any delay. cost: as it
    was measured so far, if it was.
    """

    def __init__(self, max_delay: float | None = None, cost: RowCost | None = None):
        self.max_delay = max_delay
        self.cost = cost or RowCost()
        self._time, self._sessions = ForwardTime(self.cost), tuple[Acceptance, ...]()
        self._num_steps = 0

    def looks(self, fruitless_steps: Sequence[int | None]) -> bool:
        """Return whether to look for drafts in the next step, for all of its sessions.

        They look together: drafts of one are usually tried only if those that would wait for its
        rows have drafts, too. fruitless_steps: of each, since it accepted a draft; None for one
        that tries none.
        """
        self._num_steps += 1
        counts = [count for count in fruitless_steps if count is not None]
        return bool(counts) and (min(counts) < _PATIENCE or self._num_steps % _REST == 0)

    def choose(self, offers: Sequence[Offer], max_drafted: int) -> list[int]:
        """Return how many tokens of each draft to try. max_drafted: of all together, at most."""
        lengths, best = [0] * len(offers), [0] * len(offers)
        cost, drafted, paces = self.cost.value, 0, [1.0] * len(offers)
        time_without = 1 + cost * (len(offers) - 1)
        best_speed = _WORTH_TRYING * len(offers) / time_without
        limits = [_limit(offer, cost) for offer in offers]
        likely = [
            offer.acceptance.rate(offer.draft) if offer.draft and limit else 0.0
            for offer, limit in zip(offers, limits, strict=True)
        ]
        while drafted < max_drafted:
            index = max(range(len(offers)), key=likely.__getitem__)
            draft, acceptance = offers[index].draft, offers[index].acceptance
            time = time_without + cost * (drafted + 1)
            # More rows pay for as long as the next one is worth more than the average.
            if draft is None or likely[index] / cost <= sum(paces) / (time - cost):
                break
            drafted += 1
            lengths[index] += 1
            paces[index] += likely[index]
            is_end = lengths[index] == limits[index]
            likely[index] = 0.0 if is_end else likely[index] * acceptance.rate(draft)
            speed = sum(paces) / time
            if speed > best_speed and self._is_fair(offers, paces, time / time_without):
                best, best_speed = list(lengths), speed
        if not any(best):
            self._explore(offers, best, max_drafted)
        return best

    def learn(
        self, sessions: Sequence[Acceptance], rows: int, drafted: int, seconds: float
    ) -> None:
        """Take the duration of a forward of some sessions into account: see `ForwardTime`."""
        if self._sessions != (now := tuple(sessions)):
            self._time, self._sessions = ForwardTime(self.cost), now
        self._time.learn(rows, drafted, seconds)

    def _is_fair(self, offers: Sequence[Offer], paces: Sequence[float], slowdown: float) -> bool:
        """Whether no session loses too much. paces: the expected tokens of each in this step."""
        if self.max_delay is None:
            return True
        least = slowdown / (1 + self.max_delay)
        pairs = zip(offers, paces, strict=True)
        return all(max(pace, offer.acceptance.pace) >= least for offer, pace in pairs)

    def _explore(self, offers: Sequence[Offer], lengths: list[int], max_drafted: int) -> None:
        """Try a short draft, now and then, that would not pay if its session were alone either."""
        for index, offer in enumerate(offers):
            if (draft := offer.draft) is None or not (limit := _limit(offer, self.cost.value)):
                continue
            gain = (1 + offer.acceptance.rate(draft)) / (1 + self.cost.value)
            if gain <= _WORTH_TRYING and offer.acceptance.ends_pause(draft):
                lengths[index] = min(2, limit, max_drafted)
                return


def _limit(offer: Offer, cost: float) -> int:
    """Return how many tokens of a session's draft may be tried. cost: of a row."""
    if offer.draft is None:
        return 0
    return min(len(offer.draft.tokens), offer.acceptance.affordable_rows(cost))


def _kind(draft: Draft) -> int:
    """Return the index of the lengths of matches that a draft's is counted with."""
    return bisect_right(_MATCH_STEPS, draft.matched)
