"""Stop strings count behind the reasoning of an answer, in all APIs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.chat.formats.registry import format_by_name
from kvkeep.model import Model
from kvkeep.session.stop_gate import ReasoningMarkers
from kvkeep.session.streaming import TextStream
from tests.server.conftest import ScriptedServer

STOP = "\n"
HERMES = "<think>\nOne\n\ntwo.\n</think>\n\nFirst line.\nSecond line."
HARMONY = (
    "<|channel|>analysis<|message|>One\n\ntwo.<|end|><|start|>assistant"
    "<|channel|>final<|message|>First line.\nSecond line."
)
CHARACTERS = st.text(alphabet="ab\n <é", max_size=12)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"stop": STOP}),
        ("/v1/responses", {"stop": STOP}),
        ("/v1/messages", {"stop_sequences": [STOP], "max_tokens": 99, "thinking": {"type": "x"}}),
        ("/api/chat", {"options": {"stop": [STOP]}}),
        ("/v1/sessions/stops/turns", {"stop": STOP}),
    ],
)
@pytest.mark.parametrize("answer", [HERMES, HARMONY], ids=["hermes", "harmony"])
def test_a_stop_string_in_the_reasoning_does_not_end_it(
    scripted: ScriptedServer, path: str, body: dict[str, Any], answer: str
) -> None:
    scripted.write(answer, output_format="hermes" if answer is HERMES else "harmony")
    messages = [{"role": "user", "content": "Hi"}]
    key = "input" if path == "/v1/responses" else "messages"
    with scripted.client() as client:
        if path.endswith("/turns"):
            client.post("/v1/sessions", json={"name": "stops"}).raise_for_status()
            body = {**body, "content": "Hi"}
        fields = {"stream": False, key: messages, **body}
        if path.endswith("/turns"):
            fields.pop(key)
        response = client.post(path, json=fields)
        client.delete("/v1/sessions/stops")
    assert response.status_code == 200, response.text
    assert "Second" not in response.text
    text, reasoning = parts(path, response.json())
    assert (text, reasoning) == ("First line.", "One\n\ntwo.")


def parts(path: str, answer: dict[str, Any]) -> tuple[str, str]:
    """Return text and reasoning of an answer."""
    if path == "/v1/chat/completions":
        message = answer["choices"][0]["message"]
        return message["content"], message["reasoning_content"]
    if path == "/v1/responses":
        reasoning, message = answer["output"]
        return message["content"][0]["text"], reasoning["content"][0]["text"]
    if path == "/v1/messages":
        thinking, text = answer["content"]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", STOP)
        return text["text"], thinking["thinking"]
    if path == "/api/chat":
        return answer["message"]["content"], answer["message"]["thinking"]
    return answer["text"].strip(), answer["reasoning"]


def test_routes_without_a_chat_have_no_reasoning(scripted: ScriptedServer) -> None:
    scripted.write(HERMES)
    with scripted.client() as client:
        body = {"prompt": "Hi", "stop": STOP}
        answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "<think>"


@given(reasoning=CHARACTERS, space=st.sampled_from(["", "\n", "\n\n"]), answer=CHARACTERS)
@pytest.mark.parametrize("is_open", [False, True])
def test_the_answer_is_cut_as_it_would_be_alone(
    smollm2: Model, is_open: bool, reasoning: str, space: str, answer: str
) -> None:
    codec, stops = smollm2.text, ("\n", "ab", "b a")
    markers = ReasoningMarkers.of(format_by_name("hermes", ()), is_open)
    opening = "" if is_open else "<think>"
    answer = answer.lstrip()
    before = f"{opening}{reasoning}</think>{space}"
    stream = TextStream(codec, stops, reasoning=markers)
    text = ""
    for character in before + answer:
        for token in codec.encode(character):
            text += stream.push(token)
    text += stream.flush()
    found = sorted((answer.find(s) + len(s), -len(s), s) for s in stops if s in answer)
    if found:
        end, _, stop = found[0]
        assert (text, stream.matched_stop) == (before + answer[: end - len(stop)], stop)
    else:
        assert (text, stream.matched_stop) == (before + answer, None)
    plain, without = TextStream(codec, stops), TextStream(codec, stops, reasoning=markers)
    if not is_open and not answer.startswith("<"):  # an answer without reasoning, as ever
        for token in codec.encode(answer):
            assert plain.push_pieces(token) == without.push_pieces(token)


def test_a_continued_turn_is_cut_behind_the_reasoning_that_goes_on(
    scripted: ScriptedServer,
) -> None:
    with scripted.client() as client:
        client.post("/v1/sessions", json={"name": "goes_on"}).raise_for_status()
        url = "/v1/sessions/goes_on/turns"
        answers = []
        parts_written = ["<think>\nOne", "\n\ntwo.</", "think>\n\nFirst", " line.\nSecond line."]
        for number, text in enumerate(parts_written):
            scripted.write(text)
            tokens = len(scripted.service.model.text.encode(text))
            body = {"max_tokens": tokens if number < 3 else 99, "stop": STOP}
            body |= {} if number else {"content": "Hi"}
            answers.append(client.post(url, json=body).raise_for_status().json())
        client.delete("/v1/sessions/goes_on")
    assert [a["finish_reason"] for a in answers] == ["length", "length", "length", "stop"]
    assert "".join(a["text"] for a in answers).strip() == "First line."


def test_an_answer_that_begins_after_a_rewind_is_cut_behind_its_reasoning(
    scripted: ScriptedServer,
) -> None:
    scripted.write(HERMES)
    with scripted.client() as client:
        client.post("/v1/sessions", json={"name": "anew"}).raise_for_status()
        url = "/v1/sessions/anew"
        body = {"content": "Hi", "stop": STOP}
        first = client.post(f"{url}/turns", json=body).raise_for_status().json()
        session = client.get(url).json()
        count = session["tokens"] - session["spans"]["turn 1 answer"][0]
        client.post(f"{url}/rewind", json={"count": count}).raise_for_status()
        second = client.post(f"{url}/turns", json={"stop": STOP}).raise_for_status().json()
        client.delete(url)
    assert parts("", second) == parts("", first) == ("First line.", "One\n\ntwo.")
