"""A step of several sessions that another library's forward computes."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from kvkeep.models.layers.executor import AnyStep
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import computing
from kvkeep.session.core import StateChange
from kvkeep.session.evaluation import StepTransaction, evaluate_chunk
from kvkeep.session.memory import Memory
from kvkeep.session.session import Session


class ExternalStep:
    """Tokens that are appended to sessions, all or none, whose last step is computed elsewhere.

    The steps before the last are evaluated here, where a policy makes several steps of the tokens.
    The last one is left open: the caller computes `tokens` with `step`, and calls `finish` and then
    `commit`, or `rollback`. Meanwhile no other thread computes, and Ctrl-C waits.

    step: the open step: of one session, or of one token of each session.
    tokens: its tokens, `[1, n]` or `[sessions, 1]`.
    """

    step: AnyStep
    tokens: Tensor

    def __init__(self, sessions: Sequence[Session], ids: Sequence[Sequence[int]]):
        """ids: token ids for each session, at least one. Raises as `Session.feed`."""
        self._cores, self._ids = [session.core for session in sessions], ids
        self._lock = ExitStack()
        self._inference_mode, self._in_mode = torch.inference_mode(), False
        self._change: StateChange | None = None
        self._transaction: StepTransaction | None = None
        self._hidden: list[list[Tensor]] = [[] for _ in sessions]  # of the steps, by session
        self._lock.enter_context(computing())
        try:
            for core, own in zip(self._cores, ids, strict=True):
                core.memory.require_room(len(own))
                core.state.check_prompt(len(own))
            self._change = StateChange(self._cores)
            for state, own in zip(self._change.states, ids, strict=True):
                state.keep_prompt(len(own))
            self._open([state.memory for state in self._change.states])
        except BaseException:
            self.rollback()
            raise

    def _open(self, memories: Sequence[Memory]) -> None:
        """Evaluate all but the last step, and open that."""
        alone, chunks = len(memories) == 1, list[Sequence[int]]()
        for index, (memory, ids) in enumerate(zip(memories, self._ids, strict=True)):
            done = self._evaluate(index, memory, ids, len(ids) if alone else len(ids) - 1)
            chunks.append(list(ids[done:]))
            if not alone:
                memory.policy.open(memory.cache, 1)
        self._lock.enter_context(interrupts_deferred())
        self._inference_mode.__enter__()
        self._in_mode = True
        self._transaction = StepTransaction(memories, chunks, grouped=not alone)
        self.step = self._transaction.step
        self.tokens = self._transaction.tokens.view(len(memories), -1)

    def _evaluate(self, index: int, memory: Memory, ids: Sequence[int], end: int) -> int:
        """Evaluate steps of the first `end` ids. Returns how many of the ids are in the memory.

        If `end` is all of them, the last step is left out, and the policy has opened the cache for
        it.
        """
        done, size = 0, self._cores[index].prefill_step
        while done < end:
            wanted = min(end - done, size - done % size)
            with interrupts_deferred(), torch.inference_mode():
                count = memory.policy.open(memory.cache, wanted, len(ids) - done - wanted)
                if done + count == len(ids):
                    break
                hidden = evaluate_chunk(memory, ids[done : done + count]).hidden
            self._hidden[index].append(hidden)
            done += len(hidden)
        return done

    def finish(self, hidden: Tensor) -> list[Tensor]:
        """End the open step with its result. The sessions do not change yet.

        hidden: `[n, hidden_size]` of the open step's tokens. Returns the hidden states of all
        tokens of each session, `[tokens, hidden_size]`. Raises NonFiniteLogits.
        """
        assert self._transaction is not None
        for parts, result in zip(self._hidden, self._transaction.commit(hidden, None), strict=True):
            parts.append(result.hidden)
        joined = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self._hidden]
        self._leave_inference_mode()
        return joined

    def commit(self) -> None:
        """Give the sessions all tokens, and let other threads compute.

        Raises KeyboardInterrupt if Ctrl-C came meanwhile.
        """
        assert self._change is not None
        with self._lock:
            self._change.apply()
            self._change.commit()

    def rollback(self) -> None:
        """Leave the sessions as they were."""
        if self._transaction is not None:
            self._transaction.rollback()
        self._leave_inference_mode()
        if self._change is not None:
            self._change.rollback()
        self._lock.close()

    def _leave_inference_mode(self) -> None:
        if self._in_mode:
            self._in_mode = False
            # If gradients are enabled here, the forward was left without its end, and a no_grad
            # around it is over. Leaving inference mode would restore the state before it, which is
            # that no_grad's.
            enabled = torch.is_grad_enabled()
            self._inference_mode.__exit__(None, None, None)
            if enabled:
                torch.set_grad_enabled(True)
