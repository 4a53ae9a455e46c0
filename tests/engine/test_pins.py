"""Prefix pins: protection from eviction, expiry, limits, owners, and keys of conversations."""

import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from engine.killed import CELL, MODEL, SETTINGS, new_engine, text
from hypothesis import given
from hypothesis import strategies as st

from kvkeep import Session
from kvkeep.engine import Engine, GenerationRequest, PinRequest, SessionRecord
from kvkeep.engine.pins import MAX_PIN_SECONDS, PrefixPins
from kvkeep.engine.scheduler import Limits, SchedulingPolicy
from kvkeep.errors import InvalidArgument, NoSuchPin
from kvkeep.storage.snapshots.snapshot import read_snapshot_document


@dataclass
class Clock:
    """A monotonic clock that tests set."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def ask(
    engine: Engine, seed: int, *pins: PinRequest, owner: str = "0", length: int = 50
) -> tuple[str, int]:
    """Prefill a prompt; return the name of its session, and how many tokens were reused."""
    request = GenerationRequest(text(seed, length), 1, ignore_eos=True, pins=pins)
    generation = engine.generate(request, owner=owner)
    generation.text()
    return generation.record.name, generation.reuse.tokens


def session_names(engine: Engine) -> set[str]:
    return {record.name for record in engine.sessions(unnamed=True).result()}


def test_a_pinned_session_outlives_sessions_that_were_used_later() -> None:
    with new_engine(cells=300) as engine:
        pinned, _ = ask(engine, 0, PinRequest(60, tokens=48))
        for seed in range(1, 8):
            ask(engine, seed)
        assert pinned in session_names(engine)
        assert ask(engine, 0)[1] == 48
        (pin,) = engine.pins().result()
        assert (pin.record.name, pin.tokens, pin.hits, pin.key) == (pinned, 48, 1, "")


def test_pins_never_break_the_memory_limit(caplog: pytest.LogCaptureFixture) -> None:
    with new_engine(cells=300) as engine:
        names = [ask(engine, seed, PinRequest(600 - 60 * seed))[0] for seed in range(6)]
        totals = engine.totals().result()
        assert totals.nbytes <= 300 * CELL
        kept = [name for name in names if name in session_names(engine)]
        # The newest session is not pinned before it ends: its own pin is never the victim.
        assert names[0] in kept
        assert totals.pins == len(kept) == len(engine.pins().result())
        assert totals.evicted_pins == len(names) - len(kept) > 0
    assert "51 tokens is lost" in caplog.text


def test_with_pins_every_request_is_served_within_the_memory_limit(tmp_path: Path) -> None:
    draw = random.Random(5)
    with new_engine(tmp_path, cells=200, pins_per_owner=3) as engine:
        for name in "ab":
            engine.create(name=name).result()
        for _ in range(60):
            pin = PinRequest(draw.choice((1e-3, 5, 3600)), key=draw.choice(("", "", "x", "y")))
            request = GenerationRequest(
                text(draw.randrange(9), 40), draw.randrange(1, 9), pins=(pin,) * draw.randrange(2)
            )
            engine.generate(request, draw.choice((None, None, None, "a", "b"))).text()
            totals = engine.totals().result()
            assert totals.nbytes <= 200 * CELL
            assert totals.pins <= 3
        assert totals.evicted_pins > 0


def test_an_expired_pin_protects_nothing() -> None:
    with new_engine(cells=300) as engine:
        clock = Clock()
        engine.call(lambda: setattr(engine._registry.pins, "clock", clock)).result()
        pinned, _ = ask(engine, 0, PinRequest(300))
        assert len(engine.pins().result()) == 1  # it begins in the step that ends the answer
        clock.now += 299
        assert len(engine.pins().result()) == 1
        clock.now += 2
        assert engine.pins().result() == []
        for seed in range(1, 8):
            ask(engine, seed)
        assert pinned not in session_names(engine)
        assert engine.totals().result().evicted_pins == 0


def test_owners_have_their_own_pins() -> None:
    with new_engine() as engine:
        ask(engine, 0, PinRequest(60, key="chat"), owner="one")
        ask(engine, 0, PinRequest(60, key="chat"), owner="two")
        (first,), (second,) = engine.pins("one").result(), engine.pins("two").result()
        assert first.record is not second.record
        with pytest.raises(NoSuchPin):
            engine.release_pin(first.id, "two").result()
        assert engine.release_pin(first.id, "one").result() == first
        assert engine.pins("one").result() == []
        assert engine.pins("two").result() == [second]


def test_a_later_turn_moves_the_pin_on() -> None:
    with new_engine() as engine:
        prompt = text(0, 30)
        for _ in range(3):
            request = GenerationRequest(prompt, 1, ignore_eos=True, pins=(PinRequest(60),))
            generation = engine.generate(request)
            generation.text()
            prompt = (*generation.record.live.tokens, 7)
        (pin,) = engine.pins().result()
        assert pin.tokens == len(prompt) - 1
        short = PinRequest(3600, tokens=16)
        engine.generate(GenerationRequest(prompt, 1, pins=(short, PinRequest(60)))).text()
        pins = engine.pins().result()
        assert [(pin.tokens, pin.seconds) for pin in pins] == [(len(prompt) + 1, 60), (16, 3600)]


def test_prompts_with_a_key_prefer_the_session_that_had_it_last() -> None:
    with new_engine() as engine:
        first, _ = ask(engine, 0, PinRequest(60, key="a"))
        second, _ = ask(engine, 0, PinRequest(60, key="b"))
        assert first != second
        for key, name in (("a", first), ("b", second)):
            prompt = (*text(0, 50), ord(key))
            request = GenerationRequest(prompt, 1, pins=(PinRequest(60, key=key),))
            generation = engine.generate(request)
            generation.text()
            assert generation.reuse.session == name
        assert [pin.key for pin in engine.pins().result()] == ["a", "b"]


def test_a_session_that_loses_its_name_keeps_its_pins() -> None:
    with new_engine() as engine:
        engine.create(name="mine").result()
        request = GenerationRequest(text(0, 40), 1, pins=(PinRequest(60),))
        engine.generate(request, "mine").text()
        engine.remove_name("mine").result()
        (pin,) = engine.pins().result()
        assert pin.record.name != "mine"
        assert pin.record.pinned_until == pin.expires
        engine.discard(pin.record.name).result()
        assert engine.pins().result() == []


def test_pins_and_their_sessions_survive_a_clean_stop(tmp_path: Path) -> None:
    with new_engine(tmp_path, cells=400) as engine:
        engine.create(name="mine").result()
        named = GenerationRequest(text(9, 40), 1, ignore_eos=True, pins=(PinRequest(500, key="k"),))
        engine.generate(named, "mine").text()
        ask(engine, 0, PinRequest(900, tokens=48), PinRequest(60), owner="one")
        ask(engine, 1, PinRequest(1e-3), owner="one")  # has expired by the restart
        before = [pin for pin in engine.pins("one").result() if pin.seconds > 1]
    with new_engine(tmp_path, cells=400) as engine:
        (key,), after = engine.pins().result(), engine.pins("one").result()
        assert (key.key, key.record.name) == ("k", "mine")
        assert [(pin.id, pin.tokens, pin.hits) for pin in after] == [
            (pin.id, pin.tokens, pin.hits) for pin in before
        ]
        assert [pin.seconds for pin in after] == [60, 900]
        assert all(pin.expires <= pin.record.pinned_until for pin in after)
        for seed in range(2, 9):
            ask(engine, seed)
        assert ask(engine, 0, owner="one")[1] == 50 - 2  # from the session, which is still there
        assert ask(engine, 0, owner="two")[1] == 0
        engine.release_pin(key.id).result()
    with new_engine(tmp_path, cells=400) as engine:
        assert engine.pins().result() == []
        assert len(engine.pins("one").result()) == 2
        for pin in engine.pins("one").result():
            engine.release_pin(pin.id, "one").result()
    assert list(tmp_path.rglob("pinned/[!.]*")) == []


def killed(folder: Path, copy: Path) -> Path:
    """Return a copy of a folder that an engine uses: what it is after a kill at this moment."""
    return Path(shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.tmp")))


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_pins_survive_a_kill_with_the_newest_text_that_was_saved(tmp_path: Path) -> None:
    """Released ones do not come back; a session that is not saved yet has no pins."""
    folder, prompt = tmp_path / "a", text(0, 30)
    with new_engine(folder) as engine:
        request = GenerationRequest(prompt, 1, ignore_eos=True, pins=(PinRequest(900, key="k"),))
        engine.generate(request).text()
        ask(engine, 1, PinRequest(600, tokens=40))
        wait_for(
            lambda: sum(path.read_text().count("pin-") for path in folder.rglob("*.json")) == 2
        )
        before = {pin.key: pin for pin in engine.pins().result()}
        first = killed(folder, tmp_path / "b")
        earlier = next(first.rglob(f"{before['k'].record.name}.kvkeep")).read_bytes()
        longer = tuple(before["k"].record.live.tokens) + text(5, 10)
        engine.generate(replace(request, prompt=longer)).text()
        engine.release_pin(before[""].id).result()
        wait_for(lambda: len(list(folder.rglob("*.kvkeep"))) == 1)
        wait_for(lambda: '"tokens": 42' in next(folder.rglob("*.json")).read_text())
        file = next(folder.rglob("pinned")) / f"{before['k'].record.name}.kvkeep"
        wait_for(lambda: read_snapshot_document(file)["notes"]["engine"]["revision"] == 2)
        second = killed(folder, tmp_path / "c")
    with new_engine(first) as engine:
        after = {pin.key: pin for pin in engine.pins().result()}
        assert {key: (pin.id, pin.tokens) for key, pin in after.items()} == {
            key: (pin.id, pin.tokens) for key, pin in before.items()
        }
        assert ask(engine, 1)[1] == 48
        assert engine.generate(replace(request, prompt=longer)).reuse.tokens == 31
    with new_engine(second) as engine:
        (pin,) = engine.pins().result()
        assert (pin.key, pin.tokens) == ("k", 42)
        (session,) = second.rglob("*.kvkeep")
    session.write_bytes(earlier)  # as if the index were newer
    with new_engine(second) as engine:
        assert [pin.tokens for pin in engine.pins().result()] == [31]


def test_two_engines_on_a_folder_do_not_share_its_pins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with new_engine(tmp_path) as engine:
        ask(engine, 0, PinRequest(900))
        wait_for(lambda: list(tmp_path.rglob("pins.json")))
        with new_engine(tmp_path) as other:
            assert other.pins().result() == []
            ask(other, 1, PinRequest(900))
        assert "another process uses it" in caplog.text
        assert len(list(tmp_path.rglob("pinned/*.kvkeep"))) == 1


def test_pins_that_cannot_be_loaded_are_left_out(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        ask(engine, 0, PinRequest(900))
    (session,) = tmp_path.rglob("pinned/*.kvkeep")
    session.write_bytes(session.read_bytes()[:-100])
    with new_engine(tmp_path) as engine:
        assert engine.pins().result() == []
        ask(engine, 0, PinRequest(900))
    (index,) = tmp_path.rglob("pins.json")
    index.write_text('{"pins": [{"id": 1}]}')
    with new_engine(tmp_path) as engine:
        assert engine.pins().result() == []
        ask(engine, 0, PinRequest(900))
    with new_engine(tmp_path, cells=60) as engine:  # no room
        assert engine.pins().result() == []


@pytest.mark.parametrize(
    "damage",
    [
        *({"tokens": "9"}, {"tokens": None}, {"tokens": 0}, {"tokens": 1.5}, {"hits": "1"}),
        *({"seconds": "9"}, {"seconds": None}, {"seconds": -1}, {"seconds": 1e300}),
        *({"expires": "9"}, {"session": 3}, {"session": None}, {"key": 3}, {"digest": []}),
    ],
)
def test_an_engine_starts_with_a_damaged_index_of_pins(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    with new_engine(tmp_path) as engine:
        ask(engine, 0, PinRequest(900))
    (index,) = tmp_path.rglob("pins.json")
    document = json.loads(index.read_text())
    document["pins"][0].update(damage)
    index.write_text(json.dumps(document))
    with new_engine(tmp_path) as engine:
        assert engine.pins().result() == []
        assert ask(engine, 0)[1] == 0


@pytest.mark.parametrize("seconds", [0, -1, MAX_PIN_SECONDS + 1, float("nan")])
def test_a_pin_needs_a_time_within_bounds(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="a pin lasts"):
        PinRequest(seconds)


_OPERATIONS = st.tuples(
    st.sampled_from(["add", "add", "add", "wait", "extend", "release", "detach", "attach"]),
    st.integers(0, 3),  # a session
    st.integers(1, 40),  # tokens or seconds
    st.sampled_from(["", "", "k", "l"]),
)


def _fed(topic: int) -> Session:
    session = MODEL.session(**SETTINGS)
    session.feed(text(topic, 40))
    return session


_FED = (_fed(0), _fed(1))


@given(st.lists(_OPERATIONS, max_size=40))
def test_pins_stay_within_their_limit_and_sessions_know_their_time(
    operations: list[tuple[str, int, int, str]],
) -> None:
    clock = Clock()
    pins, records = PrefixPins(3, clock), list[SessionRecord]()
    for number in range(4):
        session = _FED[number % 2].fork()
        records.append(SessionRecord(f"s{number}", str(number // 2), False, None, session))
    for kind, index, amount, key in operations:
        record = records[index]
        match kind:
            case "add":
                pins.add(record, [PinRequest(amount, amount, key)])
            case "wait":
                clock.now += amount
            case "extend":
                pins.extend(record, amount)
            case "release":
                for pin in pins.owned_by(record.owner)[:1]:
                    pins.release(pin.id, record.owner)
            case "detach":
                assert all(pin.record is record for pin in pins.detach(record))
            case "attach":
                pins.attach(records[index ^ 1], pins.detach(record))
        all_pins = pins.owned_by("0") + pins.owned_by("1")
        assert len(pins) == len(all_pins) <= 6
        assert all(pin.expires > clock.now and pin.record.owner == pin.owner for pin in all_pins)
        assert len({(pin.owner, pin.key, pin.digest) for pin in all_pins}) == len(all_pins)
        for record in records:
            own = [pin.expires for pin in all_pins if pin.record is record]
            assert record.pinned_until == max(own, default=0.0)


def test_pinned_sessions_are_the_last_victims() -> None:
    def record(name: str, **fields: Any) -> SessionRecord:
        session = MODEL.session(**SETTINGS)
        return SessionRecord(name, "0", False, None, session, **fields)

    policy = SchedulingPolicy(Limits())
    late = record("late", pinned_until=90.0, last_used=1.0)
    early = record("early", pinned_until=50.0, last_used=2.0)
    expired = record("expired", pinned_until=10.0, last_used=4.0)
    plain = record("plain", last_used=3.0)
    victims = [each.name for each in policy.victims([late, early, expired, plain], now=20.0)]
    assert victims == ["plain", "expired", "early", "late"]


def _rewind(engine: Engine, count: int) -> None:
    engine.change("a", "0", "rewind", lambda session: session.rewind(count)).result()


def _replace(engine: Engine, at: int) -> None:
    engine.change("a", "0", "edit", lambda session: session.replace(at, at + 1, [1, 2])).result()


def _restore(engine: Engine, name: str) -> None:
    engine.snapshot(name, "label").result()
    engine.restore("label", name="a", replace=True).result()


def _write(engine: Engine, prompt: tuple[int, ...]) -> None:
    engine.generate(GenerationRequest(prompt, 2, whole_text=True), "a").text()


@pytest.mark.parametrize(
    ("change", "num_kept"),
    [
        (lambda engine: _rewind(engine, 21), 22),
        (lambda engine: _rewind(engine, 43), 0),
        (lambda engine: _rewind(engine, 1), 40),
        (lambda engine: _replace(engine, 30), 30),
        (lambda engine: _restore(engine, "b"), 0),
        (lambda engine: _restore(engine, "a"), 40),
        (lambda engine: engine.prepare(text(1, 40), "a").result(), 0),
        (lambda engine: engine.prepare((*text(0, 33), *text(2, 9)), "a").result(), 32),
        (lambda engine: _write(engine, text(1, 40)), 0),
        (lambda engine: _write(engine, (*text(0, 20), *text(2, 20))), 20),
    ],
)
@pytest.mark.parametrize("key", ["", "chat"])
def test_a_pin_ends_where_the_text_of_its_session_changes(
    change: Callable[[Engine], Any], num_kept: int, key: str, tmp_path: Path
) -> None:
    with new_engine(tmp_path) as engine:
        for seed, name in enumerate("ab"):
            request = GenerationRequest(text(seed, 40), 2, ignore_eos=True)
            engine.generate(replace(request, whole_text=True), name).text()
        request = GenerationRequest((), 1, ignore_eos=True, pins=(PinRequest(60, 40, key),))
        engine.generate(request, "a").text()
        (before,) = engine.pins().result()
        assert before.tokens == 40
        change(engine)
        for length in range(10, 60, 10):  # none of these prompts begins with the pinned tokens
            engine.generate(GenerationRequest((*text(1, length), 7), 1)).text()
        pins = engine.pins().result()
        assert [pin.tokens for pin in pins] == [num_kept] * bool(num_kept)
        assert [pin.text.tolist() for pin in pins] == [list(text(0, num_kept))] * bool(num_kept)
        for pin in pins:
            assert (pin.id, pin.hits, pin.expires, pin.key) == (before.id, 0, before.expires, key)
            assert (pin.digest == before.digest) == (num_kept == 40 or bool(key))
