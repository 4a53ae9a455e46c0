"""Every peer does what it is asked: what it holds is seen by its tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.peers.base import Peer, Setup, Variant
from benchmarks.peers.worker import make_peer

IDS = [(i * i * 7 + 3 * i) % 251 + 1 for i in range(100)]
Make = Callable[[], Peer]


@pytest.fixture(scope="module", params=["kvkeep", "transformers", "mlx-lm", "llama.cpp"])
def peer(request: pytest.FixtureRequest, small_folder: Path) -> Peer:
    name, file = request.param, None
    pytest.importorskip({"llama.cpp": "llama_cpp", "mlx-lm": "mlx_lm"}.get(name, name))
    if name == "llama.cpp":  # it has no small model to read here
        file = request.getfixturevalue("smollm2_gguf")
    return make_peer(Setup(str(small_folder), small_folder, "cpu", 1), Variant(name, None, file))


def test_it_reads_and_writes(peer: Peer) -> None:
    peer.open(200)
    assert peer.read(IDS[:60]) > 0
    assert peer.read(IDS[60:]) > 0
    seconds = peer.write(3)
    assert len(seconds) == 3
    assert all(each > 0 for each in seconds)
    assert peer.tokens()[:100] == IDS
    assert len(peer.tokens()) == 103
    peer.open(200)
    assert peer.tokens() == []


def test_it_writes_what_kvkeep_writes(peer: Peer, small_folder: Path) -> None:
    if type(peer).__name__ == "LlamaCppPeer":
        pytest.skip("it has another model here")
    kvkeep = make_peer(Setup(str(small_folder), small_folder, "cpu", 1), Variant("kvkeep"))
    for each in (peer, kvkeep):
        each.open(200)
        each.read(IDS)
        each.write(4)
    assert peer.tokens() == kvkeep.tokens()


def test_an_endless_context_stays_within_its_budget(peer: Peer) -> None:
    peer.open_endless(32, 4)
    peer.read(IDS[:32])
    for _ in range(10):
        peer.write(5)
        assert len(peer.tokens()) <= 32
    if type(peer).__name__ != "TransformersPeer":
        assert peer.tokens()[:4] == IDS[:4]


def test_a_saved_context_comes_back(peer: Peer, tmp_path: Path) -> None:
    peer.open(200)
    peer.read(IDS)
    assert peer.save(tmp_path / "context") > 0
    peer.write(3)
    written = peer.tokens()
    peer.write(2)
    assert peer.restore(tmp_path / "context") > 0
    assert peer.tokens() == IDS
    peer.write(3)
    assert peer.tokens() == written


def test_a_fork_leaves_its_parent_as_it_was(peer: Peer) -> None:
    peer.open(200, forks=1)
    peer.read(IDS)
    peer.write(3)
    alone = peer.tokens()
    peer.open(200, forks=1)
    peer.read(IDS)
    forked = peer.fork()
    assert 0 < forked.alone < forked.with_token
    assert peer.tokens() == IDS
    peer.write(3)
    assert peer.tokens() == alone


def test_tokens_are_taken_out_where_that_is_offered(peer: Peer) -> None:
    peer.open(200)
    peer.read(IDS)
    seconds = peer.delete(40, 50)
    if type(peer).__name__ in ("TransformersPeer", "MlxPeer"):
        assert seconds is None
        return
    assert seconds is not None
    assert peer.tokens() == IDS[:40] + IDS[50:]
    peer.write(2)
    assert len(peer.tokens()) == 92
