"""The two scopes in which a session changes: its state, and one step of its cache.

`session_transaction` makes successors of the states of one or several sessions. All of them become
the sessions' states if the block succeeds, and none does if it raises. Within it, a
`StepTransaction` appends the tokens of one forward to the memories of these successors, also all
or none of them:

    with session_transaction([core]) as (state,):       # a successor of core.state
        with StepTransaction([state.memory], [[17]]) as step:
            hidden = decoder.hidden(step.tokens, step.step)
            step.commit(hidden, decoder.logits(hidden)) # token 17 is in state.memory
    assert core.state is state

If the forward raises, the cache step is not committed, what it overwrote is put back, and
`core.state` is the one that it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.step import DecodeStep
from kvkeep.compression.methods import Compression
from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.primitives import require_finite
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import computing
from kvkeep.session.core import SessionCore, SessionState
from kvkeep.session.memory import Memory


@contextmanager
def session_transaction(cores: Sequence[SessionCore]) -> Iterator[list[SessionState]]:
    """Replace the states of sessions by the successors that the block changes: all or none.

    Other threads and every Ctrl-C wait for the end of the block, so it should do no more than one
    step of evaluation.
    """
    with computing(), interrupts_deferred():
        change = StateChange(cores)
        try:
            yield change.states
            change.apply()
        except BaseException:
            change.rollback()
            raise
        change.commit()


class StateChange:
    """Successors of the states of sessions, to be applied and committed, or rolled back.

    The caller holds the compute lock and defers Ctrl-C while it applies and commits; a `with` block
    of `session_transaction` does all of that.

    states: the successors, in the order of the sessions.
    """

    def __init__(self, cores: Sequence[SessionCore]):
        self._cores = cores
        self._before = [core.state for core in cores]
        self.states = [state.successor() for state in self._before]

    def apply(self) -> None:
        """Make the successors the states of the sessions."""
        for core, state in zip(self._cores, self.states, strict=True):
            core.state = state

    def commit(self) -> None:
        """Release the states before, and storage that only they used. `rollback` ends here."""
        self._before.clear()  # a reference to them would keep that storage
        for state in self.states:
            state.memory.commit()

    def rollback(self) -> None:
        """Make the sessions what they were, and put back every cell that was overwritten."""
        for core, old, state in zip(self._cores, self._before, self.states, strict=True):
            core.state = old
            state.memory.cache.rollback()


@dataclass(frozen=True)
class StepResult:
    """The result of one step for one memory.

    hidden: `[n, hidden_size]` of the step's tokens. peak_cells: the number of cells held during
    the step. compressions: those that the policy did at its end.
    """

    hidden: Tensor
    peak_cells: int
    compressions: Sequence[Compression]


class StepTransaction:
    """One forward whose tokens are appended to one or several memories, all of them or none.

    It opens a step of each memory's cache. The caller evaluates `tokens` with `step`, under
    `torch.inference_mode()`, and then calls `commit` or `rollback`. As a context manager it rolls
    back if the block raises. After a rollback the memories must be discarded: they are successors
    or forks that a `session_transaction` or the caller drops.

    step: a step of n tokens of one memory, or a GroupStep of one token of each.
    tokens: `[n]` int64 on the cache's device: of one memory, or one of each.
    """

    step: AnyStep

    def __init__(
        self,
        memories: Sequence[Memory],
        chunks: Sequence[Sequence[int]],
        sampled: bool = False,
        grouped: bool = False,
    ):
        """Open a step of each memory's cache, which its policy has just opened for these tokens.

        chunks: the token ids for each memory. sampled: whether the model itself has chosen them.
        grouped: whether `step` is a GroupStep. If not, there is one memory.
        """
        self._memories, self._chunks = memories, chunks
        self._cells_before = [memory.cache.cells for memory in memories]
        self._cache_steps = ExitStack()
        # If one of these raises, the open steps are garbage, and they are never committed.
        steps = [
            self._cache_steps.enter_context(memory.cache.step(len(chunk), sampled))
            for memory, chunk in zip(memories, chunks, strict=True)
        ]
        first = memories[0]
        if grouped:
            decode_steps = [step for step in steps if isinstance(step, DecodeStep)]
            self.step = GroupStep(decode_steps, first.decoder.spec.heads)
        else:
            (self.step,) = steps
        ids = [token for chunk in chunks for token in chunk]
        self.tokens = torch.tensor(ids, dtype=torch.int64, device=first.cache.layout.device)

    def __enter__(self) -> "StepTransaction":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.rollback()

    def commit(self, hidden: Tensor, logits: Tensor | None) -> list[StepResult]:
        """Keep the tokens' cells, append the tokens to the memories and let the policies settle.

        hidden: `[n, hidden_size]` of `tokens`. logits: `[memories, vocab]`, finite, of the last
        token of each memory; None to compute them when they are first needed. Then `hidden` is
        checked instead. Raises NonFiniteLogits.
        """
        if logits is None:
            require_finite(hidden)
        self._cache_steps.close()
        results, several = [], len(self._memories) > 1
        for index, (memory, chunk) in enumerate(zip(self._memories, self._chunks, strict=True)):
            # Rows are copied: the last row of one session must not keep those of all in memory.
            rows = hidden[index : index + 1].clone() if several else hidden
            last = None
            if logits is not None:
                last = logits[index].clone() if several else logits[0]
            memory.append(chunk, rows if several else rows[-1:].clone(), last)
            count = len(chunk)
            peak = self._cells_before[index] + count if count > 1 else memory.cache.cells
            results.append(StepResult(rows, peak, memory.policy.settle(memory.cache)))
        return results

    def rollback(self) -> None:
        """End the cache steps without committing them. Does nothing after a commit."""
        failed = _StepRolledBackError()
        self._cache_steps.__exit__(type(failed), failed, None)


class _StepRolledBackError(Exception):
    """Ends a cache step that is not to be committed."""
