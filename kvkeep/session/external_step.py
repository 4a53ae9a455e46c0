"""A step of several sessions that somebody else computes, and that begins and ends apart."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.step import DecodeStep
from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.primitives import require_finite
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import computing
from kvkeep.session.memory import Memory
from kvkeep.session.session import Session
from kvkeep.session.state import State


class OutsideStep:
    """Tokens on their way into sessions, all or nothing.

    What cannot be one step, as a policy has it, is evaluated here; the last step is left open for
    whoever computes it, and then `finish` is called, and `keep` or `rollback`. Meanwhile no other
    thread computes, and Ctrl-C waits.

    step: the open one: of one session, or of one token of each. tokens: what it is of, `[1, n]` or
    `[sessions, 1]`.
    """

    step: AnyStep
    tokens: Tensor

    def __init__(self, sessions: Sequence[Session], given: Sequence[Sequence[int]]):
        """given: token ids for each session, at least one. Raises as `Session.feed`."""
        self._sessions, self._given = sessions, given
        self._held, self._open = ExitStack(), ExitStack()
        self._mode, self._computing = torch.inference_mode(), False
        self._works: list[State] = []
        self._hidden: list[list[Tensor]] = [[] for _ in sessions]
        self._last: list[Sequence[int]] = []
        self._held.enter_context(computing())
        self._before = [session._state for session in sessions]
        try:
            for session, ids in zip(sessions, given, strict=True):
                session._memory.require_room(len(ids))
                session._state.check_prompt(len(ids))
            self._works = [state.successor() for state in self._before]
            for work, ids in zip(self._works, given, strict=True):
                work.keep_prompt(len(ids))
            self._begin()
        except BaseException:
            self.rollback()
            raise

    def _begin(self) -> None:
        """Evaluates all but the last step, and opens that."""
        alone = len(self._sessions) == 1
        for index, (work, ids) in enumerate(zip(self._works, self._given, strict=True)):
            done = self._read(index, work.memory, ids, len(ids) if alone else len(ids) - 1)
            self._last.append(ids[done:])
            if not alone:
                work.memory.policy.open(work.memory.cache, 1)
        self._held.enter_context(interrupts_deferred())
        self._mode.__enter__()
        self._computing = True
        memories, steps = [work.memory for work in self._works], []
        for memory, last in zip(memories, self._last, strict=True):
            steps.append(self._open.enter_context(memory.cache.step(len(last))))
        decoder, device = memories[0].decoder, memories[0].cache.layout.device
        if alone:
            self.step = steps[0]
        else:
            opened = [step for step in steps if isinstance(step, DecodeStep)]
            self.step = GroupStep(opened, decoder.spec.heads)
        self.tokens = torch.tensor(self._last, dtype=torch.int64, device=device)

    def _read(self, index: int, memory: Memory, ids: Sequence[int], upto: int) -> int:
        """Evaluates steps of the first `upto` ids.

        Where these are all, the last step is left, and the policy has opened the cache for it.
        Returns how many of them are in memory.
        """
        done, step = 0, self._sessions[index].prefill_step
        while done < upto:
            wanted = min(upto - done, step - done % step)
            with interrupts_deferred(), torch.inference_mode():
                count = memory.policy.open(memory.cache, wanted, len(ids) - done - wanted)
                if done + count == len(ids):
                    break
                hidden = memory.step_opened(ids[done : done + count]).hidden
            self._hidden[index].append(hidden)
            done += len(hidden)
        return done

    def finish(self, hidden: Tensor) -> list[Tensor]:
        """Ends the open step with what it has come to. The sessions are as they were still.

        hidden: `[n, hidden_size]` of its tokens, or `[sessions, hidden_size]`. Returns those of all
        tokens of each session, `[tokens, hidden_size]`. Raises NonFiniteLogits.
        """
        require_finite(hidden)
        alone = len(self._works) == 1
        self._open.close()
        for index, (work, ids) in enumerate(zip(self._works, self._last, strict=True)):
            own = hidden if alone else hidden[index : index + 1].clone()
            self._hidden[index].append(own)
            work.memory.take_in(list(ids), own[-1:].clone(), None)
            work.memory.policy.settle(work.memory.cache)
        found = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self._hidden]
        self._end_mode()
        return found

    def keep(self) -> None:
        """The sessions have all tokens from now on, and other threads may compute.

        Raises KeyboardInterrupt if Ctrl-C came meanwhile.
        """
        with self._held:
            for session, work in zip(self._sessions, self._works, strict=True):
                session._take(work)
            self._before.clear()
            for work in self._works:
                work.memory.commit()

    def rollback(self) -> None:
        """Leaves the sessions as they were."""
        failed = _PutBackError()
        self._open.__exit__(type(failed), failed, None)  # a step that fails is not kept
        self._end_mode()
        for session, state in zip(self._sessions, self._before, strict=True):
            session._take(state)
        for work in self._works:
            work.memory.cache.rollback()
        self._held.close()

    def _end_mode(self) -> None:
        if self._computing:
            self._computing = False
            # Enabled within inference mode: a forward was left without this, and a no_grad around
            # it has ended. The mode would restore what was before, which is that no_grad's.
            enabled = torch.is_grad_enabled()
            self._mode.__exit__(None, None, None)
            if enabled:
                torch.set_grad_enabled(True)


class _PutBackError(Exception):
    """Ends a step that is not to be kept."""
