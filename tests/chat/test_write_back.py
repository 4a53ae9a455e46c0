"""Histories with answers in the tokens that the model sampled."""

import json
import secrets
import tracemalloc
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.chat.messages import (
    Chat,
    Message,
    ReasoningPart,
    TextPart,
    Tool,
    ToolResult,
    normalized,
)
from kvkeep.chat.output_reader import OutputReader
from kvkeep.chat.renderer import ChatRenderer, RenderedPrompt, RenderOptions
from kvkeep.chat.write_back import AnswerWriter, _marks
from kvkeep.chat.written import WrittenAnswer, WrittenAnswers, written_answer
from kvkeep.models.text.control_tokens import ChatText
from tests.chat.chats import ARGUMENTS
from tests.chat.templates import ALL_TEMPLATES, OWN_CONTROLS, write_codec
from tests.examples import examples

WEATHER = Tool("weather", "The weather", {"type": "object", "properties": {}})
TOOLS = (WEATHER,)
OWNER = "0"


@dataclass
class Conversation:
    """A client's conversation with a server that remembers its answers."""

    renderer: ChatRenderer
    written: WrittenAnswers
    messages: tuple[Message, ...] = ()

    def prompt(self, **options: Any) -> RenderedPrompt:
        chat = Chat(normalized(self.messages), TOOLS)
        return self.renderer.render(
            chat, RenderOptions(**options), partial(self.written.find, OWNER)
        )

    def ask(self, text: str) -> None:
        self.messages += (Message("user", (TextPart(text),)),)

    def generate(self, text: str, drops_reasoning: bool = False) -> list[int]:
        """Let the model write a text, as an answer to the messages. Returns all tokens."""
        codec, output_format = self.renderer._codec, self.renderer.output_format
        prompt, ids = self.prompt(), codec.encode(text, special=True)
        reader = OutputReader(
            *(output_format, TOOLS, self.renderer.new_call_id, prompt.starts_in_reasoning),
            control_text=codec.control_text,
        )
        reader.push([token if codec.is_control(token) else codec.decode([token]) for token in ids])
        reader.finish()
        message = reader.output.message()
        call_ids = [call.id for call in message.calls]
        answer = written_answer(
            *(reader.output, ids, output_format, codec, prompt.ids),
            *(prompt.starts_in_reasoning, call_ids),
        )
        assert answer is not None
        self.written.add(OWNER, message, answer)
        parts = tuple(
            TextPart(part.text.strip()) if isinstance(part, TextPart) else part
            for part in message.parts
            if not (drops_reasoning and isinstance(part, ReasoningPart))
        )
        self.messages += (Message("assistant", parts),)
        if message.calls:
            results = (ToolResult(call.id, (TextPart("sunny"),)) for call in message.calls)
            self.messages += (Message("tool", tuple(results)),)
        return [*prompt.ids, *ids]


CONTROLS = ("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]")
CONTROLS = (*CONTROLS, "[TOOL_RESULTS]", "[/TOOL_RESULTS]")


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatRenderer]:
    """Return renderers of all templates, whose turns are between control tokens."""
    result = {}
    for name, template in ALL_TEMPLATES.items():
        folder = tmp_path_factory.mktemp("model")
        others = CONTROLS if name.startswith(("gemma", "mistral")) else ()
        controls = OWN_CONTROLS.get(name, others)
        result[name] = ChatRenderer(write_codec(folder, template, *controls))
    return result


@pytest.fixture
def conversation(renderers: dict[str, ChatRenderer]) -> Conversation:
    return Conversation(renderers["qwen2.5"], WrittenAnswers())


# Those that write what was before an answer as the answer's prompt had it, in all turns.
RESUMING = (
    *("gemma", "gemma2", "gemma4", "phi3", "qwen", "qwen2.5", "qwen3-coder", "lfm2", "ministral"),
    *("command-a-reasoning", "granite3", "phi4-mini", "olmo3"),
)
SPACES = st.sampled_from(["", " ", "\n", "\n\n  "])
SAID = st.text("abc {}<>\"'é\n", min_size=1, max_size=8).filter(lambda text: bool(text.strip()))


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Draw the text of an answer: text, or a call in bytes that no template writes."""
    if draw(st.booleans()):
        return draw(SPACES) + "I say: " + draw(SAID).strip() + draw(SPACES)
    arguments = json.dumps(draw(ARGUMENTS), indent=draw(st.sampled_from([None, 1])))
    space = draw(SPACES)
    call = f'{{{space}"name":{space}"weather", "arguments" :{arguments}{space}}}'
    return f"{draw(SPACES)}<tool_call>{space}{call}\n</tool_call>{space}"


@settings(max_examples=examples(10), deadline=None)
@given(template=st.sampled_from(list(ALL_TEMPLATES)), texts=st.lists(answers(), max_size=4))
def test_prompts_go_on_behind_the_sampled_tokens(
    renderers: dict[str, ChatRenderer], template: str, texts: list[str]
) -> None:
    conversation = Conversation(renderers[template], WrittenAnswers())
    conversation.ask("first question")
    for number, text in enumerate(texts):
        held = conversation.generate(text)
        if conversation.messages[-1].role == "assistant":
            conversation.ask(f"question {number}")
        prompt = conversation.prompt()
        plain = conversation.renderer.render(Chat(normalized(conversation.messages), TOOLS))
        if template in RESUMING:
            assert prompt.ids[: len(held)] == held
        if not prompt.written_back:
            assert prompt.ids == plain.ids
        decoded = conversation.renderer._codec.decode(prompt.ids)
        for message in conversation.messages:
            if message.role != "assistant":
                said = message.text or "sunny"
                assert decoded.count(said) == str(plain.text).count(said)


def test_calls_in_the_text_are_in_the_tokens_that_the_model_sampled(
    renderers: dict[str, ChatRenderer],
) -> None:
    conversation = Conversation(renderers["lfm2"], WrittenAnswers())
    conversation.ask("Weather?")
    held = conversation.generate(
        "<|tool_call_start|>[ weather(city = 'Bonn'), weather() ]<|tool_call_end|>I look."
    )
    prompt = conversation.prompt()
    assert prompt.ids[: len(held)] == held
    assert prompt.written_back == 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("gemma4", 'I look.\n<|tool_call>call:weather{city: "Bonn"}<tool_call|>'),
        ("ministral", '[THINK]\nHm.[/THINK] I look.[TOOL_CALLS]weather[ARGS]{"city":"Bonn"}'),
        ("ministral", "[THINK]\nHm.[/THINK]\n\nBlue. "),
        ("phi4-mini", '<|tool_call|> [{"name":"weather","arguments":{}}]<|/tool_call|>'),
        ("olmo3", "<function_calls> weather( ) </function_calls>"),
        ("granite3", '<|tool_call|> [{"name":"weather","arguments":{}}]'),
        (
            "command-a",
            "<|START_THINKING|>\nHm.<|END_THINKING|>"
            '<|START_ACTION|>[{"tool_name":"weather","parameters":{}}]<|END_ACTION|>',
        ),
    ],
)
def test_what_comes_before_calls_and_texts_is_in_the_tokens_that_the_model_sampled(
    renderers: dict[str, ChatRenderer], template: str, text: str
) -> None:
    conversation = Conversation(renderers[template], WrittenAnswers())
    conversation.ask("Weather?")
    held = conversation.generate(text)
    if conversation.messages[-1].role == "assistant":
        conversation.ask("So?")
    prompt = conversation.prompt()
    assert prompt.ids[: len(held)] == held
    assert prompt.written_back == 1


@pytest.mark.parametrize("template", ["gemma4", "gemma4 responses"])
def test_answers_that_go_on_with_the_turn_of_a_call_are_in_the_tokens_that_the_model_sampled(
    renderers: dict[str, ChatRenderer], template: str
) -> None:
    """The template opens no turn behind results, and writes a line more behind reasoning."""
    conversation = Conversation(renderers[template], WrittenAnswers())
    conversation.ask("Weather?")
    for number in range(3):
        thought = f"<|channel>thought\nHm {number}.<channel|>"
        held = conversation.generate(f"{thought}I look. <|tool_call>call:weather{{}}<tool_call|>")
        prompt = conversation.prompt()
        assert prompt.ids[: len(held)] == held
        assert prompt.written_back == number + 1


CALL = '<tool_call>{"arguments":{"a":1.0, "b":"x"},"name":"weather"}</tool_call>'


def test_what_a_client_has_changed_is_rendered_as_it_is(conversation: Conversation) -> None:
    conversation.ask("Hi")
    held = conversation.generate(CALL)
    question, answer, result = conversation.messages
    (call,) = answer.calls
    assert call.arguments == {"a": 1.0, "b": "x"}
    same = (
        (call,),
        (replace(call, arguments={"b": "x", "a": 1}),),
        (replace(call, id="other"),),
        (TextPart(" \n"), call),
    )
    changed = (
        (replace(call, arguments={"a": 1, "b": "y"}),),
        (replace(call, arguments={"a": True, "b": "x"}),),
        (replace(call, arguments={"a": "1", "b": "x"}),),
        (replace(call, name="other"),),
        (TextPart("a"), call),
        (call, call),
        (ReasoningPart("Hm."), call),
    )
    for number, parts in enumerate((*same, *changed)):
        conversation.messages = (question, Message("assistant", parts), result)
        prompt = conversation.prompt()
        assert prompt.written_back == (number < len(same))
        assert (prompt.ids[: len(held)] == held) == (number < len(same))


def test_reasoning_that_a_client_drops_is_restored_where_the_template_keeps_it(
    renderers: dict[str, ChatRenderer],
) -> None:
    thought = "<think>\nLet me see.\n</think>\n\n" + CALL
    for template, is_kept in (("qwen", True), ("qwen2.5", False)):
        conversation = Conversation(renderers[template], WrittenAnswers())
        conversation.ask("Hi")
        held = conversation.generate(thought, drops_reasoning=True)
        prompt = conversation.prompt()
        assert prompt.written_back == is_kept
        assert (prompt.ids[: len(held)] == held) == is_kept


def test_reasoning_is_that_of_the_same_answer(renderers: dict[str, ChatRenderer]) -> None:
    """Two answers say the same after other thoughts, which the client drops."""
    conversation = Conversation(renderers["qwen"], WrittenAnswers())
    conversation.ask("Hi")
    conversation.generate(f"<think>\nOne\n</think>\n\n{CALL}", drops_reasoning=True)
    held = conversation.generate(f"<think>\nTwo\n</think>\n\n{CALL}", drops_reasoning=True)
    assert conversation.prompt().ids[: len(held)] == held
    first = replace(conversation.messages[0], parts=(TextPart("Hello"),))
    conversation.messages = (first, *conversation.messages[1:])  # known by the calls' ids
    assert conversation.prompt().written_back == 2
    anonymous = [
        replace(message, parts=tuple(replace(part, id="call_0") for part in message.calls))
        if message.calls
        else message
        for message in conversation.messages
    ]
    conversation.messages = tuple(anonymous)
    assert conversation.prompt().written_back == 0


class CountedText(str):
    """A text that counts the characters that searches went through."""

    searched = 0

    def find(self, text: str, start: int = 0, *_: Any) -> int:  # type: ignore[override]
        place = super().find(text, start)
        CountedText.searched += (place if place >= 0 else len(self)) - start
        return place

    def count(self, text: str, *_: Any) -> int:  # type: ignore[override]
        CountedText.searched += len(self)
        return super().count(text)


@pytest.mark.parametrize("is_before", [True, False])
def test_answers_are_found_once_through_a_long_history(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    """An answer that a template writes at two places, before or after others, stays as it is."""
    monkeypatch.setattr(CountedText, "searched", 0)
    for number in range(40):
        conversation.ask(f"question {number:02}")
        conversation.generate(f" answer {number:02}\n")
    codec, output_format = conversation.renderer._codec, conversation.renderer.output_format
    lengths, other_place = list[int](), "question 00" if is_before else "question 39"

    def render(messages: Sequence[Message], prompt: bool | None = None) -> ChatText:
        options = RenderOptions(continue_final=False, generation_prompt=bool(prompt))
        text = conversation.renderer.render(Chat(normalized(messages), TOOLS), options).text
        sealed = text.sealed
        if (mark := _marks(41)[0]) in sealed:  # of the answer in the middle
            sealed = sealed.replace(other_place, mark)
        lengths.append(len(sealed))
        return ChatText(str(text), CountedText(sealed))

    plain = render(conversation.messages)
    found = {
        index: conversation.written.find(OWNER, message)
        for index, message in enumerate(conversation.messages)
        if message.role == "assistant"
    }
    CountedText.searched = 0
    writer = AnswerWriter(codec, output_format, render)
    history = writer.write_back(conversation.messages, found, plain)
    assert history is not None
    assert history.count == 39
    text = codec.decode(history.ids)
    for number in range(40):
        assert (f" answer {number:02}\n<|stop|>" in text) == (number != 20)
    assert CountedText.searched < 2 * sum(lengths)


def test_an_answer_that_the_client_continues_is_its_own(conversation: Conversation) -> None:
    conversation.ask("Hi")
    conversation.generate("Hello \n")
    prompt = conversation.prompt()
    assert prompt.continues
    assert prompt.written_back == 0


def test_answers_that_say_more_than_was_read_are_not_remembered(
    renderers: dict[str, ChatRenderer],
) -> None:
    renderer = renderers["qwen2.5"]
    ids = renderer._codec.encode("Hello<|start|>user\nBye", special=True)
    reader = OutputReader(renderer.output_format)
    reader.push([renderer._codec.decode(ids, skip_special=True)])
    reader.finish()
    form, codec = renderer.output_format, renderer._codec
    assert written_answer(reader.output, ids, form, codec, [1]) is None


def test_memory_is_bounded_and_the_longest_unused_go_first() -> None:
    written = WrittenAnswers(max_tokens=670)

    def message(number: int) -> Message:
        return Message("assistant", (TextPart(f"answer {number}"),))

    for number in range(9):
        written.add(OWNER, message(number), WrittenAnswer(array("i", [number] * 36), b""))
        assert written.tokens <= 670
        assert written.find(OWNER, message(0))  # is used again and again
    left = [number for number in range(9) if written.find(OWNER, message(number))]
    assert left == [0, 7, 8]
    for _ in range(99):
        written.add(OWNER, message(8), WrittenAnswer(array("i", [8]), b""))
    assert len(written.find(OWNER, message(8))) == 2
    assert not written.find("other", message(8))


@pytest.mark.parametrize(("num_tokens", "num_calls"), [(1, 0), (1, 4), (200, 1)])
def test_answers_take_no_more_bytes_than_four_for_each_token_of_the_limit(
    num_tokens: int, num_calls: int
) -> None:
    tracemalloc.start()
    try:
        written = WrittenAnswers(max_tokens=2**18)
        for number in range(2000):
            message = Message("assistant", (TextPart(f"answer {number}"),))
            ids = tuple(f"call_{secrets.token_hex(12)}" for _ in range(num_calls))
            prompt, reasoning = secrets.token_bytes(16), secrets.token_bytes(16)
            answer = WrittenAnswer(array("i", [1] * num_tokens), prompt, ids, reasoning)
            written.add(f"owner {number % 7}", message, answer)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 < size / (4 * written.tokens) <= 1
