"""Prefix pins: sessions that requests protect from eviction for some time.

A pin belongs to an owner, and to the session that holds the pinned tokens. Pinned sessions are
evicted only when nothing else is left, those whose pins expire first before others: a pin never
breaks the memory limit. Times are of a monotonic clock, so that setting the clock changes none.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from kvkeep import validation
from kvkeep.engine.record import SessionRecord
from kvkeep.errors import InvalidArgument, NoSuchPin
from kvkeep.session.history import History
from kvkeep.session.token_diff import common_length

MAX_PIN_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class PinRequest:
    """A request to pin the first tokens of the session that a generation leaves.

    tokens: how many; None for all. key: a client's name for the conversation: a later pin of the
    same key replaces this one, and prompts with the key prefer the session.
    """

    seconds: float
    tokens: int | None = None
    key: str = ""

    def __post_init__(self) -> None:
        validation.optional_integer("tokens", self.tokens, 1)
        if not 0 < self.seconds <= MAX_PIN_SECONDS:
            raise InvalidArgument(
                f"a pin lasts more than 0 and at most {MAX_PIN_SECONDS:,.0f} seconds; found "
                f"{self.seconds!r}"
            )


@dataclass(frozen=True)
class PrefixPin:
    """A pinned prefix of a session. Prompts that begin with it extend its time."""

    id: str
    owner: str
    record: SessionRecord  # of the session
    text: History = field(repr=False)  # the pinned tokens
    seconds: float  # from the last use to the expiry
    expires: float  # on the clock of `PrefixPins`
    key: str = ""  # of the client
    digest: str = ""  # of the tokens; "" if there is a key
    hits: int = 0  # prompts that began with it

    @property
    def tokens(self) -> int:
        """The number of pinned tokens."""
        return len(self.text)

    def first(self, count: int) -> "PrefixPin":
        """Return the pin of its first `count` tokens."""
        digest = "" if self.key else prefix_digest(self.text, count)
        return replace(self, text=self.text.first(count), digest=digest)


class PrefixPins:
    """The pins of all owners. Used in the engine's thread only."""

    def __init__(self, max_per_owner: int, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.evicted = 0  # pins whose session was evicted before they expired
        self._max_per_owner = max_per_owner
        self._pins: dict[str, list[PrefixPin]] = {}  # by owner

    def __iter__(self) -> Iterator[PrefixPin]:
        """Yield the pins of all owners that have not expired."""
        for owner in list(self._pins):
            yield from self.owned_by(owner)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def owned_by(self, owner: str) -> list[PrefixPin]:
        """Return an owner's pins, those that expire first at the beginning."""
        now = self.clock()
        self._set(owner, [pin for pin in self._pins.get(owner, ()) if pin.expires > now])
        return sorted(self._pins.get(owner, ()), key=lambda pin: pin.expires)

    def session_with_key(self, owner: str, key: str) -> SessionRecord | None:
        """Return the session that was last pinned with the key, until that pin expires."""
        pins = (pin for pin in self.owned_by(owner) if key and pin.key == key)
        return next((pin.record for pin in pins), None)

    def add(self, record: SessionRecord, requests: Sequence[PinRequest]) -> None:
        """Pin prefixes of a session. A prefix that is longer than its text is left out."""
        text, now = record.live.tokens, self.clock()
        for request in requests:
            tokens = len(text) if request.tokens is None else request.tokens
            if not 0 < tokens <= len(text) or not self._max_per_owner:
                continue
            digest = "" if request.key else prefix_digest(text, tokens)
            pin_id = f"pin-{secrets.token_hex(8)}"
            expires = now + request.seconds
            self._add(
                PrefixPin(
                    *(pin_id, record.owner, record, text.first(tokens), request.seconds, expires),
                    *(request.key, digest),
                )
            )

    def _add(self, pin: PrefixPin) -> None:
        """Add a pin in place of the one with its key or tokens, and of those that it covers."""
        owner, kept = pin.owner, list[PrefixPin]()
        for other in self.owned_by(owner):
            if (other.key, other.digest) == (pin.key, pin.digest):
                expires = max(pin.expires, other.expires)
                pin = replace(pin, id=other.id, expires=expires, hits=other.hits)
            elif not _covers(pin, other):
                kept.append(other)
        first = max(0, len(kept) + 1 - self._max_per_owner)
        self._set(owner, [*kept[first:], pin])

    def extend(self, record: SessionRecord, num_tokens: int) -> None:
        """Extend the session's pins of at most `num_tokens` tokens, with which a prompt begins."""
        if record.pinned_until <= (now := self.clock()):
            return
        pins = [
            replace(pin, expires=max(pin.expires, now + pin.seconds), hits=pin.hits + 1)
            if pin.record is record and pin.tokens <= num_tokens
            else pin
            for pin in self.owned_by(record.owner)
        ]
        self._set(record.owner, pins)

    def release(self, pin_id: str, owner: str) -> PrefixPin:
        """Remove a pin by its id. Raises NoSuchPin."""
        pins = self.owned_by(owner)
        released = next((pin for pin in pins if pin.id == pin_id), None)
        if released is None:
            raise NoSuchPin(f"there is no pin {pin_id!r}; it may have expired")
        self._set(owner, [pin for pin in pins if pin is not released])
        return released

    def detach(self, record: SessionRecord) -> list[PrefixPin]:
        """Remove a session's pins; return those that have not expired."""
        pins = self.owned_by(record.owner)
        self._set(record.owner, [pin for pin in pins if pin.record is not record])
        return [pin for pin in pins if pin.record is record]

    def attach(self, record: SessionRecord, pins: Sequence[PrefixPin]) -> None:
        """Give pins from `detach` to the session that replaces theirs."""
        for pin in pins:
            self._add(replace(pin, record=record))

    def keep_to_text(self, record: SessionRecord) -> None:
        """Cut the session's pins to the tokens with which its text still begins.

        Called when the text may have changed. A pin of which none are left is removed.
        """
        if not record.pinned_until:
            return
        text = record.live.tokens.array()
        for pin in self.detach(record):
            num_kept = common_length(pin.text.array(), text)
            if num_kept:
                self._add(pin if num_kept == pin.tokens else pin.first(num_kept))

    def _set(self, owner: str, pins: list[PrefixPin]) -> None:
        """Replace an owner's pins, and set until when their sessions are protected."""
        for pin in self._pins.pop(owner, ()):
            pin.record.pinned_until = 0.0
        for pin in pins:
            pin.record.pinned_until = max(pin.record.pinned_until, pin.expires)
        if pins:
            self._pins[owner] = pins


def _covers(pin: PrefixPin, other: PrefixPin) -> bool:
    """Whether a pin protects the same session at least as long, for more tokens."""
    is_shorter = other.tokens < pin.tokens and other.expires <= pin.expires
    return is_shorter and other.record is pin.record and not (pin.key or other.key)


def prefix_digest(text: History, num_tokens: int) -> str:
    """Return a digest of the first tokens of a text."""
    return blake2b(text.first(num_tokens).array(), digest_size=16).hexdigest()
