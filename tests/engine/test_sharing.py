"""Generations and sessions of an engine share no mutable state."""

from typing import Any

import pytest
from counting_constraint import Counting
from engine.killed import MODEL, SETTINGS, text

from kvkeep.engine import Engine, GeneratedToken, GenerationRequest
from kvkeep.errors import InvalidArgument
from kvkeep.session.sampling import Sampling


def counting() -> Sampling:
    return Sampling(constraint=Counting())


def test_running_generations_need_constraints_of_their_own() -> None:
    with Engine(MODEL, settings=SETTINGS) as engine:
        request, prompt = (
            GenerationRequest(text(0, 20), 5, counting(), ignore_eos=True),
            text(1, 40),
        )
        refused = [
            lambda: engine.submit(request),
            lambda: engine.submit_many(
                GenerationRequest(prompt, 5), [counting(), request.sampling]
            ),
            lambda: engine.submit_many(GenerationRequest(prompt, 5), [counting()] * 2),
        ]
        # All are submitted before the first one has ended.
        first, *futures = engine.call(
            lambda: [engine.submit(request), *(each() for each in refused)]
        ).result()
        for future in futures:
            with pytest.raises(InvalidArgument, match="shares its constraint object"):
                future.result()
        both = engine.submit_many(
            GenerationRequest(prompt, 5, ignore_eos=True), [counting(), counting()]
        ).result()
        for generation in (*first.result(), *both):
            written = [event.token for event in generation if isinstance(event, GeneratedToken)]
            assert written == [10, 11, 12, 13, 14]
        assert engine.totals().result().running == 0


def test_a_session_object_is_registered_once() -> None:
    session = MODEL.session(64)
    with Engine(MODEL, settings=SETTINGS) as engine:
        engine.create(name="a", session=session).result()
        with pytest.raises(InvalidArgument, match="already"):
            engine.create(name="b", session=session).result()
        engine.create(name="b", session=session.fork()).result()


def test_lists_of_other_lengths_are_refused_and_leave_no_session() -> None:
    request, listener = GenerationRequest(text(0, 20), 5), print
    with Engine(MODEL, settings=SETTINGS) as engine:
        bad: list[tuple[Any, ...]] = [
            (request, []),
            (request, [Sampling()], "0", [listener] * 2),
            (request, [Sampling()] * 2, "0", [listener]),
            (request, [Sampling(), "greedy"]),
            ("prompt", [Sampling()]),
        ]
        for arguments in bad:
            with pytest.raises(InvalidArgument):
                engine.submit_many(*arguments).result()
        assert engine.sessions(unnamed=True).result() == []
        assert engine.totals().result().running == 0
