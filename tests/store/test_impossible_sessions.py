"""Undamaged files that describe a session which cannot exist are refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from altered_snapshots import altered
from small_models import small_model
from torch import Tensor

from kvkeep import Sampling
from kvkeep.errors import CorruptFile, InvalidSnapshot
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.container import read_container, write_container
from kvkeep.storage.snapshots.snapshot import Snapshot, read_snapshot_document

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(120)]
SAMPLING = Sampling(temperature=1.0, seed=3)
Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def ring() -> Session:
    """A session with 4 sinks, a full ring of 44 cells, a named span and a sampler state."""
    session = MODEL.session(48, prefill_step=32)
    session.feed(TEXT[:60])
    session.name("said", 50, 58)
    session.next_token(SAMPLING)
    return session


def pinned() -> Session:
    session = ring()
    session.pin(40, 44)
    session.feed(TEXT[:3])
    return session


def shifted() -> Session:
    """A session whose ring is not full."""
    session = MODEL.session(48, policy="shift", prefill_step=32)
    session.feed(TEXT[:90])
    return session


def archived() -> Session:
    session = MODEL.session(40, 4, "archive", method="snapkv", window=12, far_bits="4")
    session.feed(TEXT)
    return session


def archived_by_heads() -> Session:
    session = MODEL.session(60, policy="archive", window=20, method="knorm", budget="heads")
    session.feed(TEXT)
    return session


def ragged() -> Session:
    """A session with a ragged segment (a cell count per KV head) between sinks and newest cells."""
    session = MODEL.session(policy="full")
    session.feed(TEXT)
    session.compress(3.0, "knorm", recent=20, budget="heads")
    session.next_token(SAMPLING)
    return session


def grouped() -> Session:
    session = MODEL.session(policy="self_extend", group=2, window=16)
    session.feed(TEXT[:60])
    return session


def settings(**changed: object) -> Change:
    return lambda document, tensors: document["settings"].update(changed)


def policy(**changed: object) -> Change:
    return lambda document, tensors: document["policy"].update(changed)


def top_level(**changed: object) -> Change:
    return lambda document, tensors: document.update(changed)


def segment(index: int, **changed: object) -> Change:
    return lambda document, tensors: document["segments"][index].update(changed)


def tensor(name: str, transform: Callable[[Tensor], Tensor]) -> Change:
    def change(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = transform(tensors[name]).contiguous()

    return change


def with_value(name: str, index: tuple[int, ...], number: float) -> Change:
    def put(tensor_value: Tensor) -> Tensor:
        changed = tensor_value.clone()
        changed[index] = number
        return changed

    return tensor(name, put)


def without(*names: str) -> Change:
    def change(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            document.pop(name, None)
            tensors.pop(name, None)

    return change


def one_more_kv_head(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Add a KV head to every cell and to the layout in the document."""
    document["layout"]["kv_heads"] += 1
    for name in tensors:
        if name.endswith((".keys", ".values")):
            tensors[name] = torch.cat((tensors[name], tensors[name][:, :1]), 1)


def half_head_dim(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    document["layout"]["head_dim"] //= 2
    for name in tensors:
        if name.endswith((".keys", ".values")):
            tensors[name] = tensors[name][..., :8].contiguous()


def in_bfloat16(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    document["layout"]["dtype"] = "bfloat16"
    for name in tensors:
        if name.endswith((".keys", ".values")):
            tensors[name] = tensors[name].bfloat16()


def duplicate_window(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Duplicate the window's segment, with the same tokens."""
    document["segments"].append(document["segments"][1])
    for name in list(tensors):
        if name.startswith("segment.1."):
            tensors[name.replace("1", "2", 1)] = tensors[name]


def swap_segments(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Swap the far segment and the window's segment."""
    document["segments"].reverse()
    for name in [name for name in tensors if name.startswith("segment.0.")]:
        other = name.replace("0", "1", 1)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def without_anchors(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for entry in document["segments"]:
        entry["anchor"] = False


def add_to_counts(*changes: tuple[int, int, int]) -> Change:
    """Change counts of ragged cells; each change is (layer, KV head, difference)."""

    def counted(counts: Tensor) -> Tensor:
        changed = counts.clone()
        for layer, head, more in changes:
            changed[layer, head] += more
        return changed

    return tensor("segment.1.counts", counted)


def cells_beyond_the_counts(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Append a cell to the row of ragged cells that belongs to no head."""
    for name in ("keys", "values", "positions", "bias"):
        cells = tensors[f"segment.1.{name}"]
        tensors[f"segment.1.{name}"] = torch.cat((cells, cells[:1]))


def under_a_sliding_window(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Declare a sliding policy, whose window would evict a ragged cell of each head."""
    document["policy"] = {"name": "sliding", "max_kv_size": 4096, "keep": 0}
    document["settings"]["window"] = {"size": 4096, "discard": 1, "moves": False}


def without_tokens(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    document.update(tokens=0, segments=[])
    tensors.update(tokens=tensors["tokens"][:0], serials=tensors["serials"][:0])


def fewer_sinks(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    document["policy"]["keep"] = 20
    document["segments"][0]["anchor"] = False


def too_many_queries(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Store 129 queries at distinct times: one more than an observer keeps."""
    tensors["queries"] = tensors["queries"][:, :, :1].expand(-1, -1, 129, -1).contiguous()
    tensors["query_times"] = torch.arange(129)
    document.update(clock=1000, serial=1000)


CHANGES: dict[str, tuple[Callable[[], Session], Change]] = {
    # Cells
    "another number of KV heads": (ring, one_more_kv_head),
    "another head_dim": (ring, half_head_dim),
    "another dtype": (ring, in_bfloat16),
    "cells of tokens that do not exist": (ring, with_value("segment.1.serials", (3,), 10**6)),
    "cells with negative serials": (ring, with_value("segment.1.serials", (3,), -5)),
    "two cells of one token": (ring, tensor("segment.1.serials", lambda x: x[[0, *range(43)]])),
    "cells in reverse order": (shifted, tensor("segment.1.serials", lambda x: x.flip(0))),
    "a duplicate segment": (ring, duplicate_window),
    "positions in the future": (ring, with_value("segment.1.positions", (3,), 10**9)),
    "huge negative positions": (ring, with_value("segment.1.positions", (3,), -(2**62))),
    "a bias of NaN": (archived, with_value("segment.1.bias", (0, 0, 0), float("nan"))),
    "more ragged cells in one head": (ragged, add_to_counts((0, 0, 1))),
    "fewer ragged cells in one head": (ragged, add_to_counts((1, 1, -1))),
    "a negative count in one head": (ragged, add_to_counts((0, 0, -1000), (0, 1, 1000))),
    "a huge count in one head, a negative one in another": (
        ragged, add_to_counts((0, 1, 2**30), (1, 0, -(2**30)))),
    "counts whose sum overflows": (
        ragged, add_to_counts((0, 0, 2**62), (0, 1, 2**62), (1, 0, 2**63 - 1))),
    "counts of a wrong shape": (
        ragged, tensor("segment.1.counts", lambda x: x.flatten()[:2, None])),
    "ragged cells that belong to no head": (ragged, cells_beyond_the_counts),
    "ragged cells in the future": (ragged, with_value("segment.1.positions", (7,), 10**9)),
    "ragged cells with a serial": (ragged, with_value("segment.1.serials", (0,), 7)),
    "a ragged bias of infinity": (ragged, with_value("segment.1.bias", (3,), float("inf"))),
    "a score of NaN": (archived_by_heads, with_value("segment.1.worth", (3,), float("nan"))),
    "too few scores": (archived_by_heads, tensor("segment.1.worth", lambda x: x[1:])),
    "missing scores": (ragged, segment(1, worth=True)),
    "scores of cells that are not ragged": (archived, segment(1, worth=True)),
    "ragged cells in a segment that is not frozen": (ragged, segment(1, frozen=False)),
    "ragged cells in a ring": (ragged, segment(1, slot_order=True, start=2)),
    "ragged cells in a window that slides": (ragged, under_a_sliding_window),
    "ragged cells in an uncompressed segment": (ragged, segment(1, compressed=False)),
    "a ragged flag on cells that are not ragged": (archived, segment(1, ragged=True)),
    "compressed cells with a serial": (archived, with_value("segment.1.serials", (0,), 7)),
    # Segments
    "a map without a group": (ring, segment(0, map={"offset": 0})),
    "a map with group 0": (ring, segment(0, map={"offset": 0, "group": 0})),
    "grouped positions under sliding": (ring, segment(0, map={"offset": 10**6, "group": 4})),
    "groups of another size": (grouped, segment(0, map={"offset": 8, "group": 4})),
    "a map with a huge offset": (ring, segment(0, map={"offset": 2**70, "group": 1})),
    "a huge limit": (shifted, segment(1, limit=10**12)),
    "a huge ring": (shifted, segment(1, limit=10**8, capacity=10**8, start=10**8 - 2)),
    "an anchor with a huge limit": (grouped, segment(0, limit=10**8)),
    "a start far beyond the storage": (shifted, segment(1, start=10**12, capacity=10**12 + 100)),
    "a flag that is a number": (ring, segment(1, frozen=1)),
    "a sealed flag that is text": (ring, segment(1, sealed="no")),
    "an anchor flag on the window": (ring, segment(1, anchor=True)),
    "far cells without an anchor flag": (grouped, segment(0, anchor=False)),
    "segments in the wrong order": (grouped, swap_segments),
    "an archive without anchors": (archived, without_anchors),
    # Tokens, and the hidden state and logits of the last one
    "a token outside the vocabulary": (ring, with_value("tokens", (5,), 256)),
    "a negative token": (ring, with_value("tokens", (5,), -1)),
    "two tokens with one serial": (ring, with_value("serials", (5,), 6)),
    "a serial in the future": (ring, with_value("serials", (5,), 10**9)),
    "fewer tokens than serials": (ring, tensor("tokens", lambda x: x[:-1])),
    "a wrong token count": (ring, top_level(tokens=3)),
    "a wider hidden state": (ring, tensor("hidden", lambda x: torch.cat((x, x), 1))),
    "hidden states of two tokens": (ring, tensor("hidden", lambda x: torch.cat((x, x)))),
    "a hidden state in another dtype": (ring, tensor("hidden", lambda x: x.bfloat16())),
    "a hidden state of NaN": (ring, with_value("hidden", (0, 3), float("nan"))),
    "more logits": (ring, tensor("logits", lambda x: torch.cat((x, x)))),
    "fewer logits": (ring, tensor("logits", lambda x: x[:100])),
    "infinite logits": (ring, with_value("logits", (3,), float("inf"))),
    "logits without a hidden state": (ring, without("hidden")),
    "logits without tokens": (ring, without_tokens),
    # Clock and next serial
    "a clock ahead of all tokens": (ring, top_level(clock=10**6)),
    "a negative clock": (ring, top_level(clock=-1)),
    "a clock behind its cells": (ring, top_level(clock=20)),
    "a huge next serial": (ring, top_level(serial=2**60)),
    "a next serial that is in use": (ring, top_level(serial=30)),
    "a fractional clock": (ring, top_level(clock=60.5)),
    "no clock": (ring, without("clock")),
    # Settings
    "a prefill step of 0": (ring, settings(prefill_step=0)),
    "a fractional prefill step": (ring, settings(prefill_step=0.5)),
    "a flag that is text": (ring, settings(keep_whole_prompt="yes")),
    "a pin of a forgotten token": (pinned, settings(pins=[10])),
    "a pin of a token that does not exist": (pinned, settings(pins=[10**6])),
    "a duplicate pin": (
        pinned, lambda d, t: d["settings"]["pins"].append(d["settings"]["pins"][0])),
    "a pin that is text": (pinned, settings(pins=["40"])),
    "a span beyond the end": (ring, settings(spans={"said": [50, 10**6]})),
    "a span that ends before it starts": (ring, settings(spans={"said": [50, 40]})),
    "a span without an end": (ring, settings(spans={"said": [50]})),
    "spans without names": (ring, settings(spans=[[50, 58]])),
    "a window with discard 0": (ring, settings(window={"size": 44, "discard": 0})),
    "a window size that is text": (ring, settings(window={"size": "44"})),
    "an unknown window setting": (ring, settings(window={"unknown": 1})),
    # Policy
    "an unknown policy": (ring, policy(name="unknown")),
    "an unknown policy setting": (ring, policy(unknown=1)),
    "a budget below the number of cells": (ring, policy(max_kv_size=40)),
    "a budget above the model's context length": (ring, policy(max_kv_size=10**6)),
    "a huge budget": (ring, policy(max_kv_size=10**12)),
    "a fractional budget": (ring, policy(max_kv_size=48.0)),
    "as many sinks as the budget": (ring, policy(keep=48)),
    "fewer sinks, so that the window overflows": (ring, fewer_sinks),
    "an archive with too many cells": (archived, policy(window=24)),
    "an unknown method": (archived, policy(method="unknown")),
    "another group size": (grouped, policy(group=3)),
    "a smaller window": (grouped, policy(window=8)),
    "a window that evicts ragged cells": (ragged, settings(window={
        "size": 50, "discard": 1, "moves": False})),
    # Sampler state, and observed queries
    "a generator that is text": (ring, top_level(sampler={"seed": 3, "generator": "PCG64"})),
    "a generator of another kind": (ring, lambda d, t: (
        d["sampler"]["generator"].update(bit_generator="MT19937"))),
    "a generator state with too many bits": (ring, lambda d, t: (
        d["sampler"]["generator"]["state"].update(state=2**200))),
    "a generator without a seed": (ring, lambda d, t: d["sampler"].pop("seed")),
    "queries of too few heads": (archived, tensor("queries", lambda x: x[:, :3])),
    "queries of too few layers": (archived, tensor("queries", lambda x: x[:1])),
    "queries without times": (archived, without("query_times")),
    "queries of the future": (archived, tensor("query_times", lambda x: x + 10**6)),
    "queries in reverse order": (archived, tensor("query_times", lambda x: x.flip(0))),
    "queries that are NaN": (archived, tensor("queries", lambda x: x * float("nan"))),
    "more queries than are kept": (archived, too_many_queries),
    # Bits, fingerprint and metadata
    "unknown bits": (ring, top_level(bits={"kv": "3"})),
    "bits for both kv and far": (ring, top_level(bits={"kv": "8", "far": "4"})),
    "a fingerprint with a number": (ring, top_level(fingerprint={"weights": 1})),
    "a model name that is a number": (ring, top_level(model=5)),
    "notes that are a list": (ring, top_level(notes=[1])),
    "a time that is text": (ring, top_level(created="now")),
    "a layout with fields missing": (ring, top_level(layout={"layers": 2})),
    "a dtype that is a function": (ring, lambda d, t: d["layout"].update(dtype="load")),
}  # fmt: skip


def save_changed(session: Session, path: Path, change: Change) -> Path:
    session.snapshot().save(path)
    content = read_container(path, "snapshot", 4)
    change(content.document, content.tensors)
    write_container(path, "snapshot", 4, content.document, content.tensors)
    return path


@pytest.mark.parametrize("name", CHANGES)
def test_a_snapshot_of_an_impossible_session_is_refused(name: str, tmp_path: Path) -> None:
    make, change = CHANGES[name]
    path = save_changed(make(), tmp_path / "a.kvkeep", lambda document, tensors: None)
    MODEL.restore(Snapshot.load(path))  # the unchanged session loads
    save_changed(make(), path, change)
    with pytest.raises((CorruptFile, InvalidSnapshot)):
        MODEL.restore(Snapshot.load(path))


def test_describe_refuses_an_invalid_document(tmp_path: Path) -> None:
    for change in (top_level(notes=[1]), without("clock"), top_level(segments=[5]), policy(name=7)):
        path = save_changed(ring(), tmp_path / "a.kvkeep", change)
        with pytest.raises(CorruptFile):
            read_snapshot_document(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": torch.zeros(61, dtype=torch.int64)},
        {"tokens": None},
        {"segments": (None,)},
        {"clock": None},
        {"hidden": torch.zeros(1, 64), "logits": None},
        {"settings": {}},
        {"policy": {"name": "sliding"}},
        {"sampler": {"seed": 3}},
        {"observed_queries": "queries"},
        {"bits": None},
    ],
    ids=str,
)
def test_a_snapshot_object_with_invalid_fields_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidSnapshot, match="the snapshot is not valid for small"):
        MODEL.restore(altered(ring().snapshot(), **changed))


@pytest.mark.parametrize(
    "changed",
    [{"length": 5}, {"start": 1, "length": 3}, {"frozen": False}, {"limit": 10**6}],
    ids=str,
)
def test_part_of_a_ragged_segment_is_refused(changed: dict[str, Any]) -> None:
    snapshot = ragged().snapshot()
    MODEL.restore(snapshot)
    cut = copy.copy(snapshot.segments[1])
    for name, value in changed.items():
        setattr(cut, name, value)
    segments = (snapshot.segments[0], cut, *snapshot.segments[2:])
    with pytest.raises(InvalidSnapshot, match="ragged"):
        MODEL.restore(altered(snapshot, segments=segments))


@pytest.mark.parametrize("codec", ["zstd", "int8"])
def test_coded_cells_must_have_the_size_of_their_segment(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.kvkeep"
    ring().snapshot().save(path, codec)  # type: ignore[arg-type]
    content = read_container(path, "snapshot", 2)
    for shape in ([2, 2, 10**9, 16], [2, 2, 44, 8], [10**9], [2, 2, 44.0, 16], "4"):
        content.document["coding"]["segment.1.keys"]["shape"] = shape
        write_container(path, "snapshot", 2, content.document, content.tensors)
        with pytest.raises(CorruptFile):
            Snapshot.load(path)


def test_a_small_compressed_frame_cannot_claim_a_huge_size(tmp_path: Path) -> None:
    """A zstd frame of a few bytes holds 128 MB of zeros, and the document agrees with that size."""
    import zstandard

    path, count = tmp_path / "a.kvkeep", 10**6
    ring().snapshot().save(path, "zstd")
    content = read_container(path, "snapshot", 2)
    data = zstandard.ZstdCompressor(level=1).compress(bytes(2 * 2 * count * 16 * 4))
    frame = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for name in ("keys", "values"):
        content.tensors[f"segment.1.{name}.zstd"] = frame
        content.document["coding"][f"segment.1.{name}"]["shape"] = [2, 2, count, 16]
    for name in ("serials", "positions"):
        content.tensors[f"segment.1.{name}"] = torch.arange(count)
    content.document["segments"][1].update(length=count, capacity=count, limit=count, start=0)
    write_container(path, "snapshot", 2, content.document, content.tensors)
    with pytest.raises(CorruptFile, match="bytes of compressed data"):
        Snapshot.load(path)
