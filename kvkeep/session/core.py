"""The state of a session, and the parts that all operations on a session work with."""

import sys
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvkeep import validation
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.errors import InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import compute_lock
from kvkeep.session.checkpoints import beginning
from kvkeep.session.drafts import DraftCounts
from kvkeep.session.memory import Memory
from kvkeep.session.sampler import Sampler
from kvkeep.session.sampling import Sampling
from kvkeep.session.spans import TokenRange, span_after_edit
from kvkeep.storage.prefixes.block import PrefixCache

WHOLE_PROMPT = -1  # keep: all of the first prompt


@dataclass
class SessionState:
    """The state of a session, replaced as a whole by one assignment.

    A state in use is never changed: a call changes a `successor`, and may fail at any point.

    memory: the tokens and their cells. spans: token ranges by name. keep_whole_prompt: whether
    `keep` will be set to the length of the first prompt, which has not been fed yet. rounded: the
    codec by which cells were rounded in a file, or "".
    """

    memory: Memory
    sampler: Sampler = field(default_factory=Sampler)
    spans: Mapping[str, TokenRange] = field(default_factory=dict)
    keep_whole_prompt: bool = False
    rounded: str = ""

    def successor(self) -> "SessionState":
        """Return a copy to change and then use in place of this state; see `KVCache.successor`."""
        successor = shallow_copy(self)
        successor.memory = self.memory.successor()
        return successor

    def fork(self) -> "SessionState":
        """Return a copy that changes independently of this one; cells are shared."""
        return replace(self, memory=self.memory.fork())

    def beginning(self, count: int) -> "SessionState":
        """Return the state of a session of the first `count` tokens; see `checkpoints.beginning`.

        The sampler begins anew. Raises InvalidArgument if the tokens are not all held.
        """
        memory = beginning(self.memory, count)
        state = SessionState(memory, Sampler(), self.spans, self.keep_whole_prompt, self.rounded)
        state.truncate_spans(count)
        return state

    @property
    def keep(self) -> int:
        """The number of first tokens that are never evicted; `WHOLE_PROMPT` if not known yet."""
        return WHOLE_PROMPT if self.keep_whole_prompt else self.memory.policy.keep

    def check_first_prompt(self, num_tokens: int) -> None:
        """Raise InvalidArgument if the whole first prompt is to be kept and does not fit."""
        if self.keep_whole_prompt:
            self.memory.policy.with_settings(keep=num_tokens)

    def keep_first_prompt(self, num_tokens: int) -> None:
        """Set `keep` to the length of the first prompt if all of it is to be kept."""
        if self.keep_whole_prompt:
            self.memory.change_policy(keep=num_tokens)
            self.keep_whole_prompt = False

    def sample(self, logits: Tensor, sampling: Sampling, suppressed: NDArray[np.int64]) -> int:
        """Return a sampled token id. logits: `[vocab]` float32. suppressed: as of `Sampler`."""
        if sampling.temperature:
            # A copy, as a failed call must not advance the generator of the present state.
            self.sampler = Sampler.from_state(self.sampler.state())
        return self.sampler.sample(logits, self.memory.tokens, sampling, suppressed)

    def truncate_spans(self, num_tokens: int) -> None:
        """Cut every span off after the first `num_tokens` tokens of the session."""
        self.move_spans(num_tokens, sys.maxsize, 0)

    def move_spans(self, start: int, end: int, added_count: int) -> None:
        """Update every span, as tokens `start ... end - 1` are replaced by `added_count` new ones.

        A span that loses all its tokens is removed.
        """
        spans = {}
        for name, old in self.spans.items():
            new = span_after_edit(old, start, end, added_count)
            if new[0] < new[1] or old[0] == old[1]:  # not emptied by this edit
                spans[name] = new
        self.spans = spans


@dataclass(eq=False)
class SessionCore:
    """The model, current state and settings of a session.

    Functions that feed, sample and edit take a core, and replace `state` by `session_transaction`.

    prefix_cache: for first prompts. finish_reason: why the last stream ended. drafts: of the last
    stream.
    """

    model: LoadedModel
    state: SessionState
    prefill_step: int
    prefix_cache: PrefixCache | None
    finish_reason: str | None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def memory(self) -> Memory:
        return self.state.memory

    def set_span(self, name: str, token_range: TokenRange | None) -> None:
        """Name a range of tokens; None removes the name."""
        if token_range is None:
            self.set_spans({}, removed=[name])
        else:
            self.set_spans({name: token_range})

    def set_spans(self, spans: Mapping[str, TokenRange], removed: Collection[str] = ()) -> None:
        """Name several ranges of tokens at once. removed: names to remove first."""
        with session_transaction([self]) as (state,):
            others = {name: span for name, span in state.spans.items() if name not in removed}
            state.spans = {**others, **spans}

    def encode(self, prompt: str | Sequence[int], special: bool) -> list[int]:
        """Return the ids of text, or validated ids. special: whether to parse special tokens."""
        if isinstance(prompt, str):
            return self.model.text.encode(prompt, validation.flag("special", special))
        if isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt[:1]):
            raise InvalidArgument(
                "a prompt is text or token ids; found messages. model.chat().say() takes one "
                "message at a time; model.text.chat(messages) renders them all as text"
            )
        return validation.token_ids("tokens", prompt, self.model.spec.vocab_size)

    def encode_prompt(self, prompt: str | Sequence[int], special: bool) -> list[int]:
        """Return a prompt's token ids. Raises InvalidArgument if empty, ContextFull if too long."""
        ids = self.encode(prompt, special)
        if not ids:
            raise InvalidArgument("the prompt is empty: expected at least one token")
        self.memory.require_room(len(ids))
        self.state.check_first_prompt(len(ids))
        return ids

    def token_range(self, start: int | str, end: int | None) -> TokenRange:
        """Return a range, `start ... end - 1` or that of a span named `start`, as two indices.

        Raises InvalidArgument for an unknown name and for a range that is empty or out of bounds.
        """
        if isinstance(start, str):
            if end is not None:
                raise InvalidArgument(f"a span name takes no end; found {start!r} to {end}")
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

    def is_forgotten(self, token_range: TokenRange) -> bool:
        """Whether a range has tokens, and none of them has a cell of its own any more."""
        start, end = token_range
        return start < end and not self.memory.count_exact(start, end)


class StateGuard:
    """Refuses a long change of a session whose state has changed since the change began.

    A `progress` callback may use the session, and what it does would be undone. Keeps no cells.
    """

    def __init__(self, core: SessionCore):
        self._core, self._state = core, weakref.ref(core.state)

    def require_unchanged(self) -> None:
        """Raise InvalidArgument if the session has another state now."""
        if self._core.state is not self._state():
            raise InvalidArgument(
                "`progress` changed the session, so the change that called it was not made"
            )


@contextmanager
def session_transaction(cores: Sequence[SessionCore]) -> Iterator[list[SessionState]]:
    """Replace the states of sessions by the successors that the block changes: all or none.

    Other threads and Ctrl-C wait for the end of the block: it should evaluate one step at most.
    """
    with compute_lock(), interrupts_deferred():
        change = StateChange(cores)
        try:
            yield change.states
            change.commit()
        except BaseException:
            change.rollback()
            raise


class StateChange:
    """Successors of the states of sessions, to commit or roll back.

    The caller holds the compute lock and defers Ctrl-C. states: the successors, by session.
    """

    def __init__(self, cores: Sequence[SessionCore]):
        self._cores = cores
        self._old_states = [core.state for core in cores]
        self.states = [state.successor() for state in self._old_states]

    def commit(self) -> None:
        """Replace the states of the sessions by the successors."""
        for core, state in zip(self._cores, self.states, strict=True):
            core.state = state
        self._old_states.clear()  # a reference would keep storage that only they used
        for state in self.states:
            state.memory.commit()

    def rollback(self) -> None:
        """Restore states and overwritten cells. Does nothing after a commit."""
        for core, old, state in zip(self._cores, self._old_states, self.states, strict=False):
            core.state = old
            state.memory.cache.rollback()
