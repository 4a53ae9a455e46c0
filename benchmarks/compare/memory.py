"""A long context evaluated, saved, forked, edited and restored."""

from pathlib import Path

from benchmarks.compare.bench import Bench, Found
from benchmarks.compare.results import Measure, Reading
from benchmarks.peers.base import Peer
from benchmarks.peers.remote import Remote
from benchmarks.peers.worker_pool import WARMING
from benchmarks.progress import bar

FORKS = 1  # at once


def memory_measures(bench: Bench) -> list[Measure]:
    context, deleted = f"{bench.plan.remembered:,} tokens", f"{bench.plan.deleted} tokens"
    titles = {
        "read": f"evaluate {context}",
        "restore": f"restore {context}, to first logits",
        "save": f"save {context}",
        "fork": f"fork {context}",
        "fork-token": "fork, and write a token",
        "delete": f"delete {deleted} in the middle, to next logits",
    }
    times = [Measure(f"memory/{key}", title, "ms", more=False) for key, title in titles.items()]
    return [*times, Measure("memory/file", f"file of {context}", "MB", more=False)]


def memory(bench: Bench) -> Found:
    plan = bench.plan
    with bench.pool() as pool:
        pool.warm_up(bench.ids, plan.longest, FORKS)
        for remote in pool.remotes:
            _once(remote, bench.ids[:WARMING], 1, _place(bench, remote), plan.longest)
        with bar(plan.rounds * len(pool.remotes) * plan.remembered, "memory") as shown:
            for index in range(plan.rounds):
                for remote in pool.turns(index, plan.remembered):
                    ids, path = bench.ids[: plan.remembered], _place(bench, remote)
                    found = _once(remote, ids, plan.deleted, path, plan.longest)
                    shown(plan.remembered)
                    for key, value in found.items():
                        yield Reading(f"memory/{key}", remote.label, index, value)


def _place(bench: Bench, remote: Remote) -> Path:
    """A file in a folder of the variant's own: some peers choose how the name ends."""
    folder = bench.folder / remote.label
    folder.mkdir(exist_ok=True)
    return folder / "context"


def _once(peer: Peer, ids: list[int], deleted: int, path: Path, most: int) -> dict[str, float]:
    """Milliseconds, and megabytes of the file, by the last part of the measure's key."""
    peer.open(most, FORKS)
    seconds = {"read": peer.read(ids), "save": peer.save(path)}
    size = sum(each.stat().st_size for each in path.parent.iterdir())
    seconds["fork"], seconds["fork-token"] = peer.fork()
    middle = (len(ids) - deleted) // 2
    deleting = peer.delete(middle, middle + deleted)
    if deleting is not None:
        seconds["delete"] = deleting
    seconds["restore"] = peer.restore(path)
    return {key: each * 1e3 for key, each in seconds.items()} | {"file": size / 1e6}
