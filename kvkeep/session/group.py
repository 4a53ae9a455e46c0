"""Several sessions of one model that write at the same time."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.step import DecodeStep
from kvkeep.errors import InvalidArgument
from kvkeep.runtime.worker import computes
from kvkeep.session.held import changing
from kvkeep.session.memory import Memory
from kvkeep.session.sampling import Sampling, require_own_constraints
from kvkeep.session.session import GREEDY, Session


class SessionGroup:
    """Sessions that take each next token together: the weights are read once for all of them.

    Memory that they share, such as the prompt that forks come from, is attended to once as well.
    Otherwise they need have nothing in common but the model: each keeps its policy, its length and
    its own random generator, and may be used alone between two calls.
    """

    def __init__(self, sessions: Sequence[Session]):
        """Raises InvalidArgument for no session, one that is there twice, or several models."""
        self.sessions = tuple(validation.instance("a session", s, Session) for s in sessions)
        if not self.sessions:
            raise InvalidArgument("a group needs at least one session; found none")
        for index, session in enumerate(self.sessions):
            if session in self.sessions[:index]:
                raise InvalidArgument(
                    f"session {index} is in the group already; add a fork of it instead"
                )
            if session._model is not self.sessions[0]._model:
                raise InvalidArgument(
                    f"session {index} is of another model than session 0: {session._model.name!r} "
                    f"and {self.sessions[0]._model.name!r}, loaded apart; "
                    "a group is of sessions of one loaded model"
                )

    def __repr__(self) -> str:
        cells = sum(session.cache.cells for session in self.sessions)
        return (
            f"<SessionGroup of {len(self.sessions)} sessions of {self.sessions[0]._model.name}: "
            f"{cells:,} cells, {self.nbytes / 1e6:,.1f} MB>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of storage that all sessions' cells take, what they share counted once.

        As `KVCache.nbytes`: of compressed cells their positions and their bias, too.
        """
        storages = {
            storage.data_ptr(): storage.nbytes()
            for session in self.sessions
            for segment in session.cache.all_segments
            for storage in (tensor.untyped_storage() for tensor in segment.block.slots.tensors())
        }
        return sum(storages.values())

    @computes
    def next_tokens(self, sampling: Sampling | Sequence[Sampling] = GREEDY) -> list[int]:
        """Samples a token for each session, appends it and evaluates all of them at once.

        Args:
            sampling: one for all, or one for each session. With one seed for all, each session
                draws from a generator of its own that starts from it. A constraint follows the
                tokens of one session: each needs a sampling with a constraint object of its own.

        Returns the tokens, in the order of the sessions. A call that fails changes none of them.

        Raises:
            InvalidArgument: nothing was fed to a session yet, not as many samplings as sessions, or
                one constraint for several.
            ContextFull: the policy of one of them cannot take another token.
            NonFiniteLogits: the model produced NaN or infinity for one of them.
        """
        how = self._each(sampling)
        require_own_constraints(how)
        logits = [_ready(index, session._memory) for index, session in enumerate(self.sessions)]
        with changing(self.sessions) as works:
            each = zip(works, logits, how, strict=True)
            tokens = [work.choose(known, one) for work, known, one in each]
            _evaluate([work.memory for work in works], tokens)
        for token, one in zip(tokens, how, strict=True):
            if one.constraint is not None:
                one.constraint.accept(token)
        return tokens

    def _each(self, sampling: Sampling | Sequence[Sampling]) -> Sequence[Sampling]:
        if isinstance(sampling, Sampling):
            return [sampling] * len(self.sessions)
        sampling = [validation.instance("sampling", each, Sampling) for each in sampling]
        if len(sampling) != len(self.sessions):
            raise InvalidArgument(
                f"one sampling for all, or one for each of {len(self.sessions)} sessions; "
                f"found {len(sampling)}"
            )
        return sampling


def _ready(index: int, memory: Memory) -> Tensor:
    """The logits to choose from; raises where there are none, or no room for a token."""
    logits = memory.logits()
    if logits is None:
        raise InvalidArgument(
            f"session {index} has nothing to continue: feed it a prompt before asking for tokens"
        )
    memory.require_room(1)
    return logits


@torch.inference_mode()
def _evaluate(memories: Sequence[Memory], tokens: Sequence[int]) -> None:
    """A token into each memory by one forward."""
    decoder, device = memories[0].decoder, memories[0].cache.layout.device
    with ExitStack() as steps:
        opened = []
        for memory in memories:
            memory.policy.open(memory.cache, 1)
            step = steps.enter_context(memory.cache.step(1, sampled=True))
            assert isinstance(step, DecodeStep)
            opened.append(step)
        taken = torch.tensor(tokens, dtype=torch.int64, device=device)
        hidden = decoder.hidden(taken, GroupStep(opened, decoder.spec.heads))
        logits = decoder.logits(hidden)
    for row, (memory, token) in enumerate(zip(memories, tokens, strict=True)):
        # Rows of their own: one session's last logits must not hold those of all.
        memory.take_in([token], hidden[row : row + 1].clone(), logits[row].clone())
        memory.policy.settle(memory.cache)
