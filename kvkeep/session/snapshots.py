"""Taking a snapshot of a session's state, and restoring a state from one."""

from kvkeep.cache.checks import require
from kvkeep.errors import InvalidSnapshot
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Policy, checked_bits, make_policy
from kvkeep.policies.base import pinned_cells
from kvkeep.session.core import SessionCore, SessionState
from kvkeep.session.memory import Memory
from kvkeep.session.sampling import Sampler
from kvkeep.storage.snapshots.document import check_settings
from kvkeep.storage.snapshots.snapshot import Snapshot

_WRONG = (LookupError, ValueError, TypeError, AttributeError, RuntimeError)


def snapshot_of(core: SessionCore) -> Snapshot:
    """Return everything that a session is now. Cells are shared until one side writes to them."""
    model, state = core.model, core.state
    policy, cache = state.memory.policy, state.memory.cache
    return Snapshot(
        fingerprint=model.fingerprint.saved(),
        model=model.name,
        policy={
            "name": policy.name,
            **policy.settings(),
            "pinned": pinned_cells(cache, policy.keep),  # read by earlier releases
        },
        settings={
            "prefill_step": core.prefill_step,
            "keep_whole_prompt": state.keep_whole_prompt,
            "spans": dict(state.spans),
        },
        memory=state.memory.state(),
        sampler=state.sampler.state(),
        layout=cache.layout.plain,
        local_layout=None if cache.local is None else cache.local.layout.plain,
        bits=state.memory.bits,
        arithmetic=model.arithmetic,
    )


def restored_policy(model: LoadedModel, snapshot: Snapshot) -> Policy:
    """Return the policy of a snapshot, for this model and without a calibration.

    Raises FingerprintMismatch for another model, and InvalidSnapshot, saying what is wrong.
    """
    model.fingerprint.require(snapshot.fingerprint, "the snapshot")
    try:
        settings = {key: value for key, value in snapshot.policy.items() if key != "pinned"}
        return make_policy(**settings).for_model(model.spec.max_positions)
    except _WRONG as error:
        raise _invalid(model, error) from error


def restored_state(model: LoadedModel, snapshot: Snapshot, policy: Policy) -> SessionState:
    """Return the state that a snapshot was taken of. Each part is checked by its own class.

    Raises FingerprintMismatch for another model, and InvalidSnapshot, saying what is wrong, if no
    session of this model can be in that state.
    """
    model.fingerprint.require(snapshot.fingerprint, "the snapshot")
    try:
        settings = snapshot.settings
        check_settings(settings, len(snapshot.tokens))
        states = model.spec.recurrent and len(snapshot.tokens) > 0
        require(bool(snapshot.recurrent) == states, "states of layers missing, or of none")
        bits = checked_bits(policy, snapshot.bits)
        memory = Memory.from_state(model.decoder, policy, bits, snapshot.memory)
        spans = {name: (start, end) for name, (start, end) in settings.get("spans", {}).items()}
        sampler = Sampler.at(snapshot.sampler)
        return SessionState(memory, sampler, spans, settings["keep_whole_prompt"])
    except _WRONG as error:
        raise _invalid(model, error) from error


def _invalid(model: LoadedModel, error: Exception) -> InvalidSnapshot:
    return InvalidSnapshot(
        f"no session of {model.name} could have been so: {error}. Restore a snapshot as it was "
        "taken, or evaluate the text again"
    )
