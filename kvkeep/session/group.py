"""Several sessions of one model that decode at the same time."""

from collections.abc import Sequence

from torch import Tensor

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.decoding import decode_step
from kvkeep.session.memory import memory_bytes
from kvkeep.session.sampling import Sampling, require_own_constraints
from kvkeep.session.session import GREEDY, Session


class SessionGroup:
    """Sessions that decode each next token together: the weights are read once for all of them.

    Cells that they share, such as those of the prompt that forks come from, are read once as well.
    Otherwise the sessions need nothing in common but the model: each keeps its policy, its length
    and its own random generator, and may be used alone between two calls.
    """

    def __init__(self, sessions: Sequence[Session]):
        """Raises InvalidArgument for no session, the same session twice, or several models."""
        sessions = validation.items("sessions", sessions)
        self.sessions = tuple(validation.instance("a session", s, Session) for s in sessions)
        if not self.sessions:
            raise InvalidArgument("a group needs at least one session; found none")
        self.model = self.sessions[0].core.model
        for index, session in enumerate(self.sessions):
            if session in self.sessions[:index]:
                raise InvalidArgument(
                    f"session {index} is in the group already; add a fork of it instead"
                )
            model = session.core.model
            if model is not self.model:
                raise InvalidArgument(
                    f"session {index} and session 0 belong to different loaded models: "
                    f"{model.name!r} and {self.model.name!r}. Use sessions of one loaded model"
                )

    def __repr__(self) -> str:
        cells = sum(session.cache.cells for session in self.sessions)
        return (
            f"<SessionGroup of {len(self.sessions)} sessions of {self.model.name}: "
            f"{cells:,} cells, {self.nbytes / 1e6:,.1f} MB>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all sessions, as `Session.nbytes`; what they share counts once."""
        return memory_bytes([session.core.memory for session in self.sessions])

    @computes_in_worker
    def next_tokens(self, sampling: Sampling | Sequence[Sampling] = GREEDY) -> list[int]:
        """Sample a token for each session, append it and evaluate all of them at once.

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
        samplings = self._samplings_by_session(sampling)
        require_own_constraints(samplings)
        cores = [session.core for session in self.sessions]
        logits = list[Tensor]()
        for index, core in enumerate(cores):
            if (last_logits := core.memory.logits()) is None:
                raise InvalidArgument(
                    f"session {index} has nothing to continue: feed a prompt first"
                )
            core.memory.require_room(1)
            logits.append(last_logits)
        return decode_step(cores, logits, samplings, grouped=True)

    def _samplings_by_session(self, sampling: Sampling | Sequence[Sampling]) -> Sequence[Sampling]:
        if isinstance(sampling, Sampling):
            return [sampling] * len(self.sessions)
        samplings = validation.items("sampling", sampling)
        sampling = [validation.instance("sampling", item, Sampling) for item in samplings]
        if len(sampling) != len(self.sessions):
            raise InvalidArgument(
                f"one sampling for all, or one for each of {len(self.sessions)} sessions; "
                f"found {len(sampling)}"
            )
        return sampling
