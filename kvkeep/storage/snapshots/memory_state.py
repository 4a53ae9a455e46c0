"""The state of a session's memory in a snapshot, and its checks before it is restored."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvkeep.cache import CacheState, Layout
from kvkeep.cache.checkpoint import Checkpoints
from kvkeep.cache.checks import (
    require,
    require_finite,
    require_int,
    require_tensor,
    require_within,
)
from kvkeep.models.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class MemoryState:
    """The state of a `Memory`: a session's tokens, their cells, and the last token's logits."""

    tokens: Tensor  # [n] int32
    serials: Tensor  # [n] int64
    pins: Collection[int]  # serials of pinned tokens
    hidden: Tensor | None  # [1, hidden_size] of the last token, if known
    logits: Tensor | None  # [vocab] of the last token, if known
    cache: CacheState
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    def check(self, spec: ModelSpec, layout: Layout) -> None:
        """Raise ValueError if no memory of this model can be in this state."""
        self.check_consistency()
        require_within("token ids", self.tokens, 0, spec.vocab_size - 1)
        if self.hidden is not None and self.logits is not None:
            require_tensor("hidden", self.hidden, layout.dtype, 1, spec.hidden_size)
            require_tensor("logits", self.logits, torch.float32, spec.vocab_size)
        if spec.states is not None and (states := self.cache.recurrent_states):
            spec.states.check(states, layout.dtype)

    def check_consistency(self) -> None:
        """Raise ValueError if no memory of any model can be in this state."""
        require_tensor("tokens", self.tokens, torch.int32, None)
        require_tensor("serials", self.serials, torch.int64, len(self.tokens))
        require_within("serials", self.serials, 0, self.cache.serial - 1)
        self._check_order()
        if self.hidden is not None and self.logits is not None:
            require(bool(len(self.tokens)), "logits without tokens")
            require_finite("hidden", self.hidden)
            require_finite("logits", self.logits)
        else:
            require(self.hidden is self.logits, "only one of hidden and logits")

    def _check_order(self) -> None:
        """Check that serials are unique, and cells and pins those of tokens, in token order."""
        sorted_serials, indices = self.serials.sort()
        require(bool((sorted_serials.diff() > 0).all()), "two tokens have the same serial")
        cell_serials = self.cache.serials()
        if len(cell_serials):
            # NumPy: torch would wake its threads, which costs more than the search.
            ranks = torch.from_numpy(np.searchsorted(sorted_serials.numpy(), cell_serials.numpy()))
            ranks.clamp_(max=max(0, len(sorted_serials) - 1))
            all_known = len(sorted_serials) > 0 and torch.equal(sorted_serials[ranks], cell_serials)
            require(all_known, "there are cells without tokens")
            require(bool((indices[ranks].diff() > 0).all()), "cells are not in token order")
        for pin in self.pins:
            require_int("a pin", pin, 0, self.cache.serial - 1)
        require(len(set(self.pins)) == len(self.pins), "a token is pinned twice")
        require(set(self.pins) <= set(cell_serials.tolist()), "a pinned token has no cell")
