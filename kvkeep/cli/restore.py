"""The session that a command works on: a new one, or one that goes on from a file."""

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
UNREAD = "unread"  # note: tokens of a prompt that an interrupt left to be evaluated

# Options that a file has been saved with, for good.
_FIXED = (
    *("policy", "max_kv_size", "discard", "group", "window", "method", "ratio"),
    *("kv_bits", "far_bits"),
)


@dataclass
class OpenedSession:
    """notes: as they were saved. restored: tokens that came from the file. seed: the one in use."""

    model: "Model"
    session: "Session"
    notes: dict[str, Any] = field(default_factory=dict)
    restored: int = 0
    seed: int | None = None


def resume(file: Source, memory: MemoryChoice, progress: bool) -> OpenedSession:
    """The session in a file, on the model that it was saved with.

    What the user gave no option for is as it was saved.

    Raises InvalidArgument for an option that contradicts the file, StoreError and its kinds for a
    file that is not sound, FingerprintMismatch for another model, ModelNotFound for one that is not
    here and that nobody named.
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
    """The notes of a file, as the command line writes them. Raises CorruptFile for others."""
    notes = snapshot.notes
    chat, unread = notes.get(CHAT, {"system": None}), notes.get(UNREAD, [])
    good = isinstance(chat, dict) and isinstance(chat.get("system", ""), str | None)
    good = good and isinstance(unread, list) and all(type(each) is int for each in unread)
    if not good or type(notes.get(FIRST_PROMPT, 0)) is not int:
        raise CorruptFile(
            f"{file} is corrupt: its notes are none of kvkeep's command line, though each byte is "
            "as it was written. Restore it from a copy, or begin anew"
        )
    return notes


def saved_on(file: Source, memory: MemoryChoice, snapshot: "Snapshot") -> MemoryChoice:
    """The memory asked for, on the model and dtype of a snapshot where none were.

    Raises ModelNotFound for a model that nobody named and that is not here.
    """
    if not given("model"):
        require_here(snapshot.model, file)
    return replace(
        memory,
        model=memory.model if given("model") else snapshot.model,
        dtype=memory.dtype if given("dtype") else dtype_name(snapshot.layout.dtype),
    )


def dtype_name(dtype: "torch.dtype") -> DtypeName:
    """As `--dtype` says it."""
    return cast(DtypeName, str(dtype).removeprefix("torch."))


def apply_keep(opened: OpenedSession, keep: int | None) -> None:
    """Changes what a restored session never forgets, where the user said so.

    Raises InvalidArgument for a number out of range.
    """
    session = opened.session
    if not given("keep") or keep is None or session.keep == session.max_kv_size:
        return  # a policy that keeps every token does so whatever is asked
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
    """Raises InvalidArgument where a policy that ends at its budget has no room for an answer."""
    if choice.max_kv_size is None or choice.policy in KEEPING:
        return
    try:
        chat = model.text.chat([{"role": "user", "content": "Hi"}])
    except UnsupportedModel:  # there is no template: any text will do
        return
    least = len(model.text.encode(chat)) + 1
    if choice.max_kv_size < least:
        raise InvalidArgument(
            f"the shortest chat takes {least} tokens, and policy {choice.policy} ends at "
            f"--max-kv-size {choice.max_kv_size}: give {least} or more, or a policy that forgets"
        )


def _require_agreement(file: Source, snapshot: "Snapshot", memory: MemoryChoice) -> None:
    found = {**snapshot.policy, "policy": snapshot.policy.get("name")}
    found |= {"kv_bits": snapshot.bits.kv, "far_bits": snapshot.bits.far}
    for option in _FIXED:
        asked, saved = getattr(memory, option), found.get(option)
        if given(option) and asked != saved:
            flag = f"--{option.replace('_', '-')}"
            raise InvalidArgument(
                f"{flag} is {asked}, but {file} was saved with {saved}, which cannot be changed; "
                f"leave {flag} out, or begin anew"
            )
