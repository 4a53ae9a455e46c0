"""The head of a session: the one object that says what the session is, and who may change it."""

import json
import math
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvkeep.errors import CorruptFile, NewerFormat

FORMAT = 1
_KINDS = {
    "epoch": int,
    "gen": int,
    "nonce": str,
    "writer": str,
    "expires": float,
    "snapshot": str,
    "removed": bool,
    "past": list,
}
_PAST = 16  # commits that are remembered


@dataclass(frozen=True)
class SessionHead:
    """One version of a session's head.

    epoch: grows with each writer that takes the session. gen: of the last commit; 0 before any.
    nonce: of this version alone, so that no two are equal and each writer knows its own. writer:
    who holds the session, as others are told; "" for nobody. expires: seconds since 1970 from which
    on another may take it: by the writer's clock, a hint for those who wait, on which no safety
    rests. snapshot: the name of what was committed last; "" for nothing. removed: that there is no
    such session any more; the head stays, so that no epoch comes twice. past: names of the commits
    before the last, by which a writer that was not answered learns whether its own was done.
    """

    epoch: int
    gen: int
    nonce: str
    writer: str
    expires: float
    snapshot: str = ""
    removed: bool = False
    past: tuple[str, ...] = ()

    def next(self, **changes: Any) -> "SessionHead":
        """Another version."""
        return replace(self, nonce=new_nonce(), **changes)

    def committed(self, snapshot: str, **changes: Any) -> "SessionHead":
        """The version after a commit."""
        past = (*self.past, self.snapshot)[-_PAST:] if self.snapshot else self.past
        return self.next(gen=self.gen + 1, snapshot=snapshot, past=past, **changes)

    def has_committed(self, snapshot: str) -> bool:
        """Whether that was committed, lately."""
        return snapshot == self.snapshot or snapshot in self.past

    def content(self) -> bytes:
        return json.dumps({"kvkeep": "head", "format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def read(cls, content: bytes, name: str) -> "SessionHead":
        """Raises CorruptFile or NewerFormat for what is no head that this kvkeep knows."""
        try:
            found = json.loads(content)
            if found["kvkeep"] != "head" or type(found["format"]) is not int:
                raise ValueError("it is none")
            if found["format"] <= FORMAT:
                given = {field: found[field] for field in _KINDS}
                wrong = [f for f, kind in _KINDS.items() if type(given[f]) is not kind]
                given["past"] = tuple(str(name) for name in given["past"])
                wrong += [] if math.isfinite(given["expires"]) else ["expires"]
                if wrong or given["epoch"] < 1 or given["gen"] < 0:
                    raise ValueError(f"these make no sense: {wrong or 'epoch, gen'}")
                return cls(**given)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise CorruptFile(
                f"the head of session {name!r} is not as kvkeep writes it ({error!r}); what it "
                "held is beside it, as files that kvkeep can import"
            ) from error
        raise NewerFormat(
            f"the head of session {name!r} has format {found['format']}; this kvkeep reads up to "
            f"{FORMAT}: upgrade kvkeep"
        )


def new_nonce() -> str:
    return secrets.token_hex(16)


def snapshot_name(head: SessionHead) -> str:
    """For what is to be committed by whoever wrote that head. It begins with the epoch, by which
    collectors know that nobody can commit it any more (see `protocol.collect`)."""
    return f"{head.epoch:012}-{head.gen + 1:012}-{secrets.token_hex(8)}"


def epoch_of(snapshot: str) -> int | None:
    """None for what has no such name."""
    number = snapshot.partition("-")[0]
    return int(number) if len(number) == 12 and number.isdigit() else None
