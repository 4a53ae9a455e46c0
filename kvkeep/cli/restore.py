"""The session that a command works on: a new one, or one restored from a file."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from kvkeep.cli.compression import check_original_calibration, original_calibration
from kvkeep.cli.memory import KEEPING, WHOLE_PROMPT, MemoryChoice
from kvkeep.cli.options import given
from kvkeep.cli.output import say
from kvkeep.cli.which_model import require_here
from kvkeep.errors import CorruptFile, InvalidArgument, UnsupportedModel
from kvkeep.session.conversation import CHAT
from kvkeep.storage.objects.paths import Source
from kvkeep.types import DtypeName

if TYPE_CHECKING:
    import torch

    from kvkeep import Model, Session, Snapshot

FIRST_PROMPT = "first_prompt"  # note: tokens of a session's first prompt
UNREAD = "unread"  # note: prompt tokens that an interrupt left unevaluated

# Options that cannot be changed once a session is saved.
_FIXED = (
    *("policy", "max_kv_size", "discard", "group", "window", "method", "ratio"),
    *("kv_bits", "far_bits"),
)


@dataclass
class OpenedSession:
    """A session and its model.

    notes: the JSON values saved beside the session. restored: tokens that came from the file.
    seed: the sampling seed that the session was saved with.
    """

    model: "Model"
    session: "Session"
    notes: dict[str, Any] = field(default_factory=dict)
    restored: int = 0
    seed: int | None = None


def resume(file: Source, memory: MemoryChoice, progress: bool) -> OpenedSession:
    """Restore the session in a file, on the model that it was saved with.

    Settings without an option on the command line stay as saved.

    Raises InvalidArgument for an option that contradicts the file, StoreError and its subclasses
    for a damaged file, FingerprintMismatch for another model, and ModelNotFound if the file's model
    is not on this machine and --model was not given.
    """
    from kvkeep import Snapshot

    snapshot = Snapshot.load(file)
    _require_agreement(file, snapshot, memory)
    check_original_calibration(file, snapshot, memory.calibration)
    model = saved_on(file, memory, snapshot).load(progress)
    calibration = original_calibration(file, snapshot, memory.calibration, model)
    session = model.restore(snapshot, calibration=calibration)
    if not session.exactness.bit_exact:
        say(
            f"{file} does not go on to the bit here ({'; '.join(session.exactness.differs)}): what "
            "follows agrees as far as rounding does"
        )
    if given("prefill_step"):
        session.prefill_step = memory.prefill_step
    return OpenedSession(
        model,
        session,
        checked_notes(file, snapshot),
        len(snapshot.tokens),
        snapshot.sampler.get("seed"),
    )


def checked_notes(file: Source, snapshot: "Snapshot") -> dict[str, Any]:
    """Return the notes of a file. Raises CorruptFile unless the command line wrote them."""
    notes = snapshot.notes
    chat, unread = notes.get(CHAT, {"system": None}), notes.get(UNREAD, [])
    good = isinstance(chat, dict) and isinstance(chat.get("system", ""), str | None)
    good = good and isinstance(unread, list) and all(type(token) is int for token in unread)
    if not good or type(notes.get(FIRST_PROMPT, 0)) is not int:
        raise CorruptFile(
            f"{file} is corrupt: its notes were not written by kvkeep's command line, although "
            "its checksums are right. Restore it from a copy, or start a new session"
        )
    return notes


def saved_on(file: Source, memory: MemoryChoice, snapshot: "Snapshot") -> MemoryChoice:
    """Return the memory options, with the snapshot's model and dtype where none were given.

    Raises ModelNotFound if the snapshot's model is not on this machine and --model was not given.
    """
    if not given("model"):
        require_here(snapshot.model, file)
    return replace(
        memory,
        model=memory.model if given("model") else snapshot.model,
        dtype=memory.dtype if given("dtype") else dtype_name(snapshot.layout.dtype),
    )


def dtype_name(dtype: "torch.dtype") -> DtypeName:
    """Return the name of a dtype as `--dtype` takes it."""
    return cast(DtypeName, str(dtype).removeprefix("torch."))


def apply_keep(opened: OpenedSession, keep: int | None) -> None:
    """Change how many first tokens a restored session never evicts, if --keep was given.

    Raises InvalidArgument for a number out of range.
    """
    session = opened.session
    if not given("keep") or keep is None or session.keep == session.max_kv_size:
        return  # a policy that keeps every token does so for any --keep
    if keep == WHOLE_PROMPT:
        if FIRST_PROMPT not in opened.notes:
            raise InvalidArgument(
                "--keep -1 means the first prompt, and where that ended was not saved; give the "
                f"number of tokens (now {session.keep})"
            )
        keep = int(opened.notes[FIRST_PROMPT])
    if keep != session.keep:
        session.keep = keep


def require_room_for_a_chat(model: "Model", choice: MemoryChoice) -> None:
    """Raise InvalidArgument if a policy that ends at its budget has no room for any answer."""
    if choice.max_kv_size is None or choice.policy in KEEPING:
        return
    try:
        chat = model.text.chat([{"role": "user", "content": "Hi"}])
    except UnsupportedModel:  # without a template, any text is a prompt
        return
    least = len(model.text.encode(chat)) + 1
    if choice.max_kv_size < least:
        raise InvalidArgument(
            f"the shortest chat takes {least} tokens, and policy {choice.policy} ends at "
            f"--max-kv-size {choice.max_kv_size}: give {least} or more, or a policy that forgets"
        )


def _require_agreement(file: Source, snapshot: "Snapshot", memory: MemoryChoice) -> None:
    saved_options = {**snapshot.policy, "policy": snapshot.policy.get("name")}
    saved_options |= {"kv_bits": snapshot.bits.kv, "far_bits": snapshot.bits.far}
    for option in _FIXED:
        requested, saved = getattr(memory, option), saved_options.get(option)
        if given(option) and requested != saved:
            flag = f"--{option.replace('_', '-')}"
            raise InvalidArgument(
                f"{flag} is {requested}, but {file} was saved with {saved}, which cannot be "
                f"changed; leave {flag} out, or start a new session"
            )
