"""Snapshots hold checkpoints: a restored session goes back to the same bits as the saved one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from altered_snapshots import altered
from edit_actions import LOCAL_MODEL, MODEL, loud_model
from hypothesis import given, settings
from hypothesis import strategies as st
from session_state import differences, whole_state
from small_models import local_spec, small_model, state_specs

from kvkeep import Sampling, Snapshot
from kvkeep.cache.checkpoint import Checkpoints, checkpoint_nbytes
from kvkeep.errors import CorruptFile, InvalidSnapshot, KvkeepError
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.container import read_container, write_container
from kvkeep.storage.snapshots.header import SNAPSHOT_FORMAT
from tests.examples import examples

MODELS = {
    "local": LOCAL_MODEL,
    "filling": loud_model(local_spec(window=150)),  # windows that fill while checkpoints are taken
    "delta_net": small_model(spec=state_specs()["delta_net"]),
}
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(1500)]
STEP = 20

# What a session may do, and where: a number up to 1 is a part of its text.
ACTION = st.tuples(
    st.sampled_from(
        ["feed", "next", "answer", "rewind", "fork", "begin", "edit", "replace", "limit", "wind"]
    ),
    st.floats(0, 1),
    st.integers(1, 60),
)


class Forced:
    """A `Constraint` that allows one text, given as token ids."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = list(ids)

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(logits, -torch.inf)
        allowed[self.ids[0]] = 0.0
        return allowed

    def accept(self, token: int) -> None:
        self.ids.pop(0)


def fed(model: Model, count: int, **options: Any) -> Session:
    settings = {"max_kv_size": 2048, "policy": "full", "prefill_step": STEP} | options
    session = model.session(**settings)
    session.feed(TEXT[:count])
    return session


def act(session: Session, action: tuple[str, float, int]) -> tuple[Session, object]:
    """Do something with a session; return the session to go on with, and what came of it."""
    name, part, count = action
    total = len(session.tokens)
    place = int(part * total)
    try:
        match name:
            case "feed":
                session.feed(TEXT[place : place + count])
            case "next":
                return session, [session.next_token() for _ in range(min(count, 5))]
            case "answer":  # with white space, before which an answer may end
                ids = [TEXT[place % 1500], *session.core.model.text.encode(" "), 7][count % 3 :]
                sampling = Sampling(constraint=Forced(ids))
                return session, [session.next_token(sampling) for _ in ids]
            case "rewind" | "wind":
                session.rewind(total - place if name == "rewind" else min(count, total))
            case "fork":
                return session.fork(place), None
            case "begin":
                points = [0, *session.checkpoints]
                return session.beginning(points[int(part * (len(points) - 1))]), None
            case "edit" | "replace":
                mode = "suffix" if name == "edit" else "none"
                end = min(total, place + count)
                report = session.replace(place, end, TEXT[:3], recompute=mode)  # type: ignore[arg-type]
                return session, (report.cells_moved, report.tokens_evaluated)
            case "limit":
                session.checkpoint_bytes = int(
                    1.5 * part * checkpoint_nbytes(session.core.memory.checkpoints.entries)
                )
    except KvkeepError as error:
        return session, str(error)
    return session, None


def loaded(session: Session, path: Path, codec: str = "none") -> Session:
    session.snapshot().save(path, codec)  # type: ignore[arg-type]
    return Session.restored(session.core.model, Snapshot.load(path))


@settings(max_examples=examples(40), deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    before=st.lists(ACTION, max_size=4),
    after=st.lists(ACTION, min_size=1, max_size=4),
    count=st.integers(1, 500),
    bounded=st.booleans(),
)
def test_a_restored_session_does_what_the_saved_one_does_to_the_bit(
    name: str,
    before: list[tuple[str, float, int]],
    after: list[tuple[str, float, int]],
    count: int,
    bounded: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    options = {"max_kv_size": 200, "policy": "sliding"} if bounded else {}
    session = fed(MODELS[name], count, **options)
    for action in before:
        session, _ = act(session, action)
    snapshot, path = session.snapshot(), tmp_path_factory.mktemp("saved") / "a.kvkeep"
    restored = [loaded(session, path, "zstd"), MODELS[name].restore(snapshot)]
    others: list[tuple[Session, list[object]]] = [(each, []) for each in restored]
    results = list[object]()
    for action in after:
        session, result = act(session, action)
        results.append(result)
        others = [
            (other, [*done, other_result])
            for each, done in others
            for other, other_result in [act(each, action)]
        ]
    for other, other_results in others:
        assert other_results == results
        assert list(differences(without_storage(other), without_storage(session))) == []


def without_storage(session: Session) -> dict[str, Any]:
    """The state of a session, without how it will allocate storage."""
    state = whole_state(session)
    checkpoints = [segment for each in state["checkpoints"] for segment in each["segments"]]
    for segment in (*state["segments"], *checkpoints):
        del segment["lazy_growth"]
    return state


def document_of(path: Path) -> dict[str, Any]:
    return read_container(path, "snapshot", SNAPSHOT_FORMAT).document


def test_files_have_format_7_only_if_there_are_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "a.kvkeep"
    for model, options, expected in (
        (MODEL, {}, 1),
        (LOCAL_MODEL, {}, 7),
        (LOCAL_MODEL, {"checkpoint_bytes": 0}, 5),
        (MODELS["delta_net"], {}, 7),
        (MODELS["delta_net"], {"checkpoint_bytes": 0}, 6),
    ):
        session = fed(model, 100, **options)
        session.keep_checkpoint_at(40)  # nothing changes without local layers and states
        session.snapshot().save(path)
        assert read_header_version(path) == expected
        assert ("checkpoints" in document_of(path)) == (model is not MODEL)
        restored = model.restore(Snapshot.load(path))
        assert restored.core.memory.checkpoints.branch == (0 if model is MODEL else 40)
        assert restored.checkpoint_bytes == session.checkpoint_bytes


def read_header_version(path: Path) -> int:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return int(json.loads(data[8 : 8 + length])["__metadata__"]["version"])


@pytest.mark.parametrize("name", ["local", "filling"])
@pytest.mark.parametrize("bits", [None, "8/4"])
def test_cells_that_windows_have_in_common_are_written_once(
    name: str, bits: str | None, tmp_path: Path
) -> None:
    for count in (130, 1000):
        session, path = fed(MODELS[name], count, kv_bits=bits), tmp_path / "a.kvkeep"
        assert len(session.checkpoints) >= 5
        session.snapshot().save(path)
        windows = [session.cache.local_cache.segments]
        windows += [each.local_segments for each in session.core.memory.checkpoints.entries]
        needed = {serial for window in windows for each in window for serial in each.serials()}
        document = document_of(path)
        own = sum(each["length"] for each in document["segments"] if each.get("local"))
        assert own + sum(document["checkpoints"]["windows"]) == len(needed)


def test_an_evicted_session_has_no_checkpoints_that_it_cannot_use(tmp_path: Path) -> None:
    local, states = (
        fed(MODELS[name], 600, max_kv_size=200, policy="sliding") for name in ("local", "delta_net")
    )
    assert local.checkpoints == []
    assert min(states.checkpoints) >= 400
    assert loaded(states, tmp_path / "a.kvkeep").fork(450).tokens == TEXT[:450]


@pytest.mark.parametrize("name", MODELS)
def test_a_file_without_checkpoints_goes_back_as_before(name: str, tmp_path: Path) -> None:
    """Rewinds compute windows and states anew from the first token, as for earlier formats."""
    session = fed(MODELS[name], 400)
    older = replace(session.snapshot().memory, checkpoints=Checkpoints())
    snapshot = replace(session.snapshot(), memory=older)
    snapshot.save(tmp_path / "a.kvkeep")
    restored = session.core.model.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    assert restored.replace(80, 90, TEXT[:3], recompute="suffix").tokens_evaluated == 393
    report = session.replace(80, 90, TEXT[:3], recompute="suffix")
    assert report.tokens_evaluated < 393
    torch.testing.assert_close(restored.logits, session.logits, rtol=1e-4, atol=1e-3)


def answered(count: int = 119) -> Session:
    """Return a session with states that has sampled white space twice, amid other tokens."""
    model = MODELS["delta_net"]
    session, (space,) = fed(model, count, prefill_step=64), model.text.encode(" ")
    ids = [70, 71, space, 72, space, space, 73]
    sampling = Sampling(constraint=Forced(ids))
    assert [session.next_token(sampling) for _ in ids] == ids
    assert session.core.memory.checkpoints.answer_ends == (count + 2, count + 4)
    return session


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_restored_session_goes_on_where_an_answer_may_have_ended(
    codec: str, tmp_path: Path
) -> None:
    """The checkpoints there make way for later ones, as in the session that was saved."""
    session = answered()
    restored = loaded(session, tmp_path / "a.kvkeep", codec)
    assert list(differences(without_storage(restored), without_storage(session))) == []
    for each in (session, restored):
        each.feed([9, 8, 7])
    assert restored.checkpoints == session.checkpoints == [64, 126]
    evaluated = [0, 0]
    for index, each in enumerate((session, restored)):
        each.rewind(
            7, progress=lambda count, i=index: evaluated.__setitem__(i, evaluated[i] + count)
        )
    assert evaluated[0] == evaluated[1] > 0
    assert list(differences(without_storage(restored), without_storage(session))) == []


def test_ends_of_an_answer_go_with_their_checkpoints(tmp_path: Path) -> None:
    session = answered()
    fork = session.fork(122)
    assert fork.core.memory.checkpoints.answer_ends == (121,)
    assert session.beginning(64).core.memory.checkpoints.answer_ends == ()
    session.checkpoint_bytes = 1
    assert session.core.memory.checkpoints == Checkpoints(1)
    assert loaded(session, tmp_path / "a.kvkeep").checkpoint_bytes == 1


def test_a_file_of_an_earlier_release_has_no_ends_of_an_answer(tmp_path: Path) -> None:
    session, path = answered(), tmp_path / "a.kvkeep"
    session.snapshot().save(path)
    content = read_container(path, "snapshot", SNAPSHOT_FORMAT)
    assert content.document["checkpoints"].pop("answer_ends") == [121, 123]
    write_container(path, "snapshot", SNAPSHOT_FORMAT, content.document, content.tensors)
    restored = session.core.model.restore(Snapshot.load(path))
    assert restored.core.memory.checkpoints.answer_ends == ()
    assert restored.checkpoints == session.checkpoints


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def entry(index: int = 1, **values: Any) -> Change:
    return lambda document, tensors: document["checkpoints"]["entries"][index].update(values)


def window(index: int = 1, **values: Any) -> Change:
    return lambda document, tensors: document["checkpoints"]["entries"][index]["segments"][
        0
    ].update(values)


def all_of_them(**values: Any) -> Change:
    return lambda document, tensors: document["checkpoints"].update(values)


def ends(*indices: int) -> Change:
    """Set the ends of an answer to those of checkpoints."""

    def change(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        entries = document["checkpoints"]["entries"]
        document["checkpoints"]["answer_ends"] = [entries[i]["tokens"] for i in indices]

    return change


def put(name: str, transform: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = transform(tensors[name]).contiguous()

    return change


def set_to(name: str, number: float) -> Change:
    return put(name, lambda x: x.clone().index_fill_(0, torch.tensor([0]), number))


def repeated(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    entries = document["checkpoints"]["entries"]
    entries.insert(0, entries[0])


def too_many(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    document["checkpoints"]["entries"] *= 1000


def half_a_window(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    each = document["checkpoints"]["entries"][1]["segments"][0]
    name, first, _ = each["cells"][0]
    each.update(length=3, capacity=each["start"] + 3, cells=[[name, first, 3]], slot_order=False)


STATE = "checkpoint.1.layers.0.recurrent"
IMPOSSIBLE: dict[str, tuple[str, Change]] = {
    "more tokens than the session has": ("local", entry(-1, tokens=10**6)),
    "no tokens": ("local", entry(0, tokens=0)),
    "one token more": ("local", entry(tokens=81)),
    "twice the same": ("local", repeated),
    "reverse order": ("local", lambda d, t: d["checkpoints"]["entries"].reverse()),
    "too many": ("local", too_many),
    "another time": ("local", entry(clock=20)),
    "a time in the future": ("local", entry(-1, clock=10**6)),
    "a fractional time": ("local", entry(clock=0.5)),
    "a flag that is a number": ("local", entry(branches=1)),
    "no window": ("local", entry(segments=[])),
    "segments that are a number": ("local", entry(segments=5)),
    "a part of a window": ("local", half_a_window),
    "an anchor in a window": ("local", window(anchor=True)),
    "compressed cells": ("local", window(compressed=True)),
    "a grouped window": ("local", window(map={"offset": 0, "group": 4})),
    "a window with a huge limit": ("local", window(limit=10**6)),
    "a longer window": ("local", window(length=137, capacity=137, limit=137)),
    "cells of no tensor": ("local", window(cells=[["window.99", 0, 20]])),
    "cells of a global layer": ("local", window(cells=[["segment.0", 0, 20]])),
    "more cells than there are": ("local", window(cells=[["window.0", 0, 10**6]])),
    "negative cells": ("local", window(cells=[["window.0", -5, 20]])),
    "no cells": ("local", window(cells=[])),
    "a run without a count": ("local", window(cells=[["window.0", 0]])),
    "a window of another length": ("local", all_of_them(windows=[1])),
    "a window that is text": ("local", all_of_them(windows=["x"])),
    "an empty window": ("local", lambda d, t: d["checkpoints"]["windows"].append(0)),
    "a limit below them": ("local", all_of_them(max_bytes=100)),
    "a negative limit": ("local", all_of_them(max_bytes=-1)),
    "no limit": ("local", lambda d, t: d["checkpoints"].pop("max_bytes")),
    "a branch that is text": ("local", all_of_them(branch="x")),
    "ends of an answer that are a number": ("local", all_of_them(answer_ends=20)),
    "an end of an answer that is text": ("local", all_of_them(answer_ends=["x"])),
    "an end of an answer without a checkpoint": ("local", all_of_them(answer_ends=[21])),
    "too many ends of an answer": ("local", ends(0, 1, 2)),
    "ends of an answer in reverse": ("local", ends(1, 0)),
    "an end of an answer twice": ("local", ends(1, 1)),
    "cells of another dtype": ("local", put("window.0.keys", lambda x: x.bfloat16())),
    "cells of fewer heads": ("local", put("window.0.values", lambda x: x[:, :1])),
    "positions in the future": ("local", set_to("window.0.positions", 10**6)),
    "positions of other tokens": ("local", put("window.0.positions", lambda x: x - 1)),
    "serials in the future": ("local", set_to("window.0.serials", 10**6)),
    "a missing state": ("delta_net", lambda d, t: t.pop(STATE)),
    "states of another dtype": ("delta_net", put(STATE, lambda x: x.double())),
    "states of fewer heads": ("delta_net", put(STATE, lambda x: x[:1])),
    "states that are NaN": ("delta_net", set_to(STATE, float("nan"))),
    "states of a flag that is text": ("delta_net", entry(session_states="x")),
    "a window without local layers": (
        "delta_net",
        lambda d, t: entry(segments=[{**d["segments"][0], "cells": [["segment.0", 0, 80]]}])(d, t),
    ),
    "windows without local layers": ("delta_net", all_of_them(windows=[20])),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_checkpoint_that_cannot_be_is_refused(case: str, tmp_path: Path) -> None:
    name, change = IMPOSSIBLE[case]
    session, path = fed(MODELS[name], 250), tmp_path / "a.kvkeep"
    assert session.checkpoints[1] > 20
    session.snapshot().save(path)
    content = read_container(path, "snapshot", SNAPSHOT_FORMAT)
    write_container(path, "snapshot", SNAPSHOT_FORMAT, content.document, content.tensors)
    MODELS[name].restore(Snapshot.load(path))
    change(content.document, content.tensors)
    write_container(path, "snapshot", SNAPSHOT_FORMAT, content.document, content.tensors)
    with pytest.raises((CorruptFile, InvalidSnapshot)):
        MODELS[name].restore(Snapshot.load(path))


def test_windows_of_another_model_are_refused() -> None:
    """Each window holds more cells than the session's own may."""
    wide, narrow = fed(MODELS["filling"], 250).snapshot(), fed(LOCAL_MODEL, 250).snapshot()
    memory = replace(narrow.memory, checkpoints=wide.memory.checkpoints)
    with pytest.raises(InvalidSnapshot, match="local layers"):
        LOCAL_MODEL.restore(replace(narrow, memory=memory))
    broken = Checkpoints(entries=(None,))  # type: ignore[arg-type]
    with pytest.raises(InvalidSnapshot, match="it must be a Checkpoint"):
        LOCAL_MODEL.restore(altered(narrow, checkpoints=broken))
