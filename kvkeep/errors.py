"""Every error that kvkeep raises on purpose.

All derive from `KvkeepError`. Each is raised before anything is changed, and its message says
what was expected, what was found, and what to do.
"""


class KvkeepError(Exception):
    """Root of all typed errors."""


class InvalidArgument(KvkeepError, ValueError):
    """A number, text or name from outside is not usable."""


class KernelMismatch(KvkeepError):
    """A tensor is not of the dtype, shape or layout that a compiled kernel reads."""


class OutOfMemory(KvkeepError, MemoryError):
    """A compiled kernel could not have the memory that it works in; nothing was changed."""


class ContextFull(KvkeepError):
    """The policy cannot hold another token; the message names one that can."""


class NoRoom(KvkeepError):
    """An engine has no memory, or no turn, to give now.

    retry_after: seconds after which it may have.
    """

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class NoSuchSession(InvalidArgument):
    """An engine keeps no session of that name for who asks."""


class Busy(KvkeepError):
    """An engine's session is reading or writing, and takes no other change meanwhile."""


class WrongRevision(KvkeepError):
    """A session has changed since the revision that a change was meant for."""


class Cancelled(KvkeepError):
    """What was asked of an engine was taken back, or the engine has ended."""


class ServerError(KvkeepError):
    """A server failed, or did not answer."""


class NonFiniteLogits(KvkeepError):
    """The model produced NaN or infinity: broken weights, or a dtype too small for them."""


class ModelError(KvkeepError):
    """A model cannot be found, read or run."""


class ModelNotFound(ModelError):
    """Nothing by that name: no folder, file, pulled model or hub repository."""


class BadModelFile(ModelError):
    """A model file is empty, truncated, corrupt or of another kind."""


class UnsupportedModel(ModelError):
    """The architecture, RoPE kind or tokenizer is known to be outside what kvkeep runs."""


class SlowPathWarning(RuntimeWarning):
    """A model is computed by something slower than this machine could have, and nobody asked so."""


class StoreError(KvkeepError):
    """A file of kvkeep's cannot be written or read."""


class ForeignFile(StoreError):
    """Not a kvkeep file, or one of another kind."""


class NewerFormat(StoreError):
    """Made by a later kvkeep than this one."""


class TruncatedFile(StoreError):
    """The end of the file is missing."""


class CorruptFile(StoreError):
    """Bytes are not what was saved; the message says where."""


class InvalidSnapshot(StoreError):
    """A snapshot is not one that any session of the model could have been in; says what is wrong.

    Whoever made it took no care, or means harm: what kvkeep saves comes out of a session.
    """


class FingerprintMismatch(StoreError):
    """Saved with another model, dtype or tokenizer; the message lists the fields that differ."""


class Locked(StoreError):
    """Another process is using it."""


class NoObject(StoreError):
    """There is no object by that key in a store."""


class Conflict(StoreError):
    """An object is not what a conditional put was meant for: somebody else was first."""


class HeldElsewhere(Locked):
    """Another writer holds a session in a store. writer: who; until: seconds since 1970, if it is
    not held for longer then."""

    def __init__(self, message: str, writer: str, until: float):
        super().__init__(message)
        self.writer, self.until = writer, until


class Moved(StoreError):
    """A session is another's to write now; the message says whose.

    What was done since the last commit is not kept: the other one went on from there.
    """
