"""Between a session and a snapshot."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from kvkeep.cache import Window
from kvkeep.loaded import LoadedModel
from kvkeep.policies import make_policy
from kvkeep.policies.base import pinned_cells
from kvkeep.session.sampling import Sampler
from kvkeep.session.state import State
from kvkeep.store.prefix import PrefixStore
from kvkeep.store.snapshot import Snapshot

if TYPE_CHECKING:
    from kvkeep.session.session import Session


def capture(session: "Session") -> Snapshot:
    """All that a session is now."""
    state = session._state
    memory, cache = state.memory, state.memory.cache
    return Snapshot(
        fingerprint=session._model.fingerprint.saved(),
        model=session._model.name,
        policy={
            "name": memory.policy.name,
            **memory.policy.settings(),
            "pinned": pinned_cells(cache, memory.policy.keep),  # what earlier releases go by
        },
        settings={
            "prefill_step": session.prefill_step,
            "keep_whole_prompt": state.keep_whole_prompt,
            "pins": sorted(memory.pins),
            "spans": dict(state.spans),
            "window": asdict(cache.window),
        },
        tokens=torch.tensor(memory.tokens.array(), dtype=torch.int32, device="cpu"),
        serials=torch.tensor(memory.serials.array(), dtype=torch.int64, device="cpu"),
        clock=cache.time,
        serial=cache.serial,
        segments=tuple(segment.twin() for segment in cache.segments),
        hidden=memory.hidden,
        logits=memory.logits(),
        sampler=state.sampler.state(),
        layout=cache.layout.plain,
        bits=memory.bits,
        observed=cache.observer.queries() if cache.observer else None,
    )


def revive(model: LoadedModel, snapshot: Snapshot, store: PrefixStore | None) -> "Session":
    """The session that a snapshot was taken of. Raises FingerprintMismatch for another model."""
    from kvkeep.session.session import Session

    model.fingerprint.require(snapshot.fingerprint, "the snapshot")
    settings = snapshot.settings
    chosen = {key: value for key, value in snapshot.policy.items() if key != "pinned"}
    policy = make_policy(**chosen).for_model(model.spec.max_positions)
    session = Session(model, policy, settings["prefill_step"], store, snapshot.bits)
    memory, cache = session._memory, session.cache
    # Files of earlier releases may ask for it where all is kept.
    keep_whole_prompt = settings["keep_whole_prompt"] and "keep" in policy.settings()
    spans = {name: (start, end) for name, (start, end) in settings.get("spans", {}).items()}
    session._state = State(memory, Sampler.at(snapshot.sampler), spans, keep_whole_prompt)
    memory.tokens = memory.tokens.extended(snapshot.tokens.tolist())
    memory.serials = memory.serials.extended(snapshot.serials.tolist())
    memory.pins = frozenset(settings.get("pins", ()))
    cache.window = Window(**settings.get("window", {}))
    cache.time, cache.serial = snapshot.clock, snapshot.serial
    cache.segments = [segment.twin().to(cache.layout.device) for segment in snapshot.segments]
    if snapshot.observed is not None:
        cache.observe(snapshot.observed)
    memory.stand_at(snapshot.hidden, snapshot.logits)
    return session
