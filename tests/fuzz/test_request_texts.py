"""Fuzz tests of what clients and models send as programs.

These are JSON schemas, regular expressions, tools, grammars and templates.
"""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from fuzz.fuzzing import fuzz
from fuzz.mutations import mutate_bytes, mutate_json
from small_models import VOCABULARY, write_small_folder

from kvkeep import Model, load_model
from kvkeep.chat.openai_chat import parse_chat
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.answer_grammar import compile_answer
from kvkeep.server.grammar import Grammar
from tests.chat.templates import QWEN25

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}(-[0-9]+)*$", "maxLength": 20},
        "count": {"type": "integer", "minimum": 1, "maximum": 99, "multipleOf": 3},
        "kind": {"enum": ["a", "b", 1, None]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "minItems": 1, "maxItems": 4},
        "other": {"anyOf": [{"type": "number"}, {"const": {"x": [1]}}, {"format": "date"}]},
    },
    "required": ["name", "parts"],
    "additionalProperties": {"type": "boolean"},
    "$defs": {"part": {"allOf": [{"properties": {"of": {"$ref": "#/$defs/part"}}}]}},
}
GBNF = r"""# an object
root ::= "{" ws pair ("," ws pair){0,3} "}"
pair ::= string ":" ws (string | number | root)
string ::= "\"" ([^"\\\x7F] | "\\" ["nrt])* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)?
ws ::= [ \t\n]*
"""
# Few characters: every expression of the grammar's library appears.
PATTERN = (
    r"^(?:[a-z]{1,8}(-[0-9]+)*|(?i:no|yes)\s?|\d{2,}(?=x)?\.\w*?|[^\x00-\x1f\\]+|\p{L}|(a|b)+\b)$"
)
PATTERN_PARTS = (
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "*",
    "+",
    "?",
    "|",
    "^",
    "$",
    "\\",
    "{1,9999}",
    "{99}",
    "(?",
)
TEMPLATE = """{%- set ns = namespace(n=0) -%}
{%- macro part(text, sep='|') %}{{ sep }}{{ text|trim|upper }}{% endmacro -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' and loop.index0 % 2 == 0 -%}
{{ bos_token }}<u>{{ part(message.content, sep='-' * 3) }}</u>
{%- elif message.tool_calls is defined %}{{ message.tool_calls|tojson(indent=2) }}
{%- else %}{{ message.content.split('x')[-1]|replace('a', 'bb') ~ ns.n }}{% set ns.n = ns.n + 1 %}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '%s>' % 'a' }}{{ range(3)|join(',') }}{% endif -%}
{%- for a, b in {'x': 1}.items()|list %}{{ a * 2 }}{{ b ** 2 }}{% endfor -%}
"""
TOOLS = {
    "tools": [
        {"type": "function", "function": {"name": "find", "parameters": SCHEMA, "strict": True}},
        {
            "type": "function",
            "function": {"name": "stop", "description": "Stop.", "parameters": {}},
        },
    ],
    "tool_choice": "required",
    "parallel_tool_calls": True,
}
MESSAGES = [{"role": "user", "content": "xax"}, {"role": "assistant", "content": "axa"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(write_small_folder(tmp_path_factory.mktemp("small"))), dtype="float32")


def follow(grammar: Grammar, random: Random) -> None:
    """Write a few tokens that a grammar allows."""
    for _ in range(4):
        allowed = torch.isfinite(grammar.masked(torch.zeros(VOCABULARY, dtype=torch.float32)))
        choices = allowed.nonzero().flatten().tolist()
        if not choices:
            return
        grammar.accept(random.choice(choices))


def test_a_changed_schema_is_followed_or_refused(model: Model) -> None:
    def read(random: Random) -> None:
        schema = mutate_json(SCHEMA, random)
        if isinstance(schema, dict):
            follow(Grammar.from_schema(model, schema), random)

    assert fuzz(read, 41)["read"]


def test_a_changed_pattern_is_followed_or_refused(model: Model) -> None:
    def read(random: Random) -> None:
        pattern = mutate_bytes(PATTERN.encode(), random).decode("utf-8", "replace")
        for _ in range(random.randrange(3)):
            offset = random.randrange(len(pattern) + 1)
            pattern = pattern[:offset] + random.choice(PATTERN_PARTS) + pattern[offset:]
        follow(Grammar.from_schema(model, {"type": "string", "pattern": pattern}), random)

    assert fuzz(read, 44)["read"]


def test_changed_tools_are_called_or_refused(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(QWEN25)
    model = load_model(str(folder), dtype="float32")

    def read(random: Random) -> None:
        body = {**mutate_json(TOOLS, random), "messages": MESSAGES}
        answer = compile_answer(model, parse_chat(body))
        if answer.grammar is not None:
            follow(answer.grammar, random)

    assert fuzz(read, 45)["read"]


def test_a_changed_grammar_is_followed_or_refused(model: Model) -> None:
    def read(random: Random) -> None:
        text = mutate_bytes(GBNF.encode(), random).decode("utf-8", "replace")
        follow(Grammar.from_gbnf(model, text), random)

    assert fuzz(read, 42)["read"]


def test_a_changed_template_renders_or_is_refused(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "model")
    config = folder / "tokenizer_config.json"

    def read(random: Random) -> None:
        text = mutate_bytes(TEMPLATE.encode(), random).decode("utf-8", "replace")
        config.write_text(json.dumps({"chat_template": text}))
        TextCodec.open(folder).chat(MESSAGES, True, None, {})

    assert fuzz(read, 43)["read"]
