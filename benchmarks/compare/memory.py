"""Prefill, save, fork, edit and restore of a long context."""

from pathlib import Path

from benchmarks.compare.bench import Bench, Results
from benchmarks.compare.results import Measure, Reading
from benchmarks.peers.base import Peer
from benchmarks.peers.remote import Remote
from benchmarks.peers.worker_pool import WARM_UP_TOKENS
from benchmarks.progress import bar

FORKS = 1  # at once


def memory_measures(bench: Bench) -> list[Measure]:
    context, deleted = f"{bench.plan.remembered:,} tokens", f"{bench.plan.deleted} tokens"
    titles = {
        "read": f"evaluate {context}",
        "restore": f"restore {context}, to first logits",
        "save": f"save {context}",
        "fork": f"fork {context}",
        "fork-token": "fork, and decode a token",
        "delete": f"delete {deleted} in the middle, to next logits",
    }
    times = [Measure(f"memory/{key}", title, "ms", more=False) for key, title in titles.items()]
    return [*times, Measure("memory/file", f"file of {context}", "MB", more=False)]


def memory(bench: Bench) -> Results:
    plan = bench.plan
    with bench.pool() as pool:
        pool.warm_up(bench.ids, plan.longest, FORKS)
        for remote in pool.remotes:
            _measure_once(
                remote, bench.ids[:WARM_UP_TOKENS], 1, _context_file(bench, remote), plan.longest
            )
        with bar(plan.rounds * len(pool.remotes) * plan.remembered, "memory") as progress:
            for index in range(plan.rounds):
                for remote in pool.turns(index, plan.remembered):
                    ids, path = bench.ids[: plan.remembered], _context_file(bench, remote)
                    values = _measure_once(remote, ids, plan.deleted, path, plan.longest)
                    progress(plan.remembered)
                    for key, value in values.items():
                        yield Reading(f"memory/{key}", remote.label, index, value)


def _context_file(bench: Bench, remote: Remote) -> Path:
    """Return the path of a variant's file, in its own folder: some peers append a suffix."""
    folder = bench.folder / remote.label
    folder.mkdir(exist_ok=True)
    return folder / "context"


def _measure_once(
    peer: Peer, ids: list[int], deleted: int, path: Path, max_tokens: int
) -> dict[str, float]:
    """Return milliseconds, and megabytes of the file, by the last part of the measure's key."""
    peer.open(max_tokens, FORKS)
    seconds = {"read": peer.read(ids), "save": peer.save(path)}
    size = sum(file.stat().st_size for file in path.parent.iterdir())
    seconds["fork"], seconds["fork-token"] = peer.fork()
    middle = (len(ids) - deleted) // 2
    delete_seconds = peer.delete(middle, middle + deleted)
    if delete_seconds is not None:
        seconds["delete"] = delete_seconds
    seconds["restore"] = peer.restore(path)
    return {key: value * 1e3 for key, value in seconds.items()} | {"file": size / 1e6}
