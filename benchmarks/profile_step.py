"""Profile of decode steps, by phase of the kernels or by torch operator."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity

from kvkeep import Model, Session
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.compiled.structures import PHASES
from kvkeep.runtime.worker import compute_lock

_WARM, _OPERATORS = 5, 8


@dataclass(frozen=True)
class Share:
    """A part of a step. bytes: of weights or cells that it reads; None if negligible."""

    name: str
    seconds: float
    bytes: int | None = None


@dataclass(frozen=True)
class Profile:
    """A step after `context` tokens. seconds: mean per token. shares: means of its parts."""

    context: int
    seconds: float
    shares: tuple[Share, ...]


def profile_step(
    model: Model, prompt: Sequence[int], context: int, tokens: int, progress: Callable[[int], None]
) -> Profile:
    """Decode `tokens` after the first `context` of the prompt; calls `progress(1)` for each."""
    session = model.session(policy="full")
    session.feed(prompt[:context])
    for _ in range(_WARM):
        session.next_token()
    executor = model.decoder.executor
    if isinstance(executor, CompiledExecutor):
        return Profile(context, *_by_phases(session, executor, tokens, progress))
    return Profile(context, *_by_torch(session, tokens, progress))


def _mean_token_seconds(session: Session, tokens: int, progress: Callable[[int], None]) -> float:
    seconds = []
    for _ in range(tokens):
        start = perf_counter()
        session.next_token()
        seconds.append(perf_counter() - start)
        progress(1)
    return mean(seconds)


def _by_phases(
    session: Session, compiled: CompiledExecutor, tokens: int, progress: Callable[[int], None]
) -> tuple[float, tuple[Share, ...]]:
    """Read the phase timers of the kernels; time the head separately."""
    counted = (ctypes.c_double * len(PHASES))()
    compiled.seconds = counted
    try:
        total = _mean_token_seconds(session, tokens, progress)
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
        start = perf_counter()
        compiled.logits(hidden)
        seconds.append(perf_counter() - start)
    return mean(seconds)


def _bytes_read(session: Session, compiled: CompiledExecutor) -> dict[str, int]:
    """Return the bytes read from memory per token, by phase."""
    roles = {"q_proj": "projections", "k_proj": "projections", "v_proj": "projections"}
    roles |= {"o_proj": "output", "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}
    roles |= {"lm_head": "head", "gate": "mlp", "shared_expert_gate": "mlp"}
    roles |= {"in_proj": "projections", "out_proj": "output"}  # of state layers
    roles |= {f"in_proj_{part}": "projections" for part in ("qkv", "z", "b", "a")}
    read = dict.fromkeys((*roles.values(), "attention"), 0)
    for name, nbytes in compiled.matrix_bytes().items():
        read[roles[name.removesuffix(".weight").rpartition(".")[2]]] += nbytes
    states = session.cache.recurrent_states.values()
    state_bytes = 2 * sum(state.nbytes for state in states)  # each is read, and a new one written
    read["attention"] = session.cache.cells * session.cache.layout.cell_bytes + state_bytes
    return read


def _by_torch(
    session: Session, tokens: int, progress: Callable[[int], None]
) -> tuple[float, tuple[Share, ...]]:
    """Return the slowest torch operators, for models without compiled kernels."""
    total = _mean_token_seconds(session, tokens, progress)
    # The profiler sees only this thread: make it the compute worker.
    with compute_lock(), torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(tokens):
            session.next_token()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    shares = [
        Share(event.key, event.self_cpu_time_total / 1e6 / tokens) for event in events[:_OPERATORS]
    ]
    return total, tuple(shares)


def table(profiles: Sequence[Profile]) -> str:
    """Return the profiles as text: microseconds, share of the token, and GB/s of reads."""
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
