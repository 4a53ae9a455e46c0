"""Requests that name no field of kvkeep's own get answers with the fields of before.

`api_shapes.json` has the fields of the answers of a server that did not remember answers, pin
prompts, align or compact. It was made by this file's `main`, run with such a server's code.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

import kvkeep
from kvkeep.model import Model
from tests.scripted_model import ScriptedEngine, model_with_text_of
from tests.server.conftest import ScriptedServer, serving

SHAPES = Path(__file__).parent / "api_shapes.json"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
CALL = '<tool_call>{"name":"weather","arguments" :{"city":"Rome"}}\n</tool_call>'
HISTORY = [{"role": "user", "content": "The weather?"}]
NEXT = [{"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "And now?"}]
OWN_FIELDS = {"x_kvkeep"}
# Fields that the responses of OpenAI's and Anthropic's APIs have got since then.
NEW_FIELDS = {
    "cache_write_tokens",
    "completion_tokens_details",
    "prompt_cache_key",
    "prompt_cache_retention",
    "thinking_tokens",
}


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield paths and bodies; the second of each continues the first."""
    openai_tool = {"type": "function", "function": FUNCTION}
    message_tool = {"name": "weather", "description": "", "input_schema": PARAMETERS}
    for messages in (HISTORY, [*HISTORY, *NEXT]):
        yield "/v1/chat/completions", {"messages": messages}
        yield "/v1/chat/completions", {"messages": messages, "tools": [openai_tool]}
        yield "/v1/messages", {"messages": messages, "max_tokens": 99}
        body = {"messages": messages, "max_tokens": 99, "tools": [message_tool]}
        yield "/v1/messages", body
        yield "/v1/responses", {"input": messages}
        yield "/v1/responses", {"input": messages, "tools": [{"type": "function", **FUNCTION}]}
        yield "/api/chat", {"messages": messages, "stream": False}
        yield "/api/generate", {"prompt": "Hello", "stream": False}
        yield "/v1/completions", {"prompt": "Hello"}
        yield "/completion", {"prompt": "Hello", "n_predict": 4}


def shapes(client: httpx.Client, stream: bool) -> dict[str, list[str]]:
    """Return the fields of all answers by path, in dotted form with their types, and headers."""
    result = dict[str, set[str]]()
    for path, body in requests():
        response = client.post(path, json={**body, "stream": stream})
        assert response.status_code == 200, response.text
        lines = response.text.splitlines() if stream else [response.text]
        documents = [line.removeprefix("data: ") for line in lines]
        names = result.setdefault(path, set())
        names |= {name for name in response.headers if name.startswith("x-kvkeep")}
        for document in documents:
            if document.startswith("{"):
                parsed = json.loads(document)
                names |= set(fields(parsed, str(parsed.get("type", ""))))
    return {path: sorted(names) for path, names in result.items()}


def fields(value: Any, name: str) -> Iterator[str]:
    """Yield the dotted names of the scalars in a value, with their types."""
    if isinstance(value, dict):
        for key, member in value.items():
            if key not in OWN_FIELDS | NEW_FIELDS:
                yield from fields(member, f"{name}.{key}")
    elif isinstance(value, list) and value:
        for member in value:
            yield from fields(member, f"{name}[]")
    else:
        kind = "number" if isinstance(value, (int, float)) else type(value).__name__
        yield f"{name} {kind}"


def all_shapes(server: ScriptedServer) -> dict[str, dict[str, list[str]]]:
    server.write("Sunny.", CALL)
    with server.client() as client:
        return {"whole": shapes(client, False), "stream": shapes(client, True)}


def test_answers_have_the_fields_of_before(scripted: ScriptedServer) -> None:
    assert all_shapes(scripted) == json.loads(SHAPES.read_text())


def main() -> None:
    model = kvkeep.load_model()
    with tempfile.TemporaryDirectory() as folder:
        text_model: Model = model_with_text_of(Path(folder) / "model", model.text.folder)
        answers: list[str] = []

        def next_answer(prompt: str) -> str:
            answers.append(answers.pop(0))
            return answers[-1]

        engine = ScriptedEngine(text_model, next_answer, settings={"max_kv_size": 2048})
        with serving(engine) as running:
            server = ScriptedServer(running.url, running.service, answers)
            SHAPES.write_text(json.dumps(all_shapes(server), indent=1) + "\n")


if __name__ == "__main__":
    main()
