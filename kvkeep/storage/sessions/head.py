"""The head of a session: the object that names its committed snapshot and its lease holder."""

import json
import math
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any, get_type_hints

from kvkeep.errors import CorruptFile, NewerFormat

FORMAT = 1
_MAX_PAST = 16  # earlier commits that a head lists


@dataclass(frozen=True)
class SessionHead:
    """One version of a session's head. The field names are those of the JSON object.

    expires: when another writer may take over, in seconds since 1970 by the holder's clock; safety
    does not depend on it. past: the snapshots of earlier commits, by which a writer whose put got
    no response learns whether its commit was applied.
    """

    epoch: int  # the fencing token, which grows each time that a writer acquires the session
    gen: int  # the generation: the number of commits so far
    nonce: str  # unique to this version, so that a writer recognises its own
    writer: str  # the name of the lease holder; "" for none
    expires: float
    snapshot: str = ""  # the name of the committed snapshot; "" before the first commit
    removed: bool = False  # a removed session keeps its head, so that no epoch is used twice
    past: tuple[str, ...] = ()
    removed_by: str = ""  # digest of the last removal's idempotency key; "" for none

    def updated(self, **changes: Any) -> "SessionHead":
        """Return a changed version with a new nonce."""
        return replace(self, nonce=new_nonce(), **changes)

    def after_commit(self, snapshot: str, **changes: Any) -> "SessionHead":
        """Return the version after a commit of `snapshot`."""
        past = (*self.past, self.snapshot)[-_MAX_PAST:] if self.snapshot else self.past
        return self.updated(gen=self.gen + 1, snapshot=snapshot, past=past, **changes)

    def has_committed(self, snapshot: str) -> bool:
        """Whether `snapshot` is the last commit or one of the past 16."""
        return snapshot == self.snapshot or snapshot in self.past

    def to_json(self) -> bytes:
        return json.dumps({"kvkeep": "head", "format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, content: bytes, name: str) -> "SessionHead":
        """Parse a head. name: of the session, for messages. Raises CorruptFile, NewerFormat."""
        try:
            document = {"removed_by": "", **json.loads(content)}  # earlier versions lack it
            if document["kvkeep"] != "head" or type(document["format"]) is not int:
                raise ValueError("not a session head")
            if document["format"] <= FORMAT:
                types = {**get_type_hints(cls), "past": list}
                fields = {field: document[field] for field in types}
                invalid = [f for f, expected in types.items() if type(fields[f]) is not expected]
                fields["past"] = tuple(map(str, fields["past"]))
                invalid += [] if math.isfinite(fields["expires"]) else ["expires"]
                if invalid or fields["epoch"] < 1 or fields["gen"] < 0:
                    raise ValueError(f"invalid values of {invalid or 'epoch, gen'}")
                return cls(**fields)
        except (ArithmeticError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise CorruptFile(
                f"the head of session {name!r} is not in kvkeep's format ({error!r}); the "
                "session's files beside it can be imported"
            ) from error
        raise NewerFormat(
            f"the head of session {name!r} has format {document['format']}; this kvkeep reads up "
            f"to {FORMAT}: upgrade kvkeep"
        )


def new_nonce() -> str:
    return secrets.token_hex(16)


def new_snapshot_name(head: SessionHead) -> str:
    """Make a name for a snapshot that the holder of `head` will upload: EPOCH-GEN-RANDOM.

    `protocol.collect_garbage` tells by the epoch whether it can still be committed.
    """
    return f"{head.epoch:012}-{head.gen + 1:012}-{secrets.token_hex(8)}"


def epoch_of(snapshot: str) -> int | None:
    """Return the epoch in a snapshot's name; None for a name of another form."""
    epoch = snapshot.partition("-")[0]
    return int(epoch) if len(epoch) == 12 and epoch.isdigit() else None
