"""Workers in processes of their own: whose turn it is, who is missing, and who has failed."""

import multiprocessing
from pathlib import Path

import pytest

from benchmarks.peers.base import About, Setup, Variant
from benchmarks.peers.remote import PeerFailed
from benchmarks.peers.worker_pool import WorkerPool

IDS = [(i * i * 7 + 3 * i) % 251 + 1 for i in range(200)]
# Two of the same peer, so that no other library has to be loaded.
VARIANTS = [Variant("kvkeep", name) for name in ("a", "b", "c")]


@pytest.fixture
def setup(small_folder: Path) -> Setup:
    return Setup(str(small_folder), small_folder, "cpu", 1)


@pytest.mark.slow
def test_turns_rotate_and_the_impatient_leave_slow_ones_out(setup: Setup) -> None:
    skipped, about = list[str](), dict[str, About]()
    with WorkerPool(setup, VARIANTS, skipped, about, patience=100.0) as pool:
        pool.warm_up(IDS, 200)
        orders = [[each.label for each in pool.turns(index)] for index in range(4)]
        a, b, c = (variant.label for variant in VARIANTS)
        assert orders == [[a, b, c], [b, c, a], [c, a, b], [a, b, c]]
        some = pool.remotes[:2]
        assert [each.label for each in pool.turns(1, among=some)] == [b, a]
        assert len(list(pool.turns(0, reading=100))) == 3
        assert skipped == []
        assert list(pool.turns(0, reading=10**12)) == []
        assert len(skipped) == 3
        assert "1,000,000,000,000 tokens takes more than 100 s" in skipped[0]
        assert pool.remotes[0].held() > 2**26
        assert pool.writing(pool.remotes[0]) > 0
    assert set(about) == {a, b, c}
    assert about[a].version.startswith("kvkeep ")
    assert multiprocessing.active_children() == []


def test_a_peer_that_does_not_come_up_is_named_and_left_out(setup: Setup, tmp_path: Path) -> None:
    broken = Variant("llama.cpp", "Q4_0", tmp_path / "nothing.gguf")
    skipped = list[str]()
    with WorkerPool(setup, [broken, VARIANTS[0]], skipped, {}, patience=100.0) as pool:
        assert [each.label for each in pool.remotes] == ["kvkeep a"]
    assert len(skipped) == 1
    assert skipped[0].startswith("llama.cpp Q4_0: ")


def test_without_kvkeep_itself_there_is_nothing_to_compare(setup: Setup) -> None:
    nowhere = Setup(setup.model, setup.folder, "nowhere", 1)
    with (
        pytest.raises(PeerFailed, match="kvkeep a: InvalidArgument: device 'nowhere'"),
        WorkerPool(nowhere, VARIANTS[:1], [], {}, patience=100.0),
    ):
        pass
    assert multiprocessing.active_children() == []


def test_what_fails_in_a_worker_is_told_and_a_dead_one_is_noticed(setup: Setup) -> None:
    with WorkerPool(setup, VARIANTS[:1], [], {}, patience=100.0) as pool:
        (remote,) = pool.remotes
        remote.open(200)
        with pytest.raises(PeerFailed, match=r"kvkeep a: InvalidArgument: .*empty"):
            remote.read([])
        assert remote.read(IDS[:10]) > 0
        for worker in multiprocessing.active_children():
            worker.kill()
        with pytest.raises(PeerFailed, match=r"its process (ended|is gone)"):
            remote.write(1)
