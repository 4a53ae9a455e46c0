"""The state of a session, and the parts that all operations on a session work with."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from kvkeep import validation
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.errors import InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import computing
from kvkeep.session.memory import Memory
from kvkeep.session.sampling import Sampler, Sampling
from kvkeep.session.spans import TokenRange
from kvkeep.storage.prefixes.block import PrefixCache

WHOLE_PROMPT = -1  # keep: all of the first prompt


@dataclass
class SessionState:
    """The state of a session: memory, sampler and spans, replaced as a whole by one assignment.

    A state in use is never changed: a call changes a `successor`, and may fail at any point.

    spans: token ranges by name. keep_whole_prompt: whether `keep` is to cover the first prompt,
    which has not been fed yet.
    """

    memory: Memory
    sampler: Sampler = field(default_factory=Sampler)
    spans: Mapping[str, TokenRange] = field(default_factory=dict)
    keep_whole_prompt: bool = False

    def successor(self) -> "SessionState":
        """Return a copy to be changed and taken in place of this one; see `KVCache.successor`."""
        successor = shallow_copy(self)
        successor.memory = self.memory.successor()
        return successor

    def fork(self) -> "SessionState":
        """Return a copy that changes independently of this one; cells are shared."""
        fork = shallow_copy(self)
        fork.memory = self.memory.fork()
        return fork

    @property
    def keep(self) -> int:
        """The count of first tokens that are never evicted; see `Session.keep`."""
        return WHOLE_PROMPT if self.keep_whole_prompt else self.memory.policy.keep

    def check_prompt(self, count: int) -> None:
        """Raise InvalidArgument if a first prompt of `count` tokens could not be kept whole."""
        if self.keep_whole_prompt:
            self.memory.policy.with_settings(keep=count)

    def keep_prompt(self, count: int) -> None:
        """Keep all of a first prompt of `count` tokens if the session is to do so."""
        if self.keep_whole_prompt:
            self.memory.change_policy(keep=count)
            self.keep_whole_prompt = False

    def sample(self, logits: Tensor, sampling: Sampling) -> int:
        """Sample the next token from a copy of the generator, so that a failed call draws nothing.

        logits: `[vocab]` float32, of the last token.
        """
        if sampling.temperature:
            self.sampler = Sampler.at(self.sampler.state())
        return self.sampler.choose(logits, self.memory.tokens, sampling)

    def truncate_spans(self, tokens: int) -> None:
        """Shorten every span to the first `tokens` tokens."""
        self.move_spans(lambda span: (min(span[0], tokens), min(span[1], tokens)))

    def move_spans(self, move: Callable[[TokenRange], TokenRange]) -> None:
        """Move every span. A span that loses its last token is removed."""
        moved = {name: (old, move(old)) for name, old in self.spans.items()}
        self.spans = {
            name: new for name, (old, new) in moved.items() if new[0] < new[1] or old[0] == old[1]
        }


@dataclass(eq=False)
class SessionCore:
    """The parts of a session: its model, its current state and its settings.

    The functions that edit, feed and sample a session take its core. They replace `state` by way
    of `session_transaction`, never in part.

    store: the prefix cache for first prompts, or None. finish_reason: why the last stream ended.
    """

    model: LoadedModel
    state: SessionState
    prefill_step: int
    store: PrefixCache | None
    finish_reason: str | None = None

    @property
    def memory(self) -> Memory:
        """The memory of the current state."""
        return self.state.memory

    def set_span(self, name: str, tokens: TokenRange | None) -> None:
        """Name a range of tokens; None removes the name."""
        with session_transaction([self]) as (state,):
            others = {other: span for other, span in state.spans.items() if other != name}
            state.spans = others if tokens is None else {**state.spans, name: tokens}

    def encode(self, prompt: str | Sequence[int], special: bool) -> list[int]:
        """Return the token ids of text, or checked token ids.

        special: whether the text of a special token becomes that token.
        """
        if isinstance(prompt, str):
            return self.model.text.encode(prompt, validation.flag("special", special))
        return validation.token_ids("tokens", prompt, self.model.spec.vocab_size)

    def encode_prompt(self, prompt: str | Sequence[int], special: bool) -> list[int]:
        """Return the token ids of a prompt that is to be evaluated next.

        Raises InvalidArgument for an empty prompt, ContextFull for one that does not fit.
        """
        ids = self.encode(prompt, special)
        if not ids:
            raise InvalidArgument("the prompt is empty: expected at least one token")
        self.memory.require_room(len(ids))
        self.state.check_prompt(len(ids))
        return ids

    def token_range(self, start: int | str, end: int | None) -> TokenRange:
        """Return tokens `start ... end - 1`, or the range of a named span, as a range.

        Raises InvalidArgument for an unknown name and for a range that is empty or out of bounds.
        """
        if isinstance(start, str):
            if end is not None:
                raise InvalidArgument(f"a span's name takes no end; found {start!r} to {end}")
            spans = self.state.spans
            if start not in spans:
                known = ", ".join(spans) or "none"
                raise InvalidArgument(f"there is no span {start!r}; there are: {known}")
            return spans[start]
        start, end = validation.integer("start", start), validation.optional_integer("end", end)
        total = len(self.memory.tokens)
        if end is None or not 0 <= start < end <= total:
            raise InvalidArgument(
                f"a range needs 0 <= start < end <= {total}; found {start} to {end}"
            )
        return start, end

    def is_forgotten(self, tokens: TokenRange) -> bool:
        """Whether a range has tokens, and none of them has a cell of its own any more."""
        start, end = tokens
        memory = self.memory
        return start < end and set(memory.serials[start:end]).isdisjoint(memory.cache.serials())


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
            change.commit()
        except BaseException:
            change.rollback()
            raise


class StateChange:
    """Successors of the states of sessions, to be committed or rolled back.

    The caller holds the compute lock and defers Ctrl-C meanwhile, as `session_transaction` does.

    states: the successors, in the order of the sessions.
    """

    def __init__(self, cores: Sequence[SessionCore]):
        self._cores = cores
        self._before = [core.state for core in cores]
        self.states = [state.successor() for state in self._before]

    def commit(self) -> None:
        """Make the successors the states of the sessions, and release the states before them."""
        for core, state in zip(self._cores, self.states, strict=True):
            core.state = state
        self._before.clear()  # a reference to them would keep storage that only they used
        for state in self.states:
            state.memory.commit()

    def rollback(self) -> None:
        """Make the sessions what they were, and put back every cell that was overwritten.

        Does nothing after a commit.
        """
        for core, old, state in zip(self._cores, self._before, self.states, strict=False):
            core.state = old
            state.memory.cache.rollback()
