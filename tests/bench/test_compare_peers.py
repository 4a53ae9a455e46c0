"""Every peer does what it is asked: what it holds is seen by its tokens."""

from pathlib import Path
from pydoc_data.topics import topics
from typing import cast

import pytest

from benchmarks.peers.base import Peer, Setup, TokenPeer, Variant
from benchmarks.peers.worker import make_peer
from kvkeep.models.hub.source import resolve
from kvkeep.models.text.codec import TextCodec

IDS = [(i * i * 7 + 3 * i) % 251 + 1 for i in range(100)]
FOLDERS = {"kvkeep": "kvkeep", "transformers": "transformers", "mlx-lm": "mlx_lm"}
FILES = {"llama.cpp": "llama_cpp", "ik_llama.cpp": "ik_llama_cpp", "openvino": "openvino_genai"}


@pytest.fixture(scope="module", params=[*FOLDERS, *FILES])
def token_peer(request: pytest.FixtureRequest, small_folder: Path) -> TokenPeer:
    name = request.param
    pytest.importorskip((FOLDERS | FILES)[name])
    # Those of FILES have no small model to read here.
    file = request.getfixturevalue("smollm2_gguf") if name in FILES else None
    return make_peer(Setup(str(small_folder), small_folder, "cpu", 1), Variant(name, None, file))


@pytest.fixture
def peer(token_peer: TokenPeer) -> Peer:
    if type(token_peer).__name__ == "OpenVinoPeer":
        pytest.skip("it only prefills and decodes")
    return cast(Peer, token_peer)


def test_it_reads_and_writes(token_peer: TokenPeer) -> None:
    token_peer.open(200)
    assert token_peer.read(IDS[:60]) > 0
    assert token_peer.read(IDS[60:]) > 0
    seconds = token_peer.write(3)
    assert len(seconds) == 3
    assert all(each > 0 for each in seconds)
    assert token_peer.tokens()[:100] == IDS
    assert len(token_peer.tokens()) == 103
    token_peer.open(200)
    assert token_peer.tokens() == []


def test_it_writes_what_kvkeep_writes(
    request: pytest.FixtureRequest, token_peer: TokenPeer, small_folder: Path
) -> None:
    model, ids = str(small_folder), IDS
    if request.node.callspec.params["token_peer"] in FILES:
        model = str(request.getfixturevalue("smollm2_gguf"))
        ids = TextCodec.open(resolve(model, progress=False)).encode(topics["if"])
    kvkeep = make_peer(Setup(model, small_folder, "cpu", 1), Variant("kvkeep"))
    for each in (token_peer, kvkeep):
        each.open(1000)
        each.read(ids)
        each.write(4)
    assert token_peer.tokens() == kvkeep.tokens()


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
    peer.read(IDS[:-1])
    peer.read(IDS[-1:])  # alone, as after loading: the number of rows changes rounding
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
