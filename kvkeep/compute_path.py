"""Who computes a model on this machine, and why nobody faster does."""

import warnings
from dataclasses import dataclass, field
from functools import cache

import torch

from kvkeep.cache import Layout
from kvkeep.compiled.decoder import obstacle
from kvkeep.compiled.instruction_sets import TORCH, choice, runs_here
from kvkeep.errors import SlowPathWarning
from kvkeep.models.spec.model_spec import ModelSpec

MORE = "`kvkeep doctor` says what there is on this machine"


@dataclass(frozen=True)
class ComputePath:
    """name: of the instruction set that the compiled kernels use, or "torch".

    against: why nobody faster computes, by name. slow: the same in words, where it is nothing that
    was asked for, by an argument or by the environment; else "".
    """

    name: str
    against: dict[str, str] = field(default_factory=dict)
    slow: str = ""

    def __str__(self) -> str:
        against = "; ".join(f"{name} {why}" for name, why in self.against.items())
        if self.name == TORCH:
            return f"{TORCH}: {against}"
        return f"compiled kernels of {self.name}" + (f"; {against}" if against else "")


def path_of(spec: ModelSpec, layout: Layout) -> ComputePath:
    """layout: of the model's cells, which have the dtype and the device of its weights.

    Raises InvalidArgument as `kvkeep.compiled.instruction_sets.choice` does.
    """
    chosen, why = choice(), obstacle(spec, layout)
    if not why:
        against = {f"those of {name}": each for name, each in chosen.against.items()}
        lacking = [] if chosen.asked else list(filter(runs_here, chosen.against))
        slow = f"those of {lacking[0]} {chosen.against[lacking[0]]}" if lacking else ""
        return ComputePath(chosen.name, against, slow)
    asked = chosen.asked or layout.device.type != "cpu" or layout.dtype is not torch.bfloat16
    slow = "" if asked else f"the compiled kernels {why}"
    return ComputePath(TORCH, {"the compiled kernels": why}, slow)


def slowness(path: ComputePath) -> str:
    """What a person is told of a path that is slower than it could be; "" of any other."""
    if not path.slow:
        return ""
    who = "torch" if path.name == TORCH else f"the kernels of {path.name}"
    return f"the model is computed by {who}, slower than it could be: {path.slow}; {MORE}"


@cache
def warn_of(slowness: str) -> None:
    """A SlowPathWarning, if there is something to say: once a process."""
    if slowness:
        warnings.warn(slowness, SlowPathWarning, stacklevel=4)  # who called kvkeep.load_model
