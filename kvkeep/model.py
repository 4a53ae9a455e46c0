"""A loaded model, and the sessions that it makes."""

from typing import Any, Unpack

import torch

from kvkeep import validation
from kvkeep.cache import Bits
from kvkeep.cache.layout import bits_name
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.calibration.stored import default_calibration
from kvkeep.errors import InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Policy, PolicySettings, make_policy
from kvkeep.session.conversation import Conversation, saved_system
from kvkeep.session.core import WHOLE_PROMPT
from kvkeep.session.session import Session
from kvkeep.session.turn_template import count_system_tokens
from kvkeep.storage.prefixes.block import PrefixCache
from kvkeep.storage.snapshots.snapshot import Snapshot
from kvkeep.types import KvBits, PolicyName

_POLICIES_WITH_KEEP = ("sliding", "shift", "archive")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Model(LoadedModel):
    """A loaded model that makes sessions; any number of them share it."""

    @property
    def calibration(self) -> Calibration | None:
        """The newest calibration of this model on this machine; None if there is none.

        `kvkeep pull --calibrate` and `kvkeep calibrate TEXT` make one. Each access reads its file.
        Raises StoreError or a subclass if the file is damaged.
        """
        return default_calibration(self)

    def restore(
        self,
        snapshot: Snapshot,
        store: PrefixCache | None = None,
        calibration: Calibration | None = None,
    ) -> Session:
        """Return a session that continues exactly where the snapshot was taken.

        calibration: the one that the session was created with; not needed if it is among the
            stored ones, of which `Model.calibration` is the newest.

        Raises FingerprintMismatch, naming what differs, for a snapshot of another model,
        InvalidSnapshot for one that no session of this model can have been in, InvalidArgument if
        its calibration is missing, and StoreError if the stored one is damaged.
        """
        validation.instance("snapshot", snapshot, Snapshot)
        return Session.restored(self, snapshot, store, calibration)

    def chat(
        self, system: str | None = None, snapshot: Snapshot | None = None, **settings: Any
    ) -> Conversation:
        """Return a chat in a new session, or the one that a snapshot was taken of.

            chat = model.chat("You answer in one sentence.", max_kv_size=1024)
            print(chat.say("What is a KV cache?"))

        system: the system prompt. Its tokens are never evicted, unless `keep` is passed; the
            `keep` of a policy that is passed as an object is raised to their number.
        snapshot: of `Conversation.snapshot`, or a file of `kvkeep chat --session`; it brings its
            system prompt and settings. settings: of the new session; see `session`.

        Raises UnsupportedModel if the model has no chat template, and as `session` and `restore`.
        """
        if snapshot is not None:
            if system is not None or settings:
                raise InvalidArgument("a snapshot includes the system prompt and all settings")
            system = saved_system(snapshot.notes)
        elif system is not None:
            settings = self._keep_system(validation.text("system", system), **settings)
        session = self.session(**settings) if snapshot is None else self.restore(snapshot)
        return Conversation(session, self.text, self.end_token_ids, system)

    def session(
        self,
        max_kv_size: int | None = None,
        keep: int | None = None,
        policy: PolicyName | Policy = "sliding",
        prefill_step: int = 512,
        store: PrefixCache | None = None,
        *,
        bits: Bits | None = None,
        kv_bits: KvBits | None = None,
        far_bits: KvBits | None = None,
        calibration: Calibration | None = None,
        checkpoint_bytes: int | None = None,
        **settings: Unpack[PolicySettings],
    ) -> Session:
        """Return a new, empty session.

        Args:
            policy: what happens when the budget is reached: `Sliding(512)`, `Shift`, `Archive`,
                `SelfExtend` or `Full` with their settings, or the name of one of these, with its
                settings as arguments here.
            max_kv_size: the budget: the most cells (tokens of context) it holds. None for the
                trained length, or for the reach of self-extend.
            keep: how many of the first tokens are never evicted, 4 by default; -1 for the whole
                first prompt. For "sliding", "shift" and "archive".
            settings: `discard` of "shift": how many of the oldest cells are evicted at once (half
                by default). `group` and `window` of "self_extend": positions per group, and newest
                tokens that are not grouped. `window`, `method` and `ratio` of "archive": how many
                of the newest tokens are kept exactly (eleven sixteenths of the budget by default),
                and how older ones are compressed.
            prefill_step: the most prompt tokens evaluated at once. It changes speed and memory, and
                logits by rounding only, unless cells are quantised: tokens of a step see each
                other's cells unquantised, and those of earlier steps quantised. With `far_bits`
                this matters only below `keep`.
            store: the prefix cache for first prompts. Sessions with quantised cells do not use it.
            bits: the number of bits in which cells are stored, `Bits(kv="8")`; or use the next two.
            kv_bits: 8, 4 or "8/4" (keys and values) for all cells.
            far_bits: the same for cells outside the window: kept, pinned, compressed and grouped.
            calibration: the model's statistics for "archive"; see `load_calibration`. None for the
                stored one, if there is one and no other method than "kvzap" is chosen.
            checkpoint_bytes: see `Session.checkpoint_bytes`; 256 MB by default.

        Raises InvalidArgument for a number out of range, an unknown policy, and a setting that the
        policy does not have. Raises StoreError if the stored calibration is damaged.
        """
        keep_prompt = validation.optional_integer("keep", keep, WHOLE_PROMPT) == WHOLE_PROMPT
        if isinstance(policy, Policy):
            if names := _passed_names(max_kv_size=max_kv_size, keep=keep, **settings):
                raise InvalidArgument(
                    f"{', '.join(names)} cannot be combined with {policy}, which already defines it"
                )
            session_policy = policy
        else:
            arguments: dict[str, Any] = {**settings, "keep": 0 if keep_prompt else keep}
            if max_kv_size is None:
                max_length = self.spec.max_positions
                max_kv_size = make_policy(policy, max_length, **arguments).max_budget(max_length)
            session_policy = make_policy(policy, max_kv_size, **arguments)
        session_policy = self._fit_policy(session_policy)
        if calibration is None and session_policy.uses_stored_calibration:
            calibration = self.calibration
        if calibration is not None:
            validation.instance("calibration", calibration, Calibration).require(self)
            statistics = calibration.statistics
            session_policy = session_policy.with_calibration(statistics, calibration.digest)
        session_policy.require_statistics()
        if bits is not None and _passed_names(kv_bits=kv_bits, far_bits=far_bits):
            raise InvalidArgument("pass either bits, or kv_bits and far_bits")
        if bits is None:
            bits = Bits(bits_name(kv_bits), bits_name(far_bits))
        validation.instance("bits", bits, Bits)
        session = Session(self, session_policy, prefill_step, store, bits)
        if keep_prompt:
            session.keep = WHOLE_PROMPT
        if checkpoint_bytes is not None:
            session.checkpoint_bytes = checkpoint_bytes
        return session

    def _keep_system(
        self, system: str, policy: PolicyName | Policy = "sliding", **settings: Any
    ) -> dict[str, Any]:
        """Return the settings of a session with a `keep` that includes a system prompt."""
        if settings.get("keep") is None:
            if isinstance(policy, Policy):
                if "keep" in policy.settings():
                    keep = max(policy.keep, count_system_tokens(self.text, system))
                    policy = policy.with_settings(keep=keep)
            elif policy in _POLICIES_WITH_KEEP:
                settings["keep"] = count_system_tokens(self.text, system)
        return {**settings, "policy": policy}

    def _fit_policy(self, policy: Policy) -> Policy:
        """Adapt a policy to the trained length. Raises InvalidArgument if it exceeds it."""
        try:
            return policy.for_model(self.spec.max_positions)
        except InvalidArgument as error:
            if self.spec.rope.kind != "longrope":
                raise
            raise InvalidArgument(
                f"{error}. The model uses RoPE kind longrope: beyond this length its frequencies "
                "change, and cached keys are already rotated. Leave max_kv_size out or lower it: "
                'such a session can generate indefinitely, and policy "self_extend" reaches '
                "further back"
            ) from error


def _passed_names(**arguments: object) -> list[str]:
    """Return the names of the arguments that are not None."""
    return [name for name, value in arguments.items() if value is not None]


def resolve_device(name: str) -> torch.device:
    """Return a torch device by name. Raises InvalidArgument if it cannot be used."""
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float32, device=device).cpu()  # "meta" can be created, not read
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        raise InvalidArgument(
            f"device {name!r} is not available: torch {torch.__version__} has {_device_names()}"
        ) from error
    return device


def _device_names() -> str:
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return ", ".join([*names, "mps"] if torch.backends.mps.is_available() else names)
