"""`Model.chat`: whole answers, streams, system prompts, and resuming, in Python."""

import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import kvkeep
from kvkeep import Conversation, Model, Sampling, Session, Snapshot, errors
from kvkeep.cli.main import main
from kvkeep.session import feeding

SYSTEM = "You answer in one short sentence."
GREEDY = Sampling()


def test_answers_equal_those_to_the_rendered_messages(smollm2: Model) -> None:
    chat = smollm2.chat(SYSTEM, max_kv_size=1024)
    messages = [{"role": "system", "content": SYSTEM}]
    for question in ("What is the capital of France?", "And of Spain?"):
        messages.append({"role": "user", "content": question})
        session = smollm2.session(policy="full")
        session.feed(smollm2.text.chat(messages))
        expected = "".join(session.stream(20, GREEDY))
        assert chat.say(question, 20, GREEDY) == expected
        messages.append({"role": "assistant", "content": expected})
    assert chat.turns == [1, 2]
    start, end = chat.session.span_ranges["turn 1 question"]
    assert smollm2.text.decode(chat.session.tokens[start:end]) == "What is the capital of France?"


def test_default_sampling_is_the_models(smollm2: Model) -> None:
    assert len({smollm2.chat().say("Tell me a story.", 24) for _ in range(3)}) > 1


def test_a_stream_may_be_left_and_the_chat_goes_on(smollm2: Model) -> None:
    chat = smollm2.chat()
    stream = chat.stream("Count from 1 to 100.", sampling=GREEDY)
    first = next(stream)
    stream.close()
    start, end = chat.session.span_ranges["turn 1 answer"]
    assert smollm2.text.decode(chat.session.tokens[start:end]).startswith(first)
    assert "".join(chat.stream("Stop. What is 1 plus 1?", 12, GREEDY))
    assert chat.turns == [1, 2]


def test_the_system_prompt_is_never_evicted(smollm2: Model) -> None:
    chat = smollm2.chat(SYSTEM, max_kv_size=96)
    _, end = chat.session.span_ranges.get("system", (0, chat.session.keep))
    for number in range(6):
        chat.say(f"Say {number} and some more.", 24)
    assert chat.session.token_status[:end] == ["kept"] * end
    assert chat.session.cache.cells <= 96


@pytest.mark.parametrize("policy", [kvkeep.Sliding(96), kvkeep.Shift(96), kvkeep.Archive(96)])
def test_a_policy_that_is_an_object_keeps_the_system_prompt(
    smollm2: Model, policy: kvkeep.Sliding | kvkeep.Archive
) -> None:
    by_name = smollm2.chat(SYSTEM, policy=policy.name, max_kv_size=96).session
    session = smollm2.chat(SYSTEM, policy=policy).session
    assert (session.policy, session.max_kv_size) == (policy.name, 96)
    assert session.keep == by_name.keep > policy.keep
    larger = kvkeep.Sliding(96, keep=80)
    assert smollm2.chat(SYSTEM, policy=larger).session.keep == 80
    assert smollm2.chat(SYSTEM, policy=kvkeep.Full(96)).session.policy == "full"
    assert smollm2.chat(SYSTEM, keep=None, max_kv_size=96).session.keep == by_name.keep


def test_a_chat_resumes_from_its_snapshot_to_the_bit(smollm2: Model, tmp_path: Path) -> None:
    chat = smollm2.chat(SYSTEM, max_kv_size=1024)
    chat.say("What is the capital of France?", 20, GREEDY)
    chat.snapshot().save(tmp_path / "chat.kvkeep")
    resumed = smollm2.chat(snapshot=Snapshot.load(tmp_path / "chat.kvkeep"))
    assert resumed.system == SYSTEM
    assert resumed.say("And of Spain?", 20, GREEDY) == chat.say("And of Spain?", 20, GREEDY)
    assert resumed.session.tokens == chat.session.tokens
    with pytest.raises(errors.InvalidArgument, match="all settings"):
        smollm2.chat("Another system prompt.", Snapshot.load(tmp_path / "chat.kvkeep"))


@pytest.mark.parametrize("chat", [5, {"system": ["x"]}])
def test_a_snapshot_with_other_notes_is_refused(smollm2: Model, chat: object) -> None:
    session = smollm2.session()
    session.feed("Hi")
    snapshot = replace(session.snapshot(), notes={"chat": chat})
    with pytest.raises(errors.InvalidArgument, match="system prompt must be text"):
        smollm2.chat(snapshot=snapshot)


def test_a_session_of_the_chat_command_resumes_in_python(
    smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvkeep.models.hub.library import home

    (tmp_path / "models").symlink_to(home() / "models")
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    options = ["chat", "--session", "s", "--system", SYSTEM, "-n", "8", "--temperature", "0"]
    result: Result = CliRunner().invoke(main, options, input="What is the capital of France?\n")
    assert result.exit_code == 0, result.output
    snapshot = Snapshot.load(tmp_path / "sessions" / "s.kvkeep")
    chat: Conversation = smollm2.chat(snapshot=snapshot)
    assert (chat.system, chat.turns) == (SYSTEM, [1])
    assert chat.say("And of Spain?", 8, GREEDY)


def test_a_message_without_room_changes_nothing(smollm2: Model) -> None:
    chat = smollm2.chat(policy="full", max_kv_size=64)
    chat.say("Hi.", 4, GREEDY)
    before = list(chat.session.tokens)
    with pytest.raises(kvkeep.ContextFull):
        chat.say("word " * 100)
    assert chat.session.tokens == before
    assert chat.turns == [1]


def test_feeding_messages_names_the_calls_that_take_them(smollm2: Model) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"model.chat\(\).say\(\)"):
        smollm2.session().feed([{"role": "user", "content": "Hi"}])  # type: ignore[list-item]


def test_unknown_settings_list_the_known_ones(smollm2: Model) -> None:
    with pytest.raises(errors.InvalidArgument, match='"sliding" has keep, max_kv_size'):
        smollm2.session(windows=3)  # type: ignore[call-arg]


def test_all_errors_are_importable_from_kvkeep() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert len(classes) > 25
    assert all(getattr(kvkeep, name) is getattr(errors, name) for name in classes)


def test_a_chat_with_speculation_says_the_same_to_the_bit(smollm2: Model) -> None:
    question = "Repeat this list three times: red, green, blue, white, black, red, green, blue."
    chats = [smollm2.chat(), smollm2.chat()]
    chats[0].speculate = False
    for _ in range(2):
        assert chats[0].say(question, 60, GREEDY) == chats[1].say(question, 60, GREEDY)
    assert torch.equal(chats[0].session.logits, chats[1].fork().session.logits)
    assert chats[1].session.speculated[1] > 0


def require_turns_without_gaps(chat: Conversation) -> None:
    """Each token is of the system prompt or of a turn."""
    spans, end = chat.session.span_ranges, 0
    for name in ("system", *(f"turn {number}" for number in chat.turns)):
        assert spans[name][0] == end
        end = spans[name][1]
    assert end == len(chat.session.tokens)


LONG_QUESTION = "Name a river that runs through several countries of one continent, please."


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_error_of_any_type_removes_a_message_that_is_read_in_part(
    smollm2: Model, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = smollm2.chat(SYSTEM, policy="full", max_kv_size=800, prefill_step=16)
    chat.say("Name a sea.", 5, GREEDY)
    before, spans = list(chat.session.tokens), dict(chat.session.span_ranges)
    evaluate, steps = feeding.evaluate_prompt_step, list[int]()

    def fail_second(*arguments: Any) -> Any:
        steps.append(len(chat.session.tokens))
        if len(steps) == 2:
            raise error
        return evaluate(*arguments)

    monkeypatch.setattr(feeding, "evaluate_prompt_step", fail_second)
    with pytest.raises(error):
        chat.say(LONG_QUESTION, 5, GREEDY)
    assert steps[1] > len(before)
    assert chat.session.tokens == before
    assert chat.session.span_ranges == spans


@pytest.mark.parametrize("place", range(7))
def test_an_interrupt_leaves_no_text_outside_of_turns(
    smollm2: Model, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a span is named, or as soon as the prompt was read."""
    chat = smollm2.chat(SYSTEM, policy="full", max_kv_size=800)
    chat.say("Name a sea.", 5, GREEDY)
    before, count = list(chat.session.tokens), 0
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == place + 1:
                signal.raise_signal(signal.SIGINT)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(Session, "name", interrupted(Session.name))
    monkeypatch.setattr(chat, "name_turn", interrupted(chat.name_turn))
    try:
        with pytest.raises(KeyboardInterrupt) if place < 6 else nullcontext():
            chat.say("Name a river.", 5, GREEDY)
    finally:
        signal.signal(signal.SIGINT, handler)
    require_turns_without_gaps(chat)
    assert chat.turns == ([1, 2] if len(chat.session.tokens) > len(before) else [1])


@pytest.mark.parametrize(
    "arguments", [{"max_tokens": -1}, {"max_tokens": "a"}, {"sampling": "x"}, {"sampling": ""}]
)
def test_refused_arguments_of_an_answer_change_nothing(
    smollm2: Model, arguments: dict[str, Any]
) -> None:
    chat = smollm2.chat(SYSTEM)
    chat.say("Name a sea.", 5, GREEDY)
    watch = chat.session.watch()
    with pytest.raises(kvkeep.InvalidArgument):
        chat.say("Name a river.", **arguments)
    assert not watch()
    chat.align([{"role": "user", "content": "Name a lake."}])
    watch = chat.session.watch()
    with pytest.raises(kvkeep.InvalidArgument):
        chat.answer(**arguments)
    assert not watch()
    assert chat.is_open


def test_a_message_without_room_keeps_an_end_token_that_is_not_the_templates(
    smollm2: Model,
) -> None:
    session, end = smollm2.session(policy="full", max_kv_size=64), 1000
    chat = Conversation(session, smollm2.text, (end, *smollm2.end_token_ids), None)
    chat.say("Name a sea.", 3, GREEDY)
    session.feed([end])
    chat.end_turn()
    watch = session.watch()
    with pytest.raises(kvkeep.ContextFull):
        chat.say("word " * 100)
    assert not watch()
    chat.say("Why?", 3, GREEDY)
    assert end not in session.tokens
