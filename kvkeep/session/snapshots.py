"""Taking a snapshot of a session's state, and restoring a state from one."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvkeep.cache.checks import require
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.calibration.stored import copy_advice, find_calibration
from kvkeep.errors import InvalidArgument, InvalidSnapshot
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import make_policy
from kvkeep.policies.base import pinned_cell_count
from kvkeep.session.core import SessionCore, SessionState
from kvkeep.session.memory import Memory
from kvkeep.session.sampler import Sampler
from kvkeep.storage.snapshots.document import check_settings
from kvkeep.storage.snapshots.snapshot import Snapshot


def take_snapshot(core: SessionCore) -> Snapshot:
    """Return a snapshot. Cells are shared until one side writes to them."""
    model, state = core.model, core.state
    policy, cache = state.memory.policy, state.memory.cache
    return Snapshot(
        fingerprint=model.fingerprint.to_dict(),
        model=model.name,
        policy={
            "name": policy.name,
            **policy.settings(),
            "pinned": pinned_cell_count(cache, policy.keep),  # read by earlier releases
        },
        settings={
            "prefill_step": core.prefill_step,
            "keep_whole_prompt": state.keep_whole_prompt,
            "spans": dict(state.spans),
        },
        memory=state.memory.state(),
        sampler=state.sampler.state(),
        layout=cache.layout.plain,
        local_layout=None if cache.local_cache is None else cache.local_cache.layout.plain,
        bits=state.memory.bits,
        arithmetic=model.arithmetic,
        rounded=state.rounded,
    )


def restore_state(
    model: LoadedModel, snapshot: Snapshot, calibration: Calibration | None
) -> SessionState:
    """Return the state that a snapshot was taken of.

    calibration: the one of its policy; if it is another or None, the one is used that is stored on
    this machine under the digest in the snapshot.

    Raises FingerprintMismatch for another model, InvalidSnapshot if no session of this model can be
    in that state, and InvalidArgument if its calibration is missing.
    """
    model.fingerprint.require_match(snapshot.fingerprint, "the snapshot")
    with _errors_as_invalid_snapshot(model):
        policy_settings = {k: value for k, value in snapshot.policy.items() if k != "pinned"}
        policy = make_policy(**policy_settings).for_model(model.spec.max_positions)
    if needed_digest := policy.calibrated_by:
        if calibration is None or calibration.digest != needed_digest:
            calibration = find_calibration(needed_digest, model)
        if calibration is None:
            raise InvalidArgument(
                f"the snapshot needs the calibration {needed_digest[:12]}, which is not here: "
                f"pass the one that the session was created with, or {copy_advice(needed_digest)}"
            )
        calibration.require(model)
        policy = policy.with_calibration(calibration.statistics, calibration.digest)
    with _errors_as_invalid_snapshot(model):
        settings = snapshot.settings
        check_settings(settings, len(snapshot.tokens))
        needs_states = model.spec.keeps_states and len(snapshot.tokens) > 0
        require(bool(snapshot.recurrent) == needs_states, "recurrent states missing or unexpected")
        spans = {name: (start, end) for name, (start, end) in settings.get("spans", {}).items()}
        memory = Memory.from_state(model.decoder, policy, snapshot.bits, snapshot.memory)
        sampler = Sampler.from_state(snapshot.sampler)
        keep_whole_prompt = settings["keep_whole_prompt"]
        return SessionState(memory, sampler, spans, keep_whole_prompt, snapshot.rounded)


@contextmanager
def _errors_as_invalid_snapshot(model: LoadedModel) -> Iterator[None]:
    """Raise InvalidSnapshot for every error that a part of an invalid snapshot causes."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidSnapshot(
            f"the snapshot is not valid for {model.name}: {error}. Restore an unmodified snapshot, "
            "or evaluate the text again"
        ) from error
