"""All that a session is at one moment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.session.memory import Memory
from kvkeep.session.sampling import Sampler, Sampling
from kvkeep.session.spans import Place


@dataclass
class State:
    """What a session holds and replaces as a whole, so that it is never half of one.

    A session changes in one assignment, of its state. So what it holds is not changed any more: a
    call works on a `successor`, which may fail or be interrupted anywhere.

    spans: where each name is. keep_whole_prompt: whether all of the first prompt will be kept, of
    which nothing has come yet.
    """

    memory: Memory
    sampler: Sampler = field(default_factory=Sampler)
    spans: Mapping[str, Place] = field(default_factory=dict)
    keep_whole_prompt: bool = False

    def successor(self) -> "State":
        """The same, to be changed in place of this one; see `KVCache.successor`."""
        successor = shallow_copy(self)
        successor.memory = self.memory.successor()
        return successor

    def fork(self) -> "State":
        """The same, going its own way; cells are shared."""
        fork = shallow_copy(self)
        fork.memory = self.memory.fork()
        return fork

    def check_prompt(self, count: int) -> None:
        """Raises InvalidArgument where a first prompt of `count` tokens could not all be kept."""
        if self.keep_whole_prompt:
            self.memory.policy.with_settings(keep=count)

    def keep_prompt(self, count: int) -> None:
        """Keeps all of a first prompt of `count` tokens, where that is asked for."""
        if self.keep_whole_prompt:
            self.memory.change(keep=count)
            self.keep_whole_prompt = False

    def choose(self, logits: Tensor, how: Sampling) -> int:
        """The next token. Drawn from a generator of its own, so that one before it draws the same.

        logits: `[vocab]` float32, of the last token.
        """
        if how.temperature:
            self.sampler = Sampler.at(self.sampler.state())
        return self.sampler.choose(logits, self.memory.tokens, how)

    def move_spans(self, moved: Callable[[Place], Place]) -> None:
        """Moves every span. One that loses its last token is gone."""
        places = {name: (old, moved(old)) for name, old in self.spans.items()}
        self.spans = {
            name: new for name, (old, new) in places.items() if new[0] < new[1] or old[0] == old[1]
        }
