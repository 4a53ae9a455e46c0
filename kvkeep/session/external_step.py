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
            for core, session_ids in zip(self._cores, ids, strict=True):
                core.memory.require_room(len(session_ids))
                core.state.check_prompt(len(session_ids))
            self._change = StateChange(self._cores)
            for state, session_ids in zip(self._change.states, ids, strict=True):
                state.keep_prompt(len(session_ids))
            self._open([state.memory for state in self._change.states])
        except BaseException:
            self.rollback()
            raise

    def _open(self, memories: Sequence[Memory]) -> None:
        """Evaluate all but the last step, and open that."""
        grouped, chunks = len(memories) > 1, list[Sequence[int]]()
        for index, (memory, ids) in enumerate(zip(memories, self._ids, strict=True)):
            done = self._evaluate(index, memory, ids, len(ids) - 1 if grouped else len(ids))
            chunks.append(list(ids[done:]))
            if grouped:
                memory.policy.open(memory.cache, 1)
        self._lock.enter_context(interrupts_deferred())
        self._inference_mode.__enter__()
        self._in_mode = True
        self._transaction = StepTransaction(memories, chunks, grouped=grouped)
        self.step = self._transaction.step
        self.tokens = self._transaction.tokens.view(len(memories), -1)

    def _evaluate(self, index: int, memory: Memory, ids: Sequence[int], end: int) -> int:
        """Evaluate steps of the first `end` ids; return how many of the ids are in the memory.

        If `end` is all of them, the cache is opened for the last step, which is not evaluated.
        """
        done, prefill_step = 0, self._cores[index].prefill_step
        while done < end:
            size = min(end - done, prefill_step - done % prefill_step)
            with interrupts_deferred(), torch.inference_mode():
                count = memory.policy.open(memory.cache, size, len(ids) - done - size)
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
        results = self._transaction.commit(hidden, None)
        for steps, result in zip(self._hidden, results, strict=True):
            steps.append(result.hidden)
        joined = [steps[0] if len(steps) == 1 else torch.cat(steps) for steps in self._hidden]
        self._leave_inference_mode()
        return joined

    def commit(self) -> None:
        """Append all tokens to the sessions, and release the compute lock.

        Raises KeyboardInterrupt if Ctrl-C was pressed meanwhile.
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
            # If gradients are enabled here, the forward was left early, and a no_grad around it has
            # ended. Leaving inference mode would restore that no_grad.
            gradients = torch.is_grad_enabled()
            self._inference_mode.__exit__(None, None, None)
            if gradients:
                torch.set_grad_enabled(True)
