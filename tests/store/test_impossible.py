"""Files whose every byte is as it was written, of sessions that none could have been."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from altered_snapshots import altered
from small import small_model
from torch import Tensor

from kvkeep import Sampling
from kvkeep.errors import CorruptFile, InvalidSnapshot
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.container import read_container, write_container
from kvkeep.storage.snapshots.snapshot import Snapshot, describe

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(120)]
HOW = Sampling(temperature=1.0, seed=3)
Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def ring() -> Session:
    """Sinks, and a window of which 44 cells are a full ring; pins, names, a generator."""
    session = MODEL.session(48, prefill_step=32)
    session.feed(TEXT[:60])
    session.name("said", 50, 58)
    session.next_token(HOW)
    return session


def pinned() -> Session:
    session = ring()
    session.pin(40, 44)
    session.feed(TEXT[:3])
    return session


def shifted() -> Session:
    """A ring that is not full."""
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
    """Between sinks and the newest, cells of which each KV head has a number of its own."""
    session = MODEL.session(policy="full")
    session.feed(TEXT)
    session.compress(3.0, "knorm", recent=20, budget="heads")
    session.next_token(HOW)
    return session


def grouped() -> Session:
    session = MODEL.session(policy="self_extend", group=2, window=16)
    session.feed(TEXT[:60])
    return session


def settings(**changed: object) -> Change:
    return lambda document, tensors: document["settings"].update(changed)


def policy(**changed: object) -> Change:
    return lambda document, tensors: document["policy"].update(changed)


def said(**changed: object) -> Change:
    return lambda document, tensors: document.update(changed)


def segment(index: int, **changed: object) -> Change:
    return lambda document, tensors: document["segments"][index].update(changed)


def tensor(name: str, made: Callable[[Tensor], Tensor]) -> Change:
    def change(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = made(tensors[name]).contiguous()

    return change


def with_number(name: str, where: tuple[int, ...], number: float) -> Change:
    def put(found: Tensor) -> Tensor:
        changed = found.clone()
        changed[where] = number
        return changed

    return tensor(name, put)


def without(*names: str) -> Change:
    def change(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            document.pop(name, None)
            tensors.pop(name, None)

    return change


def wider(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Every cell with one KV head more, here and in what the file says of itself."""
    document["layout"]["kv_heads"] += 1
    for name in tensors:
        if name.endswith((".keys", ".values")):
            tensors[name] = torch.cat((tensors[name], tensors[name][:, :1]), 1)


def narrower(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    document["layout"]["head_dim"] //= 2
    for name in tensors:
        if name.endswith((".keys", ".values")):
            tensors[name] = tensors[name][..., :8].contiguous()


def in_bfloat16(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    document["layout"]["dtype"] = "bfloat16"
    for name in tensors:
        if name.endswith((".keys", ".values")):
            tensors[name] = tensors[name].bfloat16()


def twice(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The window's segment, of the same tokens, two times."""
    document["segments"].append(document["segments"][1])
    for name in list(tensors):
        if name.startswith("segment.1."):
            tensors[name.replace("1", "2", 1)] = tensors[name]


def swapped(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The far cells behind those of the window."""
    document["segments"].reverse()
    for name in [name for name in tensors if name.startswith("segment.0.")]:
        other = name.replace("0", "1", 1)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def no_anchors(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for each in document["segments"]:
        each["anchor"] = False


def counting(*changes: tuple[int, int, int]) -> Change:
    """Other numbers of ragged cells: (layer, KV head, how many more)."""

    def counted(found: Tensor) -> Tensor:
        changed = found.clone()
        for layer, head, more in changes:
            changed[layer, head] += more
        return changed

    return tensor("segment.1.counts", counted)


def cells_of_nobody(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """One cell more in the row than heads have; its length goes with it."""
    for name in ("keys", "values", "positions", "bias"):
        found = tensors[f"segment.1.{name}"]
        tensors[f"segment.1.{name}"] = torch.cat((found, found[:1]))


def as_a_windows(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Under a policy whose window would forget one of each head."""
    document["policy"] = {"name": "sliding", "max_kv_size": 4096, "keep": 0}
    document["settings"]["window"] = {"size": 4096, "discard": 1, "moves": False}


def no_tokens(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    document.update(tokens=0, segments=[])
    tensors.update(tokens=tensors["tokens"][:0], serials=tensors["serials"][:0])


def fewer_kept(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    document["policy"]["keep"] = 20
    document["segments"][0]["anchor"] = False


def more_queries(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """One more than an observer keeps, each of a time of its own."""
    tensors["queries"] = tensors["queries"][:, :, :1].expand(-1, -1, 129, -1).contiguous()
    tensors["query_times"] = torch.arange(129)
    document.update(clock=1000, serial=1000)


CHANGES: dict[str, tuple[Callable[[], Session], Change]] = {
    # Cells
    "another number of KV heads": (ring, wider),
    "another head_dim": (ring, narrower),
    "another dtype": (ring, in_bfloat16),
    "cells of tokens that are none": (ring, with_number("segment.1.serials", (3,), 10**6)),
    "cells of negative serials": (ring, with_number("segment.1.serials", (3,), -5)),
    "two cells of one token": (ring, tensor("segment.1.serials", lambda x: x[[0, *range(43)]])),
    "cells in another order": (shifted, tensor("segment.1.serials", lambda x: x.flip(0))),
    "a segment twice": (ring, twice),
    "positions in the future": (ring, with_number("segment.1.positions", (3,), 10**9)),
    "positions without end": (ring, with_number("segment.1.positions", (3,), -(2**62))),
    "a bias of NaN": (archived, with_number("segment.1.bias", (0, 0, 0), float("nan"))),
    "more ragged cells in one head": (ragged, counting((0, 0, 1))),
    "fewer": (ragged, counting((1, 1, -1))),
    "fewer than none": (ragged, counting((0, 0, -1000), (0, 1, 1000))),
    "more than there are in one, fewer than none in another": (
        ragged, counting((0, 1, 2**30), (1, 0, -(2**30)))),
    "more than can be counted": (ragged, counting((0, 0, 2**62), (0, 1, 2**62), (1, 0, 2**63 - 1))),
    "heads of other layers": (ragged, tensor("segment.1.counts", lambda x: x.flatten()[:2, None])),
    "ragged cells of no head": (ragged, cells_of_nobody),
    "ragged cells in the future": (ragged, with_number("segment.1.positions", (7,), 10**9)),
    "ragged cells of tokens": (ragged, with_number("segment.1.serials", (0,), 7)),
    "a ragged bias of infinity": (ragged, with_number("segment.1.bias", (3,), float("inf"))),
    "a worth of NaN": (archived_by_heads, with_number("segment.1.worth", (3,), float("nan"))),
    "a worth of other cells": (archived_by_heads, tensor("segment.1.worth", lambda x: x[1:])),
    "a worth that is missing": (ragged, segment(1, worth=True)),
    "a worth of even cells": (archived, segment(1, worth=True)),
    "ragged cells that take more": (ragged, segment(1, frozen=False)),
    "ragged cells of a ring": (ragged, segment(1, slot_order=True, start=2)),
    "ragged cells in a window that slides": (ragged, as_a_windows),
    "ragged cells that are not compressed": (ragged, segment(1, compressed=False)),
    "ragged cells of an even segment": (archived, segment(1, ragged=True)),
    "compressed cells of tokens": (archived, with_number("segment.1.serials", (0,), 7)),
    # Segments
    "a map without a group": (ring, segment(0, map={"offset": 0})),
    "a map in groups of 0": (ring, segment(0, map={"offset": 0, "group": 0})),
    "cells in groups under sliding": (ring, segment(0, map={"offset": 10**6, "group": 4})),
    "other groups": (grouped, segment(0, map={"offset": 8, "group": 4})),
    "a map far away": (ring, segment(0, map={"offset": 2**70, "group": 1})),
    "room for too many": (shifted, segment(1, limit=10**12)),
    "a ring of too many": (shifted, segment(1, limit=10**8, capacity=10**8, start=10**8 - 2)),
    "an anchor for too many": (grouped, segment(0, limit=10**8)),
    "a place that is none": (shifted, segment(1, start=10**12, capacity=10**12 + 100)),
    "a flag that is a number": (ring, segment(1, frozen=1)),
    "a seal that is text": (ring, segment(1, sealed="no")),
    "anchors where there are none": (ring, segment(1, anchor=True)),
    "a window of the far cells": (grouped, segment(0, anchor=False)),
    "the far cells in front": (grouped, swapped),
    "an archive of no anchors": (archived, no_anchors),
    # Tokens, and where the last one stands
    "a token outside the vocabulary": (ring, with_number("tokens", (5,), 256)),
    "a negative token": (ring, with_number("tokens", (5,), -1)),
    "two tokens of one serial": (ring, with_number("serials", (5,), 6)),
    "a serial to come": (ring, with_number("serials", (5,), 10**9)),
    "fewer tokens than serials": (ring, tensor("tokens", lambda x: x[:-1])),
    "another number of tokens": (ring, said(tokens=3)),
    "a wider hidden state": (ring, tensor("hidden", lambda x: torch.cat((x, x), 1))),
    "hidden states of two tokens": (ring, tensor("hidden", lambda x: torch.cat((x, x)))),
    "a hidden state in another dtype": (ring, tensor("hidden", lambda x: x.bfloat16())),
    "a hidden state of NaN": (ring, with_number("hidden", (0, 3), float("nan"))),
    "more logits": (ring, tensor("logits", lambda x: torch.cat((x, x)))),
    "fewer logits": (ring, tensor("logits", lambda x: x[:100])),
    "infinite logits": (ring, with_number("logits", (3,), float("inf"))),
    "logits alone": (ring, without("hidden")),
    "logits of no token": (ring, no_tokens),
    # Numbers
    "a clock ahead of all tokens": (ring, said(clock=10**6)),
    "a negative clock": (ring, said(clock=-1)),
    "a clock behind its cells": (ring, said(clock=20)),
    "a serial without end": (ring, said(serial=2**60)),
    "a serial given already": (ring, said(serial=30)),
    "a fractional clock": (ring, said(clock=60.5)),
    "no clock": (ring, without("clock")),
    # Settings
    "a step of no tokens": (ring, settings(prefill_step=0)),
    "half a step": (ring, settings(prefill_step=0.5)),
    "a flag that is text": (ring, settings(keep_whole_prompt="yes")),
    "a pin of a forgotten token": (pinned, settings(pins=[10])),
    "a pin of no token": (pinned, settings(pins=[10**6])),
    "a pin twice": (pinned, lambda d, t: d["settings"]["pins"].append(d["settings"]["pins"][0])),
    "a pin that is text": (pinned, settings(pins=["40"])),
    "a span beyond the end": (ring, settings(spans={"said": [50, 10**6]})),
    "a span that ends before it starts": (ring, settings(spans={"said": [50, 40]})),
    "a span without an end": (ring, settings(spans={"said": [50]})),
    "spans without names": (ring, settings(spans=[[50, 58]])),
    "a window that discards nothing": (ring, settings(window={"size": 44, "discard": 0})),
    "a window of text": (ring, settings(window={"size": "44"})),
    "an unheard-of window": (ring, settings(window={"unheard": 1})),
    # Policy
    "no such policy": (ring, policy(name="unheard")),
    "an unheard-of setting": (ring, policy(unheard=1)),
    "a budget that its cells exceed": (ring, policy(max_kv_size=40)),
    "a budget that the model has not": (ring, policy(max_kv_size=10**6)),
    "a budget without end": (ring, policy(max_kv_size=10**12)),
    "a fractional budget": (ring, policy(max_kv_size=48.0)),
    "more kept than there is room": (ring, policy(keep=48)),
    "fewer kept, so that the window is too full": (ring, fewer_kept),
    "an archive too full": (archived, policy(window=24)),
    "no method": (archived, policy(method="unheard")),
    "groups that divide nothing": (grouped, policy(group=3)),
    "another window": (grouped, policy(window=8)),
    # Whoever draws, and what was looked at
    "a generator of text": (ring, said(sampler={"seed": 3, "generator": "PCG64"})),
    "a generator of another kind": (ring, lambda d, t: (
        d["sampler"]["generator"].update(bit_generator="MT19937"))),
    "a generator of too many bits": (ring, lambda d, t: (
        d["sampler"]["generator"]["state"].update(state=2**200))),
    "a generator without a seed": (ring, lambda d, t: d["sampler"].pop("seed")),
    "queries of other heads": (archived, tensor("queries", lambda x: x[:, :3])),
    "queries of other layers": (archived, tensor("queries", lambda x: x[:1])),
    "queries of no time": (archived, without("query_times")),
    "queries of times to come": (archived, tensor("query_times", lambda x: x + 10**6)),
    "queries in another order": (archived, tensor("query_times", lambda x: x.flip(0))),
    "queries of NaN": (archived, tensor("queries", lambda x: x * float("nan"))),
    "more queries than are kept": (archived, more_queries),
    # What is of no session at all
    "bits that are none": (ring, said(bits={"kv": "3"})),
    "bits for too much": (ring, said(bits={"kv": "8", "far": "4"})),
    "a fingerprint of numbers": (ring, said(fingerprint={"weights": 1})),
    "a name that is a number": (ring, said(model=5)),
    "notes that are a list": (ring, said(notes=[1])),
    "a time that is text": (ring, said(created="now")),
    "a layout of other names": (ring, said(layout={"layers": 2})),
    "a dtype that is a function": (ring, lambda d, t: d["layout"].update(dtype="load")),
}  # fmt: skip


def file_of(session: Session, path: Path, change: Change) -> Path:
    session.snapshot().save(path)
    found = read_container(path, "snapshot", 4)
    change(found.document, found.tensors)
    write_container(path, "snapshot", 4, found.document, found.tensors)
    return path


@pytest.mark.parametrize("name", CHANGES)
def test_no_session_goes_on_from_what_none_could_have_been(name: str, tmp_path: Path) -> None:
    make, change = CHANGES[name]
    path = file_of(make(), tmp_path / "a.kvkeep", lambda document, tensors: None)
    MODEL.restore(Snapshot.load(path))  # it is what is changed that is refused
    file_of(make(), path, change)
    with pytest.raises((CorruptFile, InvalidSnapshot)):
        MODEL.restore(Snapshot.load(path))


def test_what_a_file_says_of_itself_is_checked_before_anyone_reads_it(tmp_path: Path) -> None:
    for change in (said(notes=[1]), without("clock"), said(segments=[5]), policy(name=7)):
        path = file_of(ring(), tmp_path / "a.kvkeep", change)
        with pytest.raises(CorruptFile):
            describe(path)


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
        {"observed": "queries"},
        {"bits": None},
    ],
    ids=str,
)
def test_a_snapshot_that_somebody_made_is_checked_as_well(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidSnapshot, match="no session of small could have been so"):
        MODEL.restore(altered(ring().snapshot(), **changed))


@pytest.mark.parametrize(
    "changed",
    [{"length": 5}, {"start": 1, "length": 3}, {"frozen": False}, {"limit": 10**6}],
    ids=str,
)
def test_some_of_ragged_cells_are_no_segment(changed: dict[str, Any]) -> None:
    snapshot = ragged().snapshot()
    MODEL.restore(snapshot)
    cut = copy.copy(snapshot.segments[1])
    for name, value in changed.items():
        setattr(cut, name, value)
    segments = (snapshot.segments[0], cut, *snapshot.segments[2:])
    with pytest.raises(InvalidSnapshot, match="ragged"):
        MODEL.restore(altered(snapshot, segments=segments))


@pytest.mark.parametrize("codec", ["zstd", "int8"])
def test_coded_cells_are_as_large_as_their_segment(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.kvkeep"
    ring().snapshot().save(path, codec)  # type: ignore[arg-type]
    found = read_container(path, "snapshot", 2)
    for shape in ([2, 2, 10**9, 16], [2, 2, 44, 8], [10**9], [2, 2, 44.0, 16], "4"):
        found.document["coding"]["segment.1.keys"]["shape"] = shape
        write_container(path, "snapshot", 2, found.document, found.tensors)
        with pytest.raises(CorruptFile):
            Snapshot.load(path)


def test_a_few_bytes_do_not_become_many(tmp_path: Path) -> None:
    """A frame that says it holds what no memory does, in a file that agrees with it."""
    import zstandard

    path, count = tmp_path / "a.kvkeep", 10**6
    ring().snapshot().save(path, "zstd")
    found = read_container(path, "snapshot", 2)
    data = zstandard.ZstdCompressor(level=1).compress(bytes(2 * 2 * count * 16 * 4))
    frame = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for name in ("keys", "values"):
        found.tensors[f"segment.1.{name}.zstd"] = frame
        found.document["coding"][f"segment.1.{name}"]["shape"] = [2, 2, count, 16]
    for name in ("serials", "positions"):
        found.tensors[f"segment.1.{name}"] = torch.arange(count)
    found.document["segments"][1].update(length=count, capacity=count, limit=count, start=0)
    write_container(path, "snapshot", 2, found.document, found.tensors)
    with pytest.raises(CorruptFile, match="bytes of compressed data"):
        Snapshot.load(path)
