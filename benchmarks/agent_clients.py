"""Sessions of five coding agents, replayed in the shapes in which the real programs sent them.

The shapes, in `agent_shapes.json`, were recorded between the released programs and a server whose
model wrote given answers, and then reduced. They say what a request consists of, how long each text
is in tokens, and which texts are those of an earlier request, line by line. The texts themselves
are generated, but for what the recording itself made up (questions, answers, calls) and for lines
that prompt rules look at: tags, dates, and billing headers.

In a shape, a text is a string as it was sent, or the lists of its pieces: a line as it was sent, or
the number of a generated piece and its tokens. An id of a call is the number of the request whose
answer had it, and its index there. Messages and tools are numbers in lists of each shape.
"""

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agent_texts import Prose, function

_SHAPES = Path(__file__).with_name("agent_shapes.json")
_MAX_TOKENS = 400
_LEAST_SCALED = 8  # tokens; shorter pieces keep their length at any scale
_SCHEMA_TOKENS = 40  # of a generated tool, without its description

# Parts of a recording, named in the first request of each.
PHASES = {
    "task": "a question, and reads of files",
    "resume": "a second question in a new process",
    "day": "a third one, on the next day",
    "tools": "a fourth one, with the tools of an MCP server",
    "new": "another session in the same folder",
    "compact": "its context is summarised",
    "after": "a question after that",
}


@dataclass(frozen=True)
class AgentRequest:
    """A request. writes: what the model answers. event: of `PHASES`, "" within one.

    aside: a request apart from the conversation, such as one for a title or a commit message.
    """

    path: str
    body: Mapping[str, Any]
    writes: str
    event: str = ""
    aside: bool = False


Agent = Generator[AgentRequest, dict[str, Any], None]


@dataclass(frozen=True)
class AgentShape:
    """The recorded requests of a program. recorded: the date."""

    client: str
    version: str
    recorded: str
    messages: list[Any]
    tools: list[tuple[str, int, int]]  # name, number of its text, tokens
    requests: list[dict[str, Any]]


def load_shapes() -> dict[str, AgentShape]:
    """Return the recorded shapes, by program."""
    shapes = json.loads(_SHAPES.read_text())
    return {name: AgentShape(**shape) for name, shape in shapes.items()}


def replay(shape: AgentShape, scale: float = 1.0) -> Agent:
    """Yield the requests of a program, and get the server's answers, whose ids are sent back.

    scale: of the lengths of generated texts.
    """
    texts, answers, phase = _Texts(scale), list[dict[str, Any]](), ""
    tools = [function(name, texts.piece(number, n)) for name, number, n in shape.tools]
    for recorded in shape.requests:
        filled = _Filling(texts, answers)
        body = dict(recorded["body"])
        for name in ("messages", "input"):
            if name in body:
                body[name] = [filled.value(shape.messages[number]) for number in body[name]]
        for name in ("system", "instructions"):
            if name in body:
                body[name] = filled.value(body[name])
        if "tools" in body:
            body["tools"] = [_tool(recorded["path"], tools[number]) for number in body["tools"]]
        if recorded["path"] == "/v1/messages":
            body["max_tokens"] = _MAX_TOKENS
        event = ""
        if not recorded["aside"] and recorded["phase"] != phase:
            event = phase = recorded["phase"]
        answer = yield AgentRequest(
            recorded["path"], body, recorded["writes"], event, recorded["aside"]
        )
        answers.append(answer)


def _tool(path: str, tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of an API."""
    if path == "/v1/messages":
        fields = {"name": tool["name"], "description": tool["description"]}
        return {**fields, "input_schema": tool["parameters"]}
    if path == "/v1/responses":
        return {"type": "function", "strict": False, **tool}
    return {"type": "function", "function": tool}


class _Texts:
    """The generated pieces of a session, by number."""

    def __init__(self, scale: float):
        self._scale, self._prose, self._pieces = scale, Prose(), dict[int, str]()

    def piece(self, number: int, tokens: int) -> str:
        if number not in self._pieces:
            if tokens > _LEAST_SCALED:
                tokens = max(_LEAST_SCALED, round(tokens * self._scale))
            self._pieces[number] = self._prose.words(tokens)
        return self._pieces[number]


@dataclass(frozen=True)
class _Filling:
    """Values of a shape with texts and ids."""

    texts: _Texts
    answers: list[dict[str, Any]]

    def value(self, shape: Any) -> Any:
        if isinstance(shape, list):
            return [self.value(entry) for entry in shape]
        if not isinstance(shape, dict):
            return shape
        if set(shape) == {"lines"}:
            return "\n".join(self._line(line) for line in shape["lines"])
        if set(shape) == {"call"}:
            request, index = shape["call"]
            return call_ids(self.answers[request])[index]
        return {name: self.value(entry) for name, entry in shape.items()}

    def _line(self, line: str | list[int]) -> str:
        return line if isinstance(line, str) else self.texts.piece(*line)


def call_ids(answer: Mapping[str, Any]) -> list[str]:
    """Return the ids of the calls of an answer, of any API."""
    if "choices" in answer:
        return [call["id"] for call in answer["choices"][0]["message"].get("tool_calls") or ()]
    if "output" in answer:
        return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
