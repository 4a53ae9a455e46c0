"""A cache for transformers' `generate` and forwards: each row of a batch is a kvkeep session."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, SupportsIndex, TypeVar, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep import validation
from kvkeep.cache import Bits
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.errors import InvalidArgument
from kvkeep.integrations.transformers.cache_forward import SessionBatch
from kvkeep.integrations.transformers.model import from_transformers
from kvkeep.policies import Policy, PolicySettings
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.session.checkpoints import holds_beginning
from kvkeep.session.history import History
from kvkeep.session.session import Session
from kvkeep.session.spans import Span
from kvkeep.storage.snapshots.fingerprint import Exactness
from kvkeep.storage.snapshots.snapshot import Snapshot
from kvkeep.types import KvBits, PolicyName

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _session_method(
    method: Callable[Concatenate[Session, _P], _T], drops_padding: bool = False
) -> Callable[Concatenate["KvkeepCache", _P], _T]:
    """Return a method of the cache that calls this method of its only session.

    drops_padding: padding is no longer counted, since the method changes earlier tokens.
    """

    @wraps(method)
    def call(self: "KvkeepCache", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        result = method(self.session, *args, **kwargs)
        if drops_padding:
            self.padding = [0]
        return result

    return call


def _holds_before(session: Session, count: int) -> bool:
    """Whether a session's last `count` tokens can be removed."""
    memory = session.core.memory
    return holds_beginning(memory, len(memory.tokens) - count)


class KvkeepCache(SessionBatch):
    """A bounded, durable and editable KV cache in place of transformers' `DynamicCache`.

        cache = KvkeepCache(model, max_kv_size=512)
        model.generate(**inputs, past_key_values=cache, max_new_tokens=5_000)

    Pass it as `past_key_values` to the model that it was made for: to `generate`, with any way of
    decoding, or to a forward. Its tokens are `input_ids`, which `generate` does not evaluate again;
    its policy determines which of their cells it still holds. A forward that fails leaves it as it
    was. It has no gradients: call the model under `torch.no_grad()`, as `generate` does.
    `copy.copy` and `copy.deepcopy` fork it; it cannot be pickled.

    Each row of a batch is a session of its own (`sessions`). The methods that act on one session
    need a batch of one.

    model: the kvkeep model. padding: for each row, how many of the columns evaluated so far were
    padding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_kv_size: int | None = None,
        keep: int | None = None,
        policy: PolicyName | Policy = "sliding",
        prefill_step: int = 512,
        *,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        bits: Bits | None = None,
        kv_bits: KvBits | None = None,
        far_bits: KvBits | None = None,
        calibration: Calibration | None = None,
        **settings: Unpack[PolicySettings],
    ):
        """Create an empty cache.

        Args:
            model: a transformers model that generates text.
            max_kv_size, keep, policy, settings: the most cells that each row holds, and what
                happens at that number; as in `Model.session`.
            prefill_step: tokens of a prompt that are evaluated at once.
            tokenizer: as in `from_transformers`; needed for `insert` and `replace` with text.
            bits, kv_bits, far_bits: how many bits cells are kept in, as in `Model.session`.
            calibration: statistics of the model, for the policy "archive".

        Raises:
            UnsupportedModel: naming why, for a model whose cells kvkeep does not support.
            InvalidArgument: as `Model.session`.
        """
        self.model = from_transformers(model, tokenizer)
        session = self.model.session(
            max_kv_size,
            keep,
            policy,
            prefill_step,
            bits=bits,
            kv_bits=kv_bits,
            far_bits=far_bits,
            calibration=calibration,
            **settings,
        )
        super().__init__(self.model.executor, session)

    @classmethod
    def load(
        cls,
        model: PreTrainedModel,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        calibration: Calibration | None = None,
    ) -> "KvkeepCache":
        """Load a cache from a snapshot in a file, saved by this process or another.

        Raises FingerprintMismatch, naming what differs, for a snapshot of another model, and
        StoreError or a subclass for a damaged file.
        """
        return cls.restore(model, Snapshot.load(path), tokenizer, calibration)

    @classmethod
    def restore(
        cls,
        model: PreTrainedModel,
        snapshot: Snapshot,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        calibration: Calibration | None = None,
    ) -> "KvkeepCache":
        """Restore a cache from a snapshot in memory. Raises as `load`."""
        cache = cls.__new__(cls)
        cache.model = from_transformers(model, tokenizer)
        session = cache.model.restore(snapshot, calibration=calibration)
        SessionBatch.__init__(cache, cache.model.executor, session)
        return cache

    def __len__(self) -> int:
        """Return the number of layers that have cells."""
        return self.model.spec.layers

    def __repr__(self) -> str:
        return f"<KvkeepCache of {len(self.sessions)}: {self.sessions[0]!r}>"

    @property
    def batch(self) -> Self:
        """The batch of sessions, which is this cache."""
        return self

    # The session of a batch of one

    @property
    def session(self) -> Session:
        """The session of a batch of one. Raises InvalidArgument if there are more rows."""
        if len(self.sessions) != 1:
            raise InvalidArgument(
                f"this cache has {len(self.sessions)} rows, each with its own session: choose one "
                "with cache.sessions[row]"
            )
        return self.sessions[0]

    @property
    def tokens(self) -> History:
        """Every token id so far, including those that the policy has evicted."""
        return self.session.tokens

    @property
    def input_ids(self) -> Tensor:
        """The tokens as `generate` takes them, `[1, n]`: pass them with the new tokens appended.

        Raises InvalidArgument if padding was evaluated with them; see `drop_padding`.
        """
        if self.padding[0]:
            raise InvalidArgument(
                "these tokens were evaluated with padding: pass them to generate with their "
                "padding and attention_mask, or call cache.drop_padding() first"
            )
        device = self.model.decoder.new_cache().layout.device
        return torch.tensor([list(self.tokens)], dtype=torch.int64, device=device)

    @property
    def spans(self) -> dict[str, Span]:
        return self.session.spans

    @property
    def exactness(self) -> Exactness:
        """Whether a restored cache continues with bitwise equal results, or why not."""
        return self.session.exactness

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a fork with the same model; transformers copies a cache to share a prefix."""
        return self.fork()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidArgument(
            "a KvkeepCache cannot be pickled, since it belongs to a model in this process: save it "
            "with cache.snapshot().save(path), and load it with KvkeepCache.load(model, path)"
        )

    snapshot = _session_method(Session.snapshot)
    name = _session_method(Session.name)
    span = _session_method(Session.span)
    pin = _session_method(Session.pin)
    unpin = _session_method(Session.unpin)
    compress = _session_method(Session.compress)
    delete = _session_method(Session.delete, drops_padding=True)
    insert = _session_method(Session.insert, drops_padding=True)
    replace = _session_method(Session.replace, drops_padding=True)
    rewind = _session_method(Session.rewind, drops_padding=True)

    def drop_padding(self) -> None:
        """Stop counting past padding: later masks and `input_ids` have no columns for it."""
        _ = self.session  # raises for a batch of several rows
        self.padding = [0]

    # The interface of transformers' caches

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, no maximum. A full policy raises ContextFull instead."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns of a mask, and the first one's index."""
        return self.get_seq_length() + query_length, 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise InvalidArgument(
            "layers cannot write to a KvkeepCache directly: call the model it was made for, or "
            "generate, with past_key_values=cache"
        )

    @property
    def batch_size(self) -> int:
        return len(self.sessions)

    @property
    def is_initialized(self) -> bool:
        return bool(self.get_seq_length())

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed exactly: while no token was evicted."""
        memories = [session.core.memory for session in self.sessions]
        return all(
            memory.num_held == len(memory.tokens) and not memory.decoder.spec.keeps_states
            for memory in memories
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns, for assisted decoding: of all rows or, by an error, of none.

        tokens_to_remove: the number of columns, negative. Those before a row's first token are its
        padding. Raises InvalidArgument if there are fewer, or if earlier tokens were evicted to
        make room for these.
        """
        num_columns = abs(validation.integer("tokens_to_remove", tokens_to_remove))
        if not num_columns:
            return
        if tokens_to_remove > 0:
            raise InvalidArgument("crop needs a negative number: the number of tokens to remove")
        if num_columns > self.get_seq_length():
            raise InvalidArgument(
                f"crop removes at most the {self.get_seq_length()} columns that the cache has; "
                f"found {num_columns}"
            )
        counts = [min(num_columns, len(session.tokens)) for session in self.sessions]
        if not self.is_croppable or not all(map(_holds_before, self.sessions, counts)):
            raise InvalidArgument(
                "these tokens cannot be removed, since earlier ones were evicted or layers keep "
                "states: decode without an assistant, or with a larger max_kv_size"
            )
        with interrupts_deferred():
            for row, count in enumerate(counts):
                self.sessions[row].take_back(count)
                self.padding[row] -= num_columns - count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue beam search from these rows; beams from the same row share its cells."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, for several beams or answers of a prompt."""
        self.select([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows by indices or by a mask, `[rows]`."""
        rows = torch.arange(self.batch_size, dtype=torch.int64, device="cpu")
        self.select(rows[indices.cpu()].tolist())
