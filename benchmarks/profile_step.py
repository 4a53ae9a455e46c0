"""Where the time of a decode step goes."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity

from kvkeep import Model, Session
from kvkeep.compiled.binding import PHASES
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.runtime.worker import computing

_WARM, _OPERATORS = 5, 8


@dataclass(frozen=True)
class Share:
    """A part of a step. bytes: of weights or of cells that it must read; None where few."""

    name: str
    seconds: float
    bytes: int | None = None


@dataclass(frozen=True)
class Profile:
    """One step after `context` tokens. seconds: mean of a token. shares: parts of it, means too."""

    context: int
    seconds: float
    shares: tuple[Share, ...]


def profile_step(
    model: Model, prompt: Sequence[int], context: int, tokens: int, done: Callable[[int], None]
) -> Profile:
    """Decodes `tokens` after the first `context` of the prompt. done: told of each token."""
    session = model.session(policy="full")
    session.feed(prompt[:context])
    for _ in range(_WARM):
        session.next_token()
    executor = model.decoder.executor
    if isinstance(executor, CompiledExecutor):
        return Profile(context, *_by_phases(session, executor, tokens, done))
    return Profile(context, *_by_torch(session, tokens, done))


def _timed(session: Session, tokens: int, done: Callable[[int], None]) -> float:
    seconds = []
    for _ in range(tokens):
        begun = perf_counter()
        session.next_token()
        seconds.append(perf_counter() - begun)
        done(1)
    return mean(seconds)


def _by_phases(
    session: Session, compiled: CompiledExecutor, tokens: int, done: Callable[[int], None]
) -> tuple[float, tuple[Share, ...]]:
    """The kernels count their own phases; the head is timed by itself."""
    counted = (ctypes.c_double * len(PHASES))()
    compiled.seconds = counted
    try:
        total = _timed(session, tokens, done)
    finally:
        compiled.seconds = None
    head = _head_seconds(session, compiled, tokens)
    read = _bytes_read(session, compiled)
    shares = [
        Share(name, seconds / tokens, read.get(name))
        for name, seconds in zip(PHASES, counted, strict=True)
    ]
    shares.append(Share("head", head, read["head"]))
    rest = total - sum(share.seconds for share in shares)
    return total, (*shares, Share("everything else", max(0.0, rest)))


def _head_seconds(session: Session, compiled: CompiledExecutor, tokens: int) -> float:
    hidden, seconds = session.core.memory.hidden, []
    assert hidden is not None
    for _ in range(tokens):
        begun = perf_counter()
        compiled.logits(hidden)
        seconds.append(perf_counter() - begun)
    return mean(seconds)


def _bytes_read(session: Session, compiled: CompiledExecutor) -> dict[str, int]:
    """By phase, what must come from memory for one token."""
    roles = {"q_proj": "projections", "k_proj": "projections", "v_proj": "projections"}
    roles |= {"o_proj": "output", "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}
    roles |= {"lm_head": "head", "gate": "mlp", "shared_expert_gate": "mlp"}
    read = dict.fromkeys((*roles.values(), "attention"), 0)
    for name, nbytes in compiled.matrix_bytes().items():
        read[roles[name.removesuffix(".weight").rpartition(".")[2]]] += nbytes
    read["attention"] = session.cache.cells * session.cache.layout.cell_bytes
    return read


def _by_torch(
    session: Session, tokens: int, done: Callable[[int], None]
) -> tuple[float, tuple[Share, ...]]:
    """Without the kernels, the operators that take most."""
    total = _timed(session, tokens, done)
    # Held, so that this thread computes: the profiler sees no other one.
    with computing(), torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(tokens):
            session.next_token()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    shares = [
        Share(event.key, event.self_cpu_time_total / 1e6 / tokens) for event in events[:_OPERATORS]
    ]
    return total, tuple(shares)


def table(profiles: Sequence[Profile]) -> str:
    """For reading: microseconds, share of the token, and gigabytes per second where it reads."""
    blocks = []
    for profile in profiles:
        lines = [
            f"after {profile.context:,} tokens: {1e6 * profile.seconds:,.0f} µs a token, "
            f"{1 / profile.seconds:.0f} tokens/s"
        ]
        for share in profile.shares:
            line = f"  {share.name:<24}{1e6 * share.seconds:>9,.0f} µs"
            line += f"{share.seconds / profile.seconds:>8.1%}"
            if share.bytes and share.seconds:
                speed = share.bytes / share.seconds / 1e9
                line += f"{share.bytes / 1e6:>9.1f} MB{speed:>7.1f} GB/s"
            lines.append(line)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
