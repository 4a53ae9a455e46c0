"""Between what a session is and a snapshot of it."""

from typing import Any

from kvkeep.cache import Window
from kvkeep.cache.checks import require
from kvkeep.errors import InvalidSnapshot
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import checked_bits, make_policy
from kvkeep.policies.base import pinned_cells
from kvkeep.session.memory import Memory
from kvkeep.session.sampling import Sampler
from kvkeep.session.state import State
from kvkeep.storage.snapshots.document import check_settings
from kvkeep.storage.snapshots.snapshot import Snapshot


def snapshot_of(model: LoadedModel, state: State, prefill_step: int) -> Snapshot:
    """All that a session is now."""
    memory, policy, cache = state.memory.state(), state.memory.policy, state.memory.cache
    return Snapshot(
        fingerprint=model.fingerprint.saved(),
        model=model.name,
        policy={
            "name": policy.name,
            **policy.settings(),
            "pinned": pinned_cells(cache, policy.keep),  # what earlier releases go by
        },
        settings={
            "prefill_step": prefill_step,
            "keep_whole_prompt": state.keep_whole_prompt,
            "pins": list(memory.pins),
            "spans": dict(state.spans),
            "window": _of_window(memory.cache.window),
        },
        tokens=memory.tokens,
        serials=memory.serials,
        clock=memory.cache.time,
        serial=memory.cache.serial,
        segments=memory.cache.segments,
        hidden=memory.hidden,
        logits=memory.logits,
        sampler=state.sampler.state(),
        layout=cache.layout.plain,
        bits=state.memory.bits,
        observed=memory.cache.observed,
        arithmetic=model.arithmetic,
        local=memory.cache.local,
        local_layout=None if cache.local is None else cache.local.layout.plain,
        recurrent=memory.cache.recurrent,
    )


def _of_window(window: Window) -> dict[str, Any]:
    return {name: getattr(window, name) for name in ("size", "discard", "moves")}


def restored_state(model: LoadedModel, snapshot: Snapshot) -> State:
    """What the session was that a snapshot was taken of. Each part is checked by whose it is.

    Raises FingerprintMismatch for another model, and InvalidSnapshot, saying what is wrong, where
    no session of this model could have been so.
    """
    model.fingerprint.require(snapshot.fingerprint, "the snapshot")
    try:
        settings = snapshot.settings
        check_settings(settings, len(snapshot.tokens))
        states = model.spec.recurrent and len(snapshot.tokens) > 0
        require(bool(snapshot.recurrent) == states, "states of layers missing, or of none")
        chosen = {key: value for key, value in snapshot.policy.items() if key != "pinned"}
        policy = make_policy(**chosen).for_model(model.spec.max_positions)
        bits = checked_bits(policy, snapshot.bits)
        memory = Memory.from_state(model.decoder, policy, bits, snapshot.memory())
        spans = {name: (start, end) for name, (start, end) in settings.get("spans", {}).items()}
        sampler = Sampler.at(snapshot.sampler)
        return State(memory, sampler, spans, settings["keep_whole_prompt"])
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidSnapshot(
            f"no session of {model.name} could have been so: {error}. Restore a snapshot as it was "
            "taken, or evaluate the text again"
        ) from error
