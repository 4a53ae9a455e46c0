"""A step of several sessions that another library's forward computes."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.primitives import require_finite
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import compute_lock
from kvkeep.session.core import SessionCore, StateChange
from kvkeep.session.evaluation import (
    StepTransaction,
    evaluate_chunk,
    make_room_for_chunk,
    step_end,
)
from kvkeep.session.memory import Memory
from kvkeep.session.session import Session


class ExternalStep:
    """Tokens to append to sessions, all or none, whose last step another library computes.

    Earlier steps are evaluated here, if the policy needs several. The last one is left open: the
    caller computes `tokens` with `step`, and calls `finish` and then `commit`, or `rollback`.
    Meanwhile no other thread computes, and Ctrl-C waits.

    step: the open step: of one session, or of one token of each session.
    tokens: its tokens, `[1, n]` or `[sessions, 1]`.
    """

    step: AnyStep
    tokens: Tensor

    def __init__(self, sessions: Sequence[Session], ids: Sequence[Sequence[int]]):
        """ids: token ids for each session, at least one. Raises as `Session.feed`."""
        self._past_hidden = list[list[Tensor]]()  # by session, of each step before the last
        self._inference_mode: torch.inference_mode | None = None
        with ExitStack() as exit_stack:
            exit_stack.enter_context(compute_lock())
            self._open(exit_stack, [session.core for session in sessions], ids)
            self._exit_stack = exit_stack.pop_all()

    def _open(
        self, exit_stack: ExitStack, cores: Sequence[SessionCore], ids: Sequence[Sequence[int]]
    ) -> None:
        for core, session_ids in zip(cores, ids, strict=True):
            core.memory.require_room(len(session_ids))
            core.state.check_first_prompt(len(session_ids))
        self._state_change = StateChange(cores)
        exit_stack.callback(self._state_change.rollback)
        memories = [state.memory for state in self._state_change.states]
        chunks, grouped = list[Sequence[int]](), len(cores) > 1
        for core, state, session_ids in zip(cores, self._state_change.states, ids, strict=True):
            state.keep_first_prompt(len(session_ids))
            hidden, chunk = _open_last_step(state.memory, session_ids, core.prefill_step, grouped)
            self._past_hidden.append(hidden)
            chunks.append(chunk)
        exit_stack.enter_context(interrupts_deferred())
        exit_stack.callback(self._leave_inference_mode)
        self._inference_mode = torch.inference_mode()
        self._inference_mode.__enter__()
        self._transaction = StepTransaction(memories, chunks, grouped=grouped)
        self.step = self._transaction.step
        self.tokens = self._transaction.tokens.view(len(memories), -1)

    def finish(self, hidden: Tensor) -> list[Tensor]:
        """End the open step. The sessions do not change yet. Raises NonFiniteLogits.

        hidden: `[n, hidden_size]` of the open step's tokens. Returns those of all tokens of each
        session, `[tokens, hidden_size]`.
        """
        with self._transaction:
            require_finite(hidden)
        self._transaction.append(hidden, None)
        hidden_by_session = [
            torch.cat([*steps, last]) if steps else last
            for steps, last in zip(self._past_hidden, hidden.chunk(len(self.tokens)), strict=True)
        ]
        self._leave_inference_mode()
        return hidden_by_session

    def commit(self) -> None:
        """Append all tokens to the sessions, and release the compute lock.

        Raises KeyboardInterrupt if Ctrl-C was pressed meanwhile.
        """
        with self._exit_stack:
            self._state_change.commit()

    def rollback(self) -> None:
        """Leave the sessions as they were. Does nothing after a commit."""
        self._exit_stack.close()

    def _leave_inference_mode(self) -> None:
        if self._inference_mode is None:
            return
        # If gradients are enabled here, the forward was left early, and a no_grad around it has
        # ended. Leaving inference mode would restore that no_grad.
        gradients_enabled = torch.is_grad_enabled()
        self._inference_mode.__exit__(None, None, None)
        self._inference_mode = None
        if gradients_enabled:
            torch.set_grad_enabled(True)


def _open_last_step(
    memory: Memory, ids: Sequence[int], prefill_step: int, grouped: bool
) -> tuple[list[Tensor], Sequence[int]]:
    """Evaluate all but the last step of the ids, and have the policy open the cache for that.

    grouped: whether the last step is of one token. Returns the hidden states of each evaluated
    step, and the ids of the last one.
    """
    hidden, done, chunked_ids = list[Tensor](), 0, ids[:-1] if grouped else ids
    while done < len(chunked_ids):
        with interrupts_deferred(), torch.inference_mode():
            end = step_end(done, prefill_step)
            chunk = make_room_for_chunk(memory, chunked_ids, done, end)
            done += len(chunk)
            if done == len(ids):
                return hidden, chunk
            hidden.append(evaluate_chunk(memory, chunk).hidden)
    memory.policy.open(memory.cache, 1)
    return hidden, ids[-1:]
