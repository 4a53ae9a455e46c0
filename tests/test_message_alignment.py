"""A conversation aligned with messages: what is evaluated, what is said, and where turns are."""

from functools import partial
from typing import Any

import pytest
from interrupts import interrupted_from, lines_of

from kvkeep.chat.written import tokens_digest
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.conversation import Conversation
from kvkeep.session.core import StateChange
from kvkeep.session.message_alignment import ChatParts, _answers
from kvkeep.session.sampling import Sampling
from kvkeep.session.turn_template import TurnTemplate

SYSTEM = "You know some facts. " + "".join(f"{n} plus 1 is {n + 1}. " for n in range(60))
GREEDY = Sampling()


@pytest.fixture
def chat(smollm2: Model) -> Conversation:
    chat = smollm2.chat(system=SYSTEM, policy="full", max_kv_size=2048)
    for question in ("What is 3 plus 1?", "And 4 plus 1?", "Thank you."):
        chat.say(question, 12, GREEDY)
    return chat


def history(chat: Conversation, system: str = SYSTEM) -> list[dict[str, str]]:
    messages, session = [{"role": "system", "content": system}], chat.session
    for turn in chat.turns:
        for role, part in (("user", "question"), ("assistant", "answer")):
            start, end = session.span_ranges[f"turn {turn} {part}"]
            content = session.core.model.text.decode(session.tokens[start:end])
            messages.append({"role": role, "content": content})
    return messages


def test_a_history_that_is_the_same_evaluates_next_to_nothing(chat: Conversation) -> None:
    messages, tokens = history(chat), list(chat.session.tokens)
    spans = dict(chat.session.span_ranges)
    messages[2]["content"] = f" {messages[2]['content']}\n"  # as a client may write it
    report = chat.align([*messages, {"role": "user", "content": "One more: 7 plus 1?"}])
    assert list(chat.session.tokens)[: len(tokens)] == tokens
    assert report.evaluated < 40
    assert chat.is_open
    later = chat.session.span_ranges
    assert {name: later[name] for name in spans if name != "turn 3"} == (
        {name: spans[name] for name in spans if name != "turn 3"}
    )
    assert chat.answer(12, GREEDY)
    assert not chat.is_open
    assert chat.last_turn == 4
    with pytest.raises(InvalidArgument, match="answer"):
        chat.answer()


def test_a_changed_history_is_edited_in_place_and_goes_on(chat: Conversation) -> None:
    messages = history(chat, "Today is Monday. " + SYSTEM)
    del messages[3:5]
    report = chat.align(messages, min_saved=100)
    assert (report.mode, report.seams) == ("in_place", 1)  # the last turn is short
    assert report.evaluated < 0.2 * len(chat.session.tokens)
    assert chat.turns == [1, 2]
    assert history(chat, messages[0]["content"]) == messages
    assert chat.system == messages[0]["content"]
    fresh = chat.fork()
    assert fresh.align(messages, mode="exact").mode == "exact"
    assert fresh.session.tokens == chat.session.tokens
    assert chat.say("What is 5 plus 1?", 12, GREEDY)
    assert chat.turns == [1, 2, 3]
    chat.align([{"role": "user", "content": "Hello"}])  # without a system prompt
    assert (chat.system, chat.turns) == (None, [1])


def test_messages_without_a_users_are_the_text_that_turns_follow(smollm2: Model) -> None:
    system, answer = ({"role": r, "content": "Be brief."} for r in ("system", "assistant"))
    fresh, chat = (smollm2.chat(system=each) for each in ("Be brief.", None))
    for messages in ([answer], [system, answer], [system]):
        chat.align(messages)
        assert (chat.turns, chat.session.logits is not None) == ([], True)
    assert chat.say("Name a sea.", 4, GREEDY) == fresh.say("Name a sea.", 4, GREEDY)
    assert chat.session.tokens == fresh.session.tokens
    assert chat.session.span_ranges["system"] == fresh.session.span_ranges["system"]


def test_messages_that_cannot_be_rendered_change_nothing(chat: Conversation) -> None:
    tokens, spans = list(chat.session.tokens), dict(chat.session.span_ranges)
    wrong: tuple[Any, ...] = ([], [{"role": "other", "content": "x"}], None, 3, "Hi", {"a": 1}, [3])
    for messages in wrong:
        with pytest.raises(InvalidArgument, match="messages"):
            chat.align(messages)
    with pytest.raises(InvalidArgument):
        chat.align([{"role": "user", "content": "x"}], mode="other")  # type: ignore[arg-type]
    assert (list(chat.session.tokens), dict(chat.session.span_ranges)) == (tokens, spans)


@pytest.mark.parametrize("mode", ["in_place", "exact"])
def test_a_longer_system_prompt_is_never_evicted(smollm2: Model, mode: Any) -> None:
    old, new = "Be brief.", "Be brief. Answer in one sentence, and never say the word sea."
    chat = smollm2.chat(old, max_kv_size=120)
    answer = chat.say("Name a sea.", 4, GREEDY)
    messages = [
        {"role": "system", "content": new},
        {"role": "user", "content": "Name a sea."},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Name a river."},
    ]
    chat.align(messages, mode=mode, min_saved=0)
    assert chat.session.keep == chat.session.span_ranges["system"][1]
    for _ in range(6):
        chat.say("Tell me about another town of Italy, please, and its river.", 4, GREEDY)
    span = chat.session.spans["system text"]
    assert span.remembered == span.end - span.start


def test_a_system_prompt_without_room_is_refused_and_one_that_is_not_kept_is_not(
    smollm2: Model,
) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi"}]
    chat = smollm2.chat("Be brief.", max_kv_size=120)
    chat.say("Name a sea.", 4, GREEDY)
    tokens, spans = list(chat.session.tokens), dict(chat.session.span_ranges)
    with pytest.raises(InvalidArgument, match="keep must leave room"):
        chat.align(messages, mode="exact")
    assert (chat.session.tokens, dict(chat.session.span_ranges)) == (tokens, spans)
    assert chat.system == "Be brief."
    chat = smollm2.chat("Be brief.", max_kv_size=120, keep=0)
    chat.say("Name a sea.", 4, GREEDY)
    chat.align(messages, mode="exact")
    assert chat.session.keep == 0


def test_an_interrupted_alignment_is_done_or_undone(chat: Conversation) -> None:
    """Wherever Ctrl-C comes: no changed text is without the names of its turns."""
    spans, messages = dict(chat.session.span_ranges), history(chat)[:3]
    aligned = chat.fork()
    total = lines_of(lambda: aligned.align(messages))
    outcomes = {(SYSTEM, (1, 2, 3)): spans, (SYSTEM, (1,)): dict(aligned.session.span_ranges)}
    seen = set[tuple[str | None, tuple[int, ...]]]()
    for index in range(total // 2, total, total // 40):
        changed = chat.fork()
        interrupted_from(index, partial(changed.align, messages))
        outcome = (changed.system, tuple(changed.turns))
        assert outcomes[outcome] == changed.session.span_ranges
        assert changed.last_turn == max(changed.turns)
        seen.add(outcome)
    assert seen == set(outcomes)


def chat_of(model: Model, turns: int) -> tuple[Conversation, list[dict[str, str]]]:
    """Return a conversation that is aligned with messages, and these messages."""
    chat, messages = model.chat(policy="full", max_kv_size=2048), list[dict[str, str]]()
    for turn in range(turns):
        messages.append({"role": "user", "content": f"What is {turn} plus 1?"})
        messages.append({"role": "assistant", "content": f"<think>\nHm.\n</think>\n\n{turn + 1}."})
    chat.align(messages)
    return chat, messages


def test_turns_are_named_in_one_change_with_one_rendering_each(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, (few, few_messages) = dict[str, int](), chat_of(smollm2, 3)
    many, many_messages = chat_of(smollm2, 9)

    def count_calls(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count_calls(StateChange, "commit")
    count_calls(TextCodec, "chat")
    few.align(few_messages)
    of_few, spans = dict(counts), list(many.session.span_ranges.items())
    counts.clear()
    many.align(many_messages)
    assert counts["commit"] == of_few["commit"]
    assert counts["chat"] - of_few["chat"] == 9 - 3
    assert list(many.session.span_ranges.items()) == spans


def test_answers_of_a_session_have_the_digests_of_their_prompts(smollm2: Model) -> None:
    chat, _ = chat_of(smollm2, 4)
    session, spans = chat.session, dict(chat.session.span_ranges)
    for name in ("turn 3 answer", "turn 1 answer"):  # names in another order than the text
        session.core.set_span(name, None)
        session.name(name, *spans[name])
    session.name("turn 9 answer", *spans["turn 2 answer"])
    answers = _answers(ChatParts(session, session.core.model.text, chat.template, chat.system))
    tokens, found = list(session.tokens), list[bytes]()
    for _, _, answer in answers.entries():
        ranges = [spans[f"turn {turn} answer"] for turn in (1, 2, 3, 4)]
        (start,) = [start for start, end in ranges if tokens[start:end] == list(answer.ids)]
        assert answer.prompt == tokens_digest(tokens[:start])
        found.append(answer.prompt)
    assert len(set(found)) == 4


def test_a_failed_search_for_turns_leaves_the_names_found_before(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, messages = chat_of(smollm2, 3)
    spans = dict(chat.session.span_ranges)
    encode_later_turn = TurnTemplate.encode_later_turn

    def failing(template: TurnTemplate, question: str) -> Any:
        if question == messages[4]["content"]:
            raise InvalidArgument("no third turn")
        return encode_later_turn(template, question)

    monkeypatch.setattr(TurnTemplate, "encode_later_turn", failing)
    with pytest.raises(InvalidArgument, match="no third turn"):
        chat.align(messages)
    names = {"system", "opening", "turn 1 question", "turn 2 question"} & set(spans)
    assert chat.session.span_ranges == {name: spans[name] for name in names}
