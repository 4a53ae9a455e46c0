"""The session of a command: restored from its file, and saved to it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvkeep.cli.compression import load_calibration_file
from kvkeep.cli.memory import WHOLE_PROMPT, MemoryOptions
from kvkeep.cli.model_options import require_local
from kvkeep.cli.options import is_given
from kvkeep.cli.output import format_mb, say
from kvkeep.errors import CorruptFile, InvalidArgument
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.session.conversation import CHAT_NOTES_KEY
from kvkeep.storage.objects.paths import ReadablePath
from kvkeep.types import DtypeName

if TYPE_CHECKING:
    import torch

    from kvkeep import Model, Session, Snapshot
    from kvkeep.storage.sessions.shared import SessionPath
    from kvkeep.storage.snapshots.codec import Codec

FIRST_PROMPT_KEY = "first_prompt"  # note: number of tokens of a session's first prompt
UNREAD_KEY = "unread"  # note: ids of prompt tokens that an interrupt left unevaluated

# Options that cannot be changed once a session is saved.
_FIXED_OPTIONS = (
    *("policy", "max_kv_size", "discard", "group", "window", "method", "ratio"),
    *("kv_bits", "far_bits"),
)


@dataclass
class OpenedSession:
    """A session and its model."""

    model: "Model"
    session: "Session"
    notes: dict[str, Any] = field(default_factory=dict)  # JSON values saved beside the session
    restored_tokens: int = 0  # number of tokens from the file
    seed: int | None = None  # of sampling, as saved in the file
    codec: "Codec" = "none"  # of the file


def resume(file: ReadablePath, memory: MemoryOptions, progress: bool) -> OpenedSession:
    """Restore the session in a file; options that were not given stay as saved.

    Raises InvalidArgument for an option that contradicts the file, StoreError, FingerprintMismatch
    for another model, and ModelNotFound if the file's model is not here and --model is not given.
    """
    from kvkeep import Snapshot

    snapshot = Snapshot.load(file)
    _require_saved_options(file, snapshot, memory)
    if not is_given("dtype"):
        memory = replace(memory, dtype=dtype_name(snapshot.layout.dtype))
    name = memory.model if is_given("model") else None
    model, session = restore(
        file,
        file,
        snapshot,
        name,
        memory.calibration,
        load=lambda name: replace(memory, model=name).load(progress),
    )
    if not session.exactness.bit_exact:
        say(
            f"{file} does not continue bit-exactly on this machine "
            f"({'; '.join(session.exactness.differs)}): results agree up to rounding"
        )
    if is_given("prefill_step"):
        session.prefill_step = memory.prefill_step
    if is_given("checkpoint_bytes"):
        session.checkpoint_bytes = memory.checkpoint_bytes
    notes, seed = checked_notes(file, snapshot), snapshot.sampler.get("seed")
    codec = cast("Codec", snapshot.codec)
    return OpenedSession(model, session, notes, len(snapshot.tokens), seed, codec)


def restore(
    file: ReadablePath,
    label: object,
    snapshot: "Snapshot",
    model_name: str | None,
    calibration: Path | None,
    load: Callable[[str], "Model"],
) -> tuple["Model", "Session"]:
    """Restore a session with the calibration that it was created with. Raises as `resume`.

    label: the session or file, for messages. model_name: None for the saved one. calibration: the
    file of `--calibration`; None for the stored one. load: loads a model by name.
    """
    from kvkeep.compression.calibration import stored

    calibration_digest = str(snapshot.policy.get("calibrated_by") or "")
    missing_calibration = InvalidArgument(
        f"{label} needs the calibration that it was created with: pass its file as --calibration, "
        f"or {stored.copy_advice(calibration_digest)}"
    )
    if calibration is not None and not calibration_digest:
        raise InvalidArgument(
            f"{label} was created without a calibration; leave --calibration out, or start a new "
            "session"
        )
    if calibration_digest and calibration is None and not stored.has_any_calibration():
        raise missing_calibration
    if model_name is None:
        require_local(snapshot.model, file)
    model = load(model_name or snapshot.model)
    loaded_calibration = load_calibration_file(calibration, model)
    if calibration_digest and loaded_calibration is None:
        loaded_calibration = stored.find_calibration(calibration_digest, model)
        if loaded_calibration is None:
            raise missing_calibration
    return model, model.restore(snapshot, calibration=loaded_calibration)


def checked_notes(file: ReadablePath, snapshot: "Snapshot") -> dict[str, Any]:
    """Return a snapshot's notes. Raises CorruptFile unless kvkeep wrote them."""
    from kvkeep.engine.session_files import ENGINE_NOTES_KEY

    notes = snapshot.notes
    engine_fields = notes.get(ENGINE_NOTES_KEY, {})
    chat_note, unread = notes.get(CHAT_NOTES_KEY, {"system": None}), notes.get(UNREAD_KEY, [])
    is_valid = isinstance(chat_note, dict) and isinstance(chat_note.get("system", ""), str | None)
    is_valid = is_valid and isinstance(unread, list) and all(type(token) is int for token in unread)
    is_valid = is_valid and isinstance(engine_fields, dict)
    is_valid = is_valid and type(engine_fields.get("revision", 0)) is int
    if not is_valid or type(notes.get(FIRST_PROMPT_KEY, 0)) is not int:
        raise CorruptFile(
            f"{file} is corrupt: its checksums match, but its notes were not written by kvkeep. "
            "Restore it from a copy, or start a new session"
        )
    return notes


def dtype_name(dtype: "torch.dtype") -> DtypeName:
    return cast(DtypeName, str(dtype).removeprefix("torch."))


def apply_keep(opened: OpenedSession, keep: int | None) -> None:
    """Apply `--keep`, if given, to a restored session."""
    session = opened.session
    if not is_given("keep") or keep is None or session.keep == session.max_kv_size:
        return  # a policy that keeps every token ignores --keep
    if keep == WHOLE_PROMPT:
        if FIRST_PROMPT_KEY not in opened.notes:
            raise InvalidArgument(
                "--keep -1 means the first prompt, whose length was not saved; use a number of "
                f"tokens (now {session.keep})"
            )
        keep = int(opened.notes[FIRST_PROMPT_KEY])
    if keep != session.keep:
        session.keep = keep


def _require_saved_options(file: ReadablePath, snapshot: "Snapshot", memory: MemoryOptions) -> None:
    """Raise InvalidArgument if an option differs from the saved one, and cannot be changed."""
    saved_options = {**snapshot.policy, "policy": snapshot.policy.get("name")}
    saved_options |= {"kv_bits": snapshot.bits.kv, "far_bits": snapshot.bits.far}
    for option in _FIXED_OPTIONS:
        requested, saved = getattr(memory, option), saved_options.get(option)
        if is_given(option) and requested != saved:
            flag = f"--{option.replace('_', '-')}"
            raise InvalidArgument(
                f"{flag} is {requested}, but {file} was saved with {saved}, which cannot change; "
                f"leave {flag} out, or start a new session"
            )


class SessionWriter:
    """Writes a session to its file atomically.

    label: the session or file, for messages. notes: JSON values saved beside the session, as they
    are when the file is written. codec: of the file. saved_bytes: the file's size; None before the
    first save.
    """

    def __init__(
        self,
        session: "Session",
        file: "Path | SessionPath",
        label: str,
        notes: dict[str, Any],
        codec: "Codec" = "none",
    ):
        """Raises InvalidArgument if the session cannot be stored by the codec."""
        self.label, self.notes = label, notes
        self.saved_bytes: int | None = None
        self._saved_seconds = 0.0
        session.snapshot().require_codec(codec)  # before any work is done
        self.codec = codec
        self._session, self._file = session, file
        self._is_changed = session.watch()  # a function: whether it changed since

    def switch_to(self, session: "Session", notes: dict[str, Any]) -> None:
        """Save another session from now on. notes: replace notes of the same name."""
        if session is not self._session:
            self._session, self._is_changed = session, lambda: True  # the file has the former one
        self.notes.update(notes)

    @property
    def is_unsaved(self) -> bool:
        """Whether the session changed since it was opened or saved."""
        return self._is_changed()

    @property
    def save_outcome(self) -> str:
        """A report of the last save, for the closing line; "" if nothing had to be saved."""
        if self.is_unsaved:
            return f"{self.label} not saved"
        if self.saved_bytes is None:
            return ""
        size = format_mb(self.saved_bytes)
        return f"{self.label} saved, {size} in {self._saved_seconds:.2f} s"

    def save(self) -> None:
        """Write the file if the session is unsaved."""
        if self.is_unsaved:
            self.write()

    def write(self) -> None:
        """Write the file. A first Ctrl-C waits; a second one leaves the old file in place."""
        from kvkeep.engine.session_files import notes_after_change

        start = time.perf_counter()
        with interrupts_deferred(only_first=True):
            self.notes.update(notes_after_change(self.notes))
            snapshot = replace(self._session.snapshot(), notes=self.notes)
            file = self._file.resolve() if isinstance(self._file, Path) else self._file
            self.saved_bytes = snapshot.save_by(file, self.codec)
            self._saved_seconds = time.perf_counter() - start
            self._is_changed = self._session.watch()
