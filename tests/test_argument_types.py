"""What callers give: numbers of other libraries become Python's, everything else a typed error."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import local_spec, small_model, state_specs

from kvkeep import PrefixStore, Sampling, Session, SessionGroup, Snapshot, calibrate
from kvkeep.errors import InvalidArgument
from kvkeep.loader import load_model
from kvkeep.policies import Archive

MODEL = small_model()
LOCAL_MODEL = small_model(spec=local_spec())
PROMPT = list(range(1, 40))
NO_NUMBERS: tuple[Any, ...] = (
    1024.0,
    np.float32(8),
    "8",
    b"8",
    None,
    True,
    np.True_,
    math.nan,
    [8],
    torch.tensor([8, 8]),
    object(),
)


def shown(value: object) -> str:
    """The same in every process, so that several can share the tests out."""
    return repr(value).split(" at 0x")[0][:20]


def fed() -> Session:
    session = MODEL.session(64)
    session.feed(PROMPT)
    return session


WHOLE_NUMBERS: dict[str, Callable[[Any], object]] = {
    "prefill_step": lambda x: MODEL.session(64, prefill_step=x),
    "set prefill_step": lambda x: setattr(fed(), "prefill_step", x),
    "keep_checkpoint_at": lambda x: fed().keep_checkpoint_at(x),
    "set keep": lambda x: setattr(fed(), "keep", x),
    "set discard": lambda x: setattr(MODEL.session(64, policy="shift"), "discard", x),
    "rewind": lambda x: fed().rewind(x),
    "delete": lambda x: fed().delete(x, 20),
    "insert": lambda x: fed().insert(x, [1]),
    "replace": lambda x: fed().replace(x, 20, [1]),
    "pin": lambda x: fed().pin(x, 20),
    "name": lambda x: fed().name("a", x, 20),
    "make_room": lambda x: fed().make_room(x),
    "recent": lambda x: MODEL.session(64, policy="full").compress(2, recent=x),
    "seed": lambda x: MODEL.session(64, policy="full").compress(2, seed=x),
    "a token": lambda x: fed().feed([1, x]),
    "a token to put in": lambda x: fed().insert(3, [x]),
    "a token to score": lambda x: fed().score([x]),
    "top_k": lambda x: Sampling(top_k=x),
    "repetition_window": lambda x: Sampling(repetition_window=x),
    "quota": lambda x: PrefixStore("unused", x),
}
NONE_ALLOWED: dict[str, Callable[[Any], object]] = {
    "max_kv_size": lambda x: MODEL.session(x),
    "keep": lambda x: MODEL.session(64, keep=x),
    "discard": lambda x: MODEL.session(64, policy="shift", discard=x),
    "group": lambda x: MODEL.session(64, policy="self_extend", group=x, window=16),
    "window": lambda x: MODEL.session(64, policy="archive", window=x),
    "fork": lambda x: fed().fork(x),
    "max_tokens": lambda x: fed().stream(x),
    "seed": lambda x: Sampling(seed=x),
}
NUMBERS: dict[str, Callable[[Any], object]] = {
    "ratio": lambda x: MODEL.session(64, policy="archive", ratio=x),
    "compress": lambda x: MODEL.session(64, policy="full").compress(x),
    "temperature": lambda x: Sampling(temperature=x),
    "top_p": lambda x: Sampling(top_p=x),
    "min_p": lambda x: Sampling(min_p=x),
    "repetition_penalty": lambda x: Sampling(repetition_penalty=x),
}


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
@pytest.mark.parametrize("value", NO_NUMBERS, ids=shown)
def test_integer_arguments_refuse_other_types(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="found"):
        WHOLE_NUMBERS[name](value)


@pytest.mark.parametrize("name", NONE_ALLOWED)
@pytest.mark.parametrize("value", [x for x in NO_NUMBERS if x is not None], ids=shown)
def test_optional_integer_arguments_refuse_other_types(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="found"):
        NONE_ALLOWED[name](value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value",
    ["1", b"1", True, np.True_, math.nan, math.inf, 1j, [1], np.ones(2), 10**400, object()],
    ids=shown,
)
def test_number_arguments_refuse_non_finite_values(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="found"):
        NUMBERS[name](value)


def test_settings_that_no_snapshot_can_hold_are_refused() -> None:
    session = LOCAL_MODEL.session(64)
    session.feed(PROMPT)
    session.prefill_step = np.int64(16)
    assert type(session.prefill_step) is int
    calls: tuple[Callable[[int], object], ...] = (
        lambda x: setattr(session, "prefill_step", x),
        lambda x: setattr(session, "checkpoint_bytes", x),
        lambda x: session.keep_checkpoint_at(x),
        lambda x: MODEL.session(64, prefill_step=x),
    )
    for call in calls:
        for value in (-1, 2**60):
            with pytest.raises(InvalidArgument, match=f"found {value}"):
                call(value)
    with pytest.raises(InvalidArgument, match="found 0"):
        session.prefill_step = 0
    assert session.prefill_step == 16


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, torch.tensor])
def test_integers_of_other_libraries_become_python_integers(kind: Any, tmp_path) -> None:
    session = MODEL.session(kind(48), keep=kind(3), prefill_step=kind(7))
    session.feed([kind(token) for token in PROMPT])
    with session.span("named"):
        session.feed(np.array(PROMPT[:5], dtype=np.uint8))
    session.pin(kind(10), kind(12))
    session.delete(kind(20), kind(22))
    session.insert(kind(14), torch.tensor([7, 8], dtype=torch.uint8))
    session.rewind(kind(1))
    session.name("other", kind(5), kind(9))
    how = Sampling(kind(1), kind(5), np.float32(0.5), np.float64(0.1), seed=kind(4))
    token = session.next_token(how)
    assert type(token) is int
    assert all(type(token) is int for token in session.tokens)
    assert json.loads(json.dumps(session.settings)) == session.settings
    session.snapshot().save(tmp_path / "a.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    assert restored.tokens == session.tokens
    assert restored.next_token(how) == session.next_token(how)


@pytest.mark.parametrize(
    "prompt", [b"bytes", {1: 2}, {1, 2}, 5, None, np.int64(5), [[1]], np.ones((2, 2), int), [300]]
)
def test_an_invalid_prompt_is_refused_and_changes_nothing(prompt: Any) -> None:
    session = fed()
    for call in (session.feed, session.score, lambda p: session.insert(3, p)):
        with pytest.raises(InvalidArgument):
            call(prompt)
    assert session.tokens == PROMPT
    assert session.cache.cells == len(PROMPT)


@pytest.mark.parametrize("half", ["\ud800", "a\udcffb"])
def test_a_lone_surrogate_is_refused_and_changes_nothing(half: str) -> None:
    session = fed()
    calls: tuple[Callable[[], object], ...] = (
        lambda: session.feed(half),
        lambda: session.score(half),
        lambda: session.insert(3, half),
        lambda: session.replace(3, 5, half),
        lambda: session.make_room(3, bridge=half),
        lambda: session.name(half, 1, 2),
        lambda: session.span(half).__enter__(),
        lambda: Sampling(stop=(half,)),
    )
    for call in calls:
        with pytest.raises(InvalidArgument, match="a lone surrogate"):
            call()
    assert session.tokens == PROMPT
    assert not session.spans


@pytest.mark.parametrize("stop", ["", "text", b"x", ("",), (b"x",), (1,), 5, None])
def test_stop_strings_must_be_non_empty(stop: Any) -> None:
    with pytest.raises(InvalidArgument, match="stop"):
        Sampling(stop=stop)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_objects_of_the_wrong_type_are_refused() -> None:
    session: Any = fed()
    calls: tuple[Callable[[], object], ...] = (
        lambda: session.next_token({"temperature": 1}),
        lambda: session.stream(3, "greedy"),
        lambda: session.stream(3, ignore_eos="no"),
        lambda: session.feed([1], progress=3),
        lambda: session.score([1], progress="bar"),
        lambda: SessionGroup([session, None]),
        lambda: SessionGroup([session]).next_tokens(["greedy"]),
        lambda: SessionGroup([session]).next_tokens(5),
        lambda: SessionGroup(5),
        lambda: session.compact(30, steps=None),
        lambda: session.compact(30, steps="compress"),
        lambda: session.compact_before("a", 0.5),
        lambda: MODEL.session(64, policy="full").compress(2, method=["knorm"]),
        lambda: MODEL.session(64, store="folder"),
        lambda: MODEL.session(64, policy="archive", calibration="file"),
        lambda: MODEL.session(64, bits="8"),  # of `kv_bits`
        lambda: MODEL.session(64, bits=0),
        lambda: MODEL.chat(5),
        lambda: MODEL.chat(5, policy="full"),
        lambda: MODEL.restore({}),
        lambda: calibrate(MODEL, "text"),
        lambda: load_model(dtype=torch.bfloat16),
        lambda: load_model(weights=4),
        lambda: load_model(5),
        lambda: load_model(device=3.5),
        lambda: load_model(progress="yes"),
        lambda: PrefixStore(5),
    )
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()
    assert session.tokens == PROMPT


def test_arguments_of_a_call_without_work_are_checked_too() -> None:
    session: Any = MODEL.session(16)
    session.feed(PROMPT)
    with pytest.raises(InvalidArgument, match="progress"):
        session.delete(8, 12, progress=3)  # of forgotten tokens
    assert session.tokens == PROMPT


@pytest.mark.parametrize("seed", [2**63, 2**64, 2**70])
def test_seeds_may_be_of_any_size(seed: int) -> None:
    session = MODEL.session(64, policy="full")
    session.feed(PROMPT)
    assert session.compress(2, "random", seed=seed, recent=8).cells_after < len(PROMPT)
    session = MODEL.session(policy=Archive(64, method="random", seed=seed))
    session.feed(PROMPT * 4)
    assert "compressed" in session.token_status


def test_make_room_says_what_can_be_done_instead() -> None:
    session = MODEL.session(64, policy="full")
    session.feed(PROMPT)
    with pytest.raises(InvalidArgument, match=r"nothing to remove.*500 are kept.*lower keep"):
        session.make_room(10, keep=500)
    hybrid = small_model(spec=state_specs()["delta_net"]).session(64, policy="full")
    hybrid.feed(PROMPT)
    with pytest.raises(InvalidArgument, match=r'states.*delete and insert with recompute="suffix"'):
        hybrid.make_room(10)


def test_numpy_booleans_are_accepted() -> None:
    assert list(fed().stream(0, ignore_eos=np.True_)) == []


@pytest.mark.extended
def test_a_session_configured_with_numpy_numbers_can_be_saved(smollm2, tmp_path) -> None:
    session = smollm2.session(np.int32(64), keep=np.int64(4), prefill_step=np.uint8(32))
    session.feed(np.arange(100, 200, dtype=np.int32))
    session.next_token(Sampling(np.float32(0.7), seed=np.uint32(3)))
    session.snapshot().save(tmp_path / "a.kvkeep")
    assert smollm2.restore(Snapshot.load(tmp_path / "a.kvkeep")).tokens == session.tokens
