"""The read-only properties of a session: its cells, tokens, spans and settings."""

import warnings
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from kvkeep.cache import Bits, KVCache
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.core import SessionCore
from kvkeep.session.history import History
from kvkeep.session.memory_use import MemoryUse, memory_use
from kvkeep.session.spans import Span, TokenRange, TokenStatus, token_statuses


class SessionViews:
    """The properties and methods of a `Session` that only read it."""

    core: SessionCore

    @property
    def holds_all(self) -> bool:
        """Whether each token is held, in a cell of its own; in local layers those of a window."""
        return self.core.memory.holds_all

    @property
    def checkpoints(self) -> list[int]:
        """Token counts at which there is a checkpoint, ascending."""
        return [each.num_tokens for each in self.core.memory.checkpoints.entries]

    def remembered(self, start: int | str, end: int | None = None) -> int:
        """Return how many tokens of a range or a named span are still held."""
        start_index, end_index = self.core.token_range(start, end)
        held = set(self.cache.serials())
        return sum(serial in held for serial in self.core.memory.serials[start_index:end_index])

    @property
    def nbytes(self) -> int:
        """Bytes of its cells, states and checkpoints in memory, idle storage included."""
        return self.core.memory.nbytes

    @property
    def memory_use(self) -> MemoryUse:
        """The bytes of its parts in memory, and how many tokens a rewind would evaluate again."""
        return memory_use(self.core.memory)

    @property
    def finish_reason(self) -> str | None:
        """The reason the last stream ended; see `stream`."""
        return self.core.finish_reason

    def __repr__(self) -> str:
        spans, pins = len(self.core.state.spans), len(self.core.memory.pins)
        details = (f", {spans} spans" if spans else "") + (f", {pins} pinned" if pins else "")
        return (
            f"<{type(self).__name__} of {self.core.model.name}: {self.policy}, "
            f"{self.cache.cells:,} of {self.max_kv_size:,} cells "
            f"({self.cache.nbytes / 1e6:,.1f} MB), {len(self.tokens):,} tokens{details}>"
        )

    @property
    def cache(self) -> KVCache:
        """The present cache; each call that changes the session replaces it."""
        return self.core.memory.cache

    @property
    def tokens(self) -> History:
        """All token ids so far, evicted ones included: immutable, and equal to a list of them."""
        return self.core.memory.tokens

    @property
    @computes_in_worker
    def logits(self) -> Tensor | None:
        """`[vocab]` float32 for the last token evaluated (a copy); None before the first."""
        logits = self.core.memory.logits()
        return None if logits is None else logits.clone()

    @property
    def policy(self) -> str:
        return self.core.memory.policy.name

    @property
    def max_kv_size(self) -> int:
        return self.core.memory.policy.max_kv_size

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its policy, the budget included."""
        return self.core.memory.policy.settings()

    @property
    def bits(self) -> Bits:
        """The number of bits in which cells are stored."""
        return self.core.memory.bits

    @property
    def room(self) -> int | None:
        """The count of tokens that still fit; None for no limit."""
        return self.core.memory.policy.room(self.cache)

    def text(self) -> str:
        """Return all tokens as text, special tokens included."""
        return self.core.model.text.decode(self.tokens)

    @property
    def spans(self) -> dict[str, Span]:
        """Named spans, where they are now, and how much of each is still remembered."""
        held, serials = set(self.cache.serials()), self.core.memory.serials
        return {
            name: Span(name, start, end, sum(serial in held for serial in serials[start:end]))
            for name, (start, end) in self.core.state.spans.items()
        }

    @property
    def span_ranges(self) -> Mapping[str, TokenRange]:
        """The range of each span: its first token, and the one after its last. Cheap."""
        return MappingProxyType(self.core.state.spans)

    def watch(self) -> Callable[[], bool]:
        """Return a function that tells whether the session has changed since this call."""
        state_at_call = weakref.ref(self.core.state)
        return lambda: state_at_call() is not self.core.state

    @property
    def token_status(self) -> list[TokenStatus]:
        """The status of each token, in order; see `TokenStatus`."""
        return token_statuses(self.core.memory)

    @property
    def places(self) -> Mapping[str, TokenRange]:
        """Deprecated: use `span_ranges`."""
        message = "Session.places is deprecated: use Session.span_ranges"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.span_ranges

    @property
    def standing(self) -> list[TokenStatus]:
        """Deprecated: use `token_status`."""
        message = "Session.standing is deprecated: use Session.token_status"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.token_status
