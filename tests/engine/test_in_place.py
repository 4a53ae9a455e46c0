"""Prompts that are aligned in place, and what they leave to others: no bit of it."""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.workload import Request, Result, batch
from session_state import same, whole_state
from small_models import local_spec, small_model, state_specs

from kvkeep.engine import Engine, GenerationRequest, Limits
from kvkeep.engine.in_place import ALIGNED
from kvkeep.engine.memory_bound import max_session_bytes
from kvkeep.session.aligning import AlignedFeeding
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.sampling import Sampling
from kvkeep.session.session import Session

MODEL = small_model()
SETTINGS: dict[str, Any] = {"policy": "full", "max_kv_size": 1500, "prefill_step": 32}
IN_PLACE = AlignmentOptions("in_place", min_saved=64, reread=4, reread_share=1.0)


def text(count: int, seed: int = 7) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, 250), k=count))


FIRST = text(500)
# A header that changed, and a reminder that was removed.
SECOND = (*FIRST[:20], *text(9, 1), *FIRST[25:300], *FIRST[330:], *text(40, 2))


def in_place(prompt: tuple[int, ...], count: int = 4, **options: Any) -> Request:
    return Request(prompt, count, alignment=IN_PLACE, **options)


def alone(request: Request) -> Result:
    with Engine(MODEL, settings=SETTINGS) as engine:
        return request.do(engine)[0]


def test_a_rewritten_prompt_evaluates_little_and_leaves_its_source_alone():
    with Engine(MODEL, settings=SETTINGS) as engine:
        (first,) = Request(FIRST, 4).do(engine)
        (source,) = engine.sessions(unnamed=True).result()
        before = whole_state(source.live)
        (second,) = in_place(SECOND).do(engine)
        reuse = second.reuse
        assert (reuse.mode, reuse.seams, reuse.session) == ("in_place", 2, source.name)
        assert reuse.tokens - reuse.moved == 20
        assert len(SECOND) - reuse.tokens == 9 + 4 + 4 + 40
        assert second.tokens == (*SECOND, *second.written)
        assert same(whole_state(source.live), before)
        assert first.tokens == tuple(source.live.tokens)
        operations = engine.operations().result()
        assert [(each.what, each.parent) for each in operations] == [
            ("generate", source.name),
            (ALIGNED, source.name),
            ("generate", None),
        ]
        (report, _) = engine.cache_misses().result()
        assert report.reuse.mode == "in_place"
        assert [(seam.at, len(seam.removed), len(seam.inserted)) for seam in report.seams] == [
            (20, 5, 9),
            (304, 30, 0),
        ]


def test_after_an_alignment_an_exact_request_is_evaluated_as_if_it_were_alone(tmp_path: Path):
    """The same prompt, its continuation, and one like the source; also by another engine's store"""
    with Engine(MODEL, settings=SETTINGS, stores=tmp_path) as engine:
        Request(FIRST, 4).do(engine)
        (aligned,) = in_place(SECOND).do(engine)
        for prompt in (SECOND, (*aligned.tokens, *text(50, 3)), (*FIRST, 1, 2, 3)):
            (result,) = Request(prompt, 4).do(engine)
            assert result.reuse.mode == "exact"
            assert result.same(alone(Request(prompt, 4)))
    with Engine(MODEL, settings=SETTINGS, stores=tmp_path) as engine:
        (result,) = Request(SECOND, 4).do(engine)
        assert result.same(alone(Request(SECOND, 4)))


def test_an_aligned_session_takes_its_continuations_and_further_alignments():
    with Engine(MODEL, settings=SETTINGS) as engine:
        Request(FIRST, 4).do(engine)
        (second,) = in_place(SECOND).do(engine)
        third_prompt = (*second.tokens, *text(30, 3))
        (third,) = in_place(third_prompt).do(engine)
        assert (third.reuse.tokens, third.reuse.seams) == (len(second.tokens), 0)
        assert third.name == second.name
        fourth_prompt = (*third.tokens[:100], *third.tokens[120:], 5)
        (fourth,) = in_place(fourth_prompt).do(engine)
        assert (fourth.reuse.mode, fourth.reuse.seams) == ("in_place", 1)
        assert fourth.name != third.name
        (result,) = Request(fourth_prompt, 4).do(engine)
        assert result.same(alone(Request(fourth_prompt, 4)))


def test_requests_are_aligned_only_where_it_is_asked_for_and_saves_enough():
    with Engine(MODEL, settings=SETTINGS) as engine:
        Request(FIRST, 4).do(engine)
        (exact,) = Request(SECOND, 4).do(engine)
        assert (exact.reuse.mode, exact.reuse.tokens) == ("exact", 0)
        much = replace(IN_PLACE, min_saved=600)
        (result,) = Request(SECOND[:-1], 4, alignment=much).do(engine)
        assert result.reuse.mode == "exact"
        other_owner = engine.explain(SECOND, "1", IN_PLACE).result()
        assert (other_owner.reuse.tokens, other_owner.reuse.mode) == (0, "exact")
        assert "similar" in other_owner.reuse.not_in_place
    with Engine(MODEL, settings=SETTINGS, alignment=IN_PLACE) as engine:  # the engine's default
        Request(FIRST, 4).do(engine)
        assert engine.explain(SECOND).result().reuse.mode == "in_place"
        assert Request(SECOND, 4).do(engine)[0].reuse.mode == "in_place"


def test_a_session_that_generates_is_forked_and_goes_on_unchanged():
    samplings = (Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2))
    requests = [Request(FIRST, 60), in_place(SECOND, samplings=samplings)]
    with Engine(MODEL, settings=SETTINGS) as engine:
        Request(FIRST[:200], 0).do(engine)
        (first,), aligned = batch(engine, requests)
        assert first.written == alone(requests[0]).written
        assert aligned[0].reuse.mode == "in_place"
        for record in engine.sessions(unnamed=True).result():
            if tuple(record.live.tokens)[: len(SECOND)] == SECOND:
                assert record.first_edit == ALIGNED
        (result,) = Request(SECOND, 4).do(engine)
        assert result.same(alone(Request(SECOND, 4)))


@pytest.mark.parametrize("seed", range(3))
def test_exact_requests_among_aligned_ones_keep_their_bits(seed: int):
    """Random rewrites of one text, in either mode and at the same time."""
    chance, prompt = random.Random(seed), FIRST
    with Engine(MODEL, settings=SETTINGS) as engine:
        for number in range(8):
            requests = [Request(prompt, 3), in_place(prompt, 3)][:: chance.choice((1, -1))]
            results = batch(engine, requests[: chance.choice((1, 2, 2))])
            for request, (result,) in zip(requests, results, strict=False):
                assert result.tokens[: len(prompt)] == prompt
                if request.alignment is None:
                    assert result.same(alone(request)), number
            start = chance.randrange(len(prompt))
            rewritten = (*prompt[:start], *text(chance.randrange(20), number))
            prompt = (*rewritten, *prompt[start + chance.randrange(20) :], *text(20, seed))


def test_models_with_states_are_evaluated_exactly_and_the_report_says_why():
    model = small_model(spec=next(iter(state_specs().values())))
    with Engine(model, settings=SETTINGS) as engine:
        Request(FIRST, 4).do(engine)
        report = engine.explain(SECOND, alignment=IN_PLACE).result()
        assert "states" in report.reuse.not_in_place
        (result,) = in_place(SECOND).do(engine)
        assert result.reuse.mode == "exact"


def test_models_with_local_layers_are_aligned_and_their_windows_evaluated_again():
    model = small_model(spec=local_spec(8))
    with Engine(model, settings=SETTINGS) as engine:
        Request(FIRST, 4).do(engine)
        (result,) = in_place(SECOND).do(engine)
        assert (result.reuse.mode, result.reuse.seams) == ("in_place", 2)
        assert result.tokens == (*SECOND, *result.written)


def test_a_cancelled_alignment_leaves_the_engine_as_any_cancelled_request():
    inserted = (*FIRST[:20], *text(300, 4), *FIRST[20:])
    with Engine(MODEL, settings=SETTINGS) as engine:
        Request(FIRST, 4).do(engine)
        (cancelled,) = in_place(inserted, cancel=("read", 550)).do(engine)
        assert cancelled.error is not None
        for prompt in (FIRST, inserted):
            (result,) = Request(prompt, 4).do(engine)
            assert result.same(alone(Request(prompt, 4)))
        (result,) = in_place(inserted).do(engine)
        assert result.tokens[: len(inserted)] == inserted


def test_a_rewrite_that_has_no_room_while_it_is_aligned_is_evaluated_exactly():
    """Text is inserted before as much is deleted."""
    long = text(1400)
    rewritten = (*long[:20], *text(150, 1), *long[20:700], *long[900:])
    with Engine(MODEL, settings=SETTINGS) as engine:
        Request(long, 4).do(engine)
        (result,) = in_place(rewritten).do(engine)
        assert (result.error, result.reuse.mode) == (None, "exact")
        (report, *_) = engine.cache_misses().result()
        assert "needs 1549" in report.reuse.not_in_place
        assert result.same(alone(Request(rewritten, 4)))


@pytest.mark.parametrize("mode", ["exact", "in_place"])
def test_a_prompt_that_is_mostly_held_needs_memory_for_the_rest_alone(mode: Any):
    settings = {**SETTINGS, "max_kv_size": 4000}
    memory = int(max_session_bytes(MODEL.session(**settings), 700))
    options = replace(IN_PLACE, mode=mode)
    with Engine(MODEL, settings=settings, limits=Limits(memory=memory)) as engine:
        Request(FIRST, 4).do(engine)
        (result,) = Request((*FIRST, *text(20, 3)), 4, alignment=options).do(engine)
        assert result.reuse.tokens >= len(FIRST) - 32
        (result,) = Request(SECOND, 4, alignment=options).do(engine)
        assert result.error is None


def whole(prompt: tuple[int, ...], count: int = 4, **options: Any) -> Request:
    """A request whose prompt is the whole text of its named session."""
    return Request(prompt, count, whole_text=True, **options)


def test_named_sessions_are_aligned_and_serve_no_exact_request():
    with Engine(MODEL, settings=SETTINGS) as engine:
        whole(FIRST, session="a").do(engine)
        for name in ("a", "b"):  # its own text, and another session's
            (second,) = whole(SECOND, session=name, alignment=IN_PLACE).do(engine)
            assert (second.reuse.mode, second.reuse.seams) == ("in_place", 2 if name == "a" else 0)
            assert second.tokens == (*SECOND, *second.written)
            assert engine.find(name).result().first_edit == ALIGNED
        third = (*second.tokens, *text(30, 3))
        (result,) = whole(third, session="b", alignment=IN_PLACE).do(engine)
        assert (result.reuse.tokens, result.reuse.moved) == (len(second.tokens), 0)
        for session in ("a", None):  # the text of "a" is evaluated anew, too
            request = whole(SECOND, session=session) if session else Request(SECOND, 4)
            (result,) = request.do(engine)
            assert result.reuse.mode == "exact"
            assert result.same(alone(Request(SECOND, 4)))


def test_samples_of_an_aligned_prompt_report_it_all():
    samplings = tuple(Sampling(temperature=1.0, seed=seed) for seed in range(2))
    with Engine(MODEL, settings=SETTINGS) as engine:
        Request(FIRST, 4).do(engine)
        results = in_place(SECOND, samplings=samplings).do(engine)
        assert [result.reuse.mode for result in results] == ["in_place", "in_place"]
        assert results[1].reuse.tokens == len(SECOND)


def test_a_named_session_is_as_before_or_after_its_alignment(tmp_path: Path):
    """At each step, on disk as after a kill, and in memory as after a cancelled request."""
    inserted = (*FIRST[:20], *text(300, 4), *FIRST[20:])
    folders = list[Path]()
    with Engine(MODEL, settings=SETTINGS, folder=tmp_path / "sessions") as engine:
        (first,) = whole(FIRST, session="a").do(engine)
        engine.save("a").result()

        def copy(generation: Any) -> None:
            folders.append(tmp_path / str(len(folders)))
            shutil.copytree(tmp_path / "sessions", folders[-1])

        with pytest.MonkeyPatch.context() as patch:
            step = AlignedFeeding.step
            patch.setattr(AlignedFeeding, "step", lambda *args: copy(args) or step(*args))
            (cancelled,) = whole(
                inserted, session="a", alignment=IN_PLACE, cancel=("read", 550)
            ).do(engine)
        assert cancelled.error is not None
        assert tuple(engine.find("a").result().live.tokens) == first.tokens
        (aligned,) = whole(inserted, session="a", alignment=IN_PLACE).do(engine)
        assert aligned.reuse.mode == "in_place"
    for folder in (folders[0], folders[-1]):
        with Engine(MODEL, settings=SETTINGS, folder=folder) as engine:
            record = engine.inspect("a", "0", lambda record: record).result()
            assert (tuple(record.live.tokens), record.first_edit) == (first.tokens, "")
    with Engine(MODEL, settings=SETTINGS, folder=tmp_path / "sessions") as engine:
        record = engine.inspect("a", "0", lambda record: record).result()
        assert (tuple(record.live.tokens), record.first_edit) == (aligned.tokens, ALIGNED)


def test_a_named_session_is_marked_as_rounded_by_the_cells_that_it_takes():
    def mark(session: Session, codec: str) -> None:
        session.core.state = replace(session.core.state, rounded=codec)

    with Engine(MODEL, settings=SETTINGS) as engine:
        whole(FIRST, session="a").do(engine)
        engine.change("a", "0", "span", lambda session: mark(session, "small")).result()
        for name in ("b", "a"):  # of another session's cells, and of its own
            whole(text(30, 5), session="b").do(engine)
            (result,) = whole(SECOND, session=name, alignment=IN_PLACE).do(engine)
            assert (result.reuse.mode, result.reuse.session) == ("in_place", "a")
            assert engine.find(name).result().rounded == "small"


@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_pins_of_a_session_stay_with_its_text_and_keep_as_it_is(policy: str):
    def pin(session: Session) -> None:
        for start, end in ((15, 40), (320, 340), (480, 504)):
            session.pin(start, end)

    def pinned(session: Session) -> list[int]:
        pins = session.core.memory.pins
        return [i for i, serial in enumerate(session.core.memory.serials) if serial in pins]

    settings = {**SETTINGS, "policy": policy}
    if policy == "sliding":
        settings["keep"] = 30
    with Engine(MODEL, settings=settings) as engine:
        (first,) = whole(FIRST, session="a").do(engine)
        engine.change("a", "0", "pin", pin).result()
        keep = engine.find("a").result().live.keep
        target = (*FIRST[:20], *text(9, 1), *FIRST[25:300], *first.tokens[330:], *text(40, 2))
        for name in ("b", "a"):
            (second,) = whole(target, session=name, alignment=IN_PLACE).do(engine)
            assert second.reuse.mode == "in_place"
            session = engine.find(name).result().live
            expected = [*range(15, 44), *range(304, 314), *range(454, 478)]
            assert pinned(session) == expected
            assert session.keep == keep
        (third,) = whole((*second.tokens, 5), session="b", alignment=IN_PLACE).do(engine)
        assert (third.reuse.mode, third.reuse.tokens) == ("in_place", len(second.tokens))


def test_rereading_everything_is_an_evaluation_as_if_it_were_alone():
    everything = replace(IN_PLACE, reread=10**6, reread_share=1.0)
    with Engine(MODEL, settings=SETTINGS) as engine:
        Request(FIRST, 4).do(engine)
        (result,) = Request(SECOND, 4, alignment=everything).do(engine)
        assert (result.reuse.mode, result.reuse.moved) == ("exact", 0)
        assert (
            "must be saved" in result.reuse.not_in_place or "similar" in result.reuse.not_in_place
        )
        assert result.same(alone(Request(SECOND, 4)))


def test_a_new_named_session_is_aligned_although_its_source_is_evicted_for_it():
    source = MODEL.session(**SETTINGS)
    source.feed(text(1000))
    for_new = max_session_bytes(MODEL.session(**SETTINGS), 0)
    limits = Limits(memory=source.nbytes + for_new - 1)
    prompt = (*text(1000)[:20], *text(9, 1), *text(1000)[25:400])
    with Engine(MODEL, settings=SETTINGS, limits=limits) as engine:
        engine.call(lambda: engine._registry.add(source, "0", named=False)).result()
        request = GenerationRequest(prompt, 4, whole_text=True, alignment=IN_PLACE)
        generation = engine.generate(request, "named")
        generation.text()
        assert generation.reuse.mode == "in_place"
        (record,) = engine.sessions(unnamed=True).result()
        assert (record.name, tuple(record.live.tokens)[: len(prompt)]) == ("named", prompt)


def test_the_last_answer_whose_end_a_prompt_lacks_is_dropped():
    first = GenerationRequest(FIRST, 4, ignore_eos=True, whole_text=True)
    with Engine(MODEL, settings=SETTINGS) as engine:
        engine.generate(first, "named").text()
        record = engine.find("named").result()
        prompt = (*tuple(record.live.tokens)[:-1], 249, 249)
        generation = engine.generate(GenerationRequest(prompt, 0, whole_text=True), "named")
        generation.text()
        assert generation.reuse.tokens == len(FIRST) + 3
        assert record.last_answer is None


@pytest.mark.parametrize("replaced_by", ["prompt", "alignment", "prepare"])
def test_the_last_answer_of_a_text_that_was_replaced_is_dropped(replaced_by: str):
    first = GenerationRequest(FIRST, 4, ignore_eos=True, whole_text=True)
    with Engine(MODEL, settings=SETTINGS) as engine:
        engine.generate(first, "named").text()
        record = engine.find("named").result()
        assert record.last_answer is not None
        assert record.last_answer.length == len(FIRST) + 4
        if replaced_by == "prepare":
            engine.prepare(text(100, 3), "named").result()
            assert record.last_prompt is None
        else:
            aligned = replaced_by == "alignment"
            prompt, options = (SECOND, IN_PLACE) if aligned else (text(100, 3), None)
            request = GenerationRequest(prompt, 0, whole_text=True, alignment=options)
            generation = engine.generate(request, "named")
            generation.text()
            assert (generation.reuse.mode == "in_place") is aligned
        assert record.last_answer is None
