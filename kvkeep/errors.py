"""The tree of typed errors that kvkeep raises.

All derive from `KvkeepError`. Each is raised before anything is changed, and its message says
what was expected, what was found, and what to do.
"""


class KvkeepError(Exception):
    """Root of all typed errors."""


class InvalidArgument(KvkeepError, ValueError):
    """An argument, such as a number, a text or a name, is not valid."""


class KernelMismatch(KvkeepError):
    """A tensor is not of the dtype, shape or layout that a compiled kernel reads."""


class OutOfMemory(KvkeepError, MemoryError):
    """A compiled kernel could not allocate its working memory; nothing was changed."""


class ContextFull(KvkeepError):
    """The policy cannot hold another token; the message names one that can."""


class NoRoom(KvkeepError):
    """An engine has no memory or slot for a request. retry_after: seconds until it may have.

    needed_bytes: of memory that must be free, or held by what can be evicted, if it is memory that
    is missing. needed_slots: of generations, if it is slots that are missing; of_owner:
    whether they are missing for its owner alone.
    """

    def __init__(
        self,
        message: str,
        retry_after: float = 1.0,
        *,
        needed_bytes: int | None = None,
        needed_slots: int | None = None,
        of_owner: bool = False,
    ):
        super().__init__(message)
        self.retry_after, self.needed_bytes = retry_after, needed_bytes
        self.needed_slots, self.of_owner = needed_slots, of_owner


class NoSuchSession(InvalidArgument):
    """The owner has no session of that name in the engine."""


class NoSuchSnapshot(InvalidArgument):
    """The owner has no snapshot with that label."""


class NoSuchPin(InvalidArgument):
    """The owner has no pin with that id, or it has expired."""


class Busy(KvkeepError):
    """An engine's session is in prefill or decode, and accepts no other change until that ends."""


class WrongRevision(KvkeepError):
    """A change names a revision of a session that is no longer the current one."""


class Cancelled(KvkeepError):
    """A request was cancelled, or its engine was closed."""


class ServerError(KvkeepError):
    """A server failed or did not respond."""


class NonFiniteLogits(KvkeepError):
    """The model produced NaN or infinity: its weights are broken, or the dtype is too narrow."""


class ModelError(KvkeepError):
    """A model cannot be found, read or run."""


class ModelNotFound(ModelError):
    """No folder, file, pulled model or hub repository has the given name."""


class BadModelFile(ModelError):
    """A model file is empty, truncated, corrupt or of another kind."""


class UnsupportedModel(ModelError):
    """The architecture, RoPE kind or tokenizer is one that kvkeep does not support."""


class SlowPathWarning(RuntimeWarning):
    """A model runs on a slower backend than this machine supports, without a request for it."""


class StoreError(KvkeepError):
    """A kvkeep file or store cannot be written or read."""


class ForeignFile(StoreError):
    """The file is not a kvkeep file, or is one of another kind."""


class NewerFormat(StoreError):
    """The file has a newer format than this version of kvkeep reads."""


class TruncatedFile(StoreError):
    """The end of the file is missing."""


class CorruptFile(StoreError):
    """The bytes of a file differ from what was saved; the message says where."""


class InvalidSnapshot(StoreError):
    """A snapshot, made by another program, holds a state that no session of the model can have."""


class FingerprintMismatch(StoreError):
    """A file was saved with another model, dtype or tokenizer; the message lists the fields."""


class Locked(StoreError):
    """Another process holds the lock."""


class NoObject(StoreError):
    """An object store has no object under the key."""


class Conflict(StoreError):
    """The condition of a conditional put (if absent, if match) does not hold."""


class HeldElsewhere(Locked):
    """Another writer holds the lease of a session in a store."""

    def __init__(self, message: str, writer: str, until: float):
        super().__init__(message)
        self.writer = writer  # its name
        self.until = until  # when the lease expires unless renewed, in seconds since 1970


class Moved(StoreError):
    """Another writer took over a session, at its last commit; changes since then are lost."""
