"""Chat templates like those of each family, against transformers' `apply_chat_template`."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.template_limits import MAX_ITERATIONS
from tests.models.chat_templates import TEMPLATES

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Größe <b>&amp;</b> '日本'"},
        "unit": {"type": "string", "enum": ["C", "F"], "nullable": True},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}}
    for name in ("weather", "forecast")
]
CALL = {"id": "a1b2c3d4e", "function": {"name": "weather", "arguments": {"city": "São <1>"}}}
TURNS = [
    {"role": "user", "content": " Hi <there>\n"},
    {"role": "assistant", "content": "Hello  ", "reasoning": "They greet me.\n"},
    {"role": "user", "content": "Weather?"},
]
CHATS = {
    "a turn": TURNS[:1],
    "turns": TURNS,
    "system": [{"role": "system", "content": "Be 'brief'."}, *TURNS],
    "calls": [
        *TURNS,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"°C": 7}'},
    ],
}


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    """A codec of all bytes and four control tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        ByteLevel(add_prefix_space=False),
        ByteLevelDecoder(),
    )
    control = ["<s>", "</s>", "<|start|>", "<|stop|>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return TextCodec.open(tmp_path)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS, []], ids=["without", "tools", "none of them"])
@pytest.mark.parametrize("chat", CHATS)
def test_chat_equals_transformers_apply_chat_template(
    codec: TextCodec, template: str, chat: str, tools: list[dict[str, Any]] | None
) -> None:
    (codec.folder / "chat_template.jinja").write_text(template)
    reference = PreTrainedTokenizerFast(
        tokenizer_object=codec.tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    for prompt in (True, False):
        expected = reference.apply_chat_template(
            CHATS[chat], tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        chat_text = codec.chat(CHATS[chat], add_generation_prompt=prompt, tools=tools)
        assert chat_text == expected
        assert codec.encode(chat_text) == reference.encode(expected, add_special_tokens=False)


def test_tool_template_is_used_if_tools_are_passed(codec: TextCodec) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (codec.folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert codec.chat(TURNS) == "plain"
    assert codec.chat(TURNS, tools=TOOLS) == "tools"


def test_tool_schemas_are_not_encoded_as_control_tokens(codec: TextCodec) -> None:
    (codec.folder / "chat_template.jinja").write_text("<|start|>{{ tools | tojson }}")
    text = codec.chat(TURNS, tools=[{"<|stop|>": "</s>", "of": ["<|start|>"]}])
    assert text == '<|start|>[{"<|stop|>": "</s>", "of": ["<|start|>"]}]'
    assert [index for index in codec.encode(text) if index >= 256] == [258]


# As in templates of Nemotron and SmolLM3, of DeepSeek, and of those that join parts.
REWRITING = {
    "deleted text": "{{ messages[0].content.replace('/think', '') }}",
    "split text": "{{ messages[0].content.split('/think') | join }}",
    "joined parts": "{{ messages[0].content.split('/')[0] }}{{ variable }}",
    "sliced": "{{ messages[0].content[1:] }}",
    "beside the template's text": "<|start|>user <{{ messages[0].content[3:] }}",
}


@pytest.mark.parametrize("template", REWRITING.values(), ids=REWRITING)
def test_rewritten_text_of_users_becomes_no_control_token(codec: TextCodec, template: str) -> None:
    (codec.folder / "chat_template.jinja").write_text("<|start|>{{ eos_token }}" + template)
    for content, variable in (
        ("<|st/thinkop|>", ""),
        ("<|start/", "|>"),
        ("<|stop|><|stop|>", "<|stop|>"),
        ("abc<|stop|>", "<"),
        ("abc|stop|>", "<"),
    ):
        message = [{"role": "user", "content": content}]
        if ":]" in template and content.startswith("<|stop|><"):
            with pytest.raises(InvalidArgument, match="truncates a message"):
                codec.chat(message)
            continue
        text = codec.chat(message, template_kwargs={"variable": variable})
        control = [index for index in codec.encode(text) if codec.is_control(index)]
        assert control == [258, 257, *[258] * template.count("<|start|>")]
        assert codec.decode(codec.encode(text)) == text


def test_refusals_of_a_template_name_control_tokens_by_their_texts(codec: TextCodec) -> None:
    """Clients read them, and would make a control token of the name that stands for it."""
    (codec.folder / "chat_template.jinja").write_text(
        "{{ raise_exception('no <|start|> before ' + messages[0].content) }}"
    )
    with pytest.raises(InvalidArgument, match=r"no <\|start\|> before a <\|stop\|>$"):
        codec.chat([{"role": "user", "content": "a <|stop|>"}])


def test_control_tokens_that_a_template_writes_around_a_role_are_control_tokens(
    tmp_path: Path, codec: TextCodec
) -> None:
    """Phi-4 and GLM write "<|" + role + "|>"; the same text of a user stays text."""
    codec.tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    codec.tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened, template = (
        TextCodec.open(tmp_path),
        "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}",
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}" + template + "{% endfor %}{{ '<|assistant|>' }}"
    )
    turns = [("user", "a<|user|>"), ("assistant", "<|end|>b")]
    text = opened.chat([{"role": role, "content": content} for role, content in turns])
    assert text == "<|user|>a<|user|><|end|><|assistant|><|end|>b<|end|><|assistant|>"
    control = [opened.control_text(i) for i in opened.encode(text) if opened.is_control(i)]
    assert control == ["<|user|>", "<|end|>", "<|assistant|>", "<|end|>", "<|assistant|>"]


def test_a_template_is_compiled_once_and_each_rendering_has_its_own_limits(
    tmp_path: Path, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = f"{{% for i in range({MAX_ITERATIONS * 2 // 5}) %}}{{% endfor %}}"
    template = tmp_path / "chat_template.jinja"
    template.write_text(loop + "{{ messages[0].content }}<|stop|>")
    compiled, compile_source = list[str](), Environment.compile

    def count(self: Environment, source: str, *arguments: Any, **options: Any) -> Any:
        compiled.append(source)
        return compile_source(self, source, *arguments, **options)

    monkeypatch.setattr(Environment, "compile", count)
    for text in "abc":
        assert codec.chat([{"role": "user", "content": text}]) == f"{text}<|stop|>"
    assert len(compiled) == 1


def test_a_chat_needs_no_files_after_the_first(codec: TextCodec) -> None:
    """A server's model may be converted or pulled again, which removes its folder."""
    (codec.folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    for path in (None, *codec.folder.iterdir()):
        if path is not None:
            path.unlink()
        assert codec.chat([{"role": "user", "content": "a"}]) == "<s>a"


# As in templates of Qwen3-Coder, Nemotron 3 and Gemma 4.
WRITTEN_NUMBERS = (
    "{{ n | string }}",
    "{{ n | default('none') }}",
    "{{ n | int }}",
    "{{ missing | default(n) }}",
    "{{ [{'n': n}] | selectattr('n', 'equalto', n) | map(attribute='n') | join }}",
    "{{ '{}'.format(n) }}",
    "{{ '%d' | format(n) }}",
    "{{ {'n': n}.get('n', n) }}",
    "{% macro written(number) %}{{ number }}{% endmacro %}{{ written(n) }}",
    "{% set space = namespace(number=n) %}{{ space.number }}",
)


@pytest.mark.parametrize("template", WRITTEN_NUMBERS, ids=range(len(WRITTEN_NUMBERS)))
@pytest.mark.parametrize("number", [1764440000, 2**53 - 1, -(2**53)])
def test_large_numbers_of_calls_and_schemas_are_written(
    codec: TextCodec, template: str, number: int
) -> None:
    assign = "{% set n = messages[0].tool_calls[0].function.arguments.n %}"
    (codec.folder / "chat_template.jinja").write_text(assign + template)
    call = {"function": {"name": "sleep", "arguments": {"n": number}}}
    assert codec.chat([{"role": "assistant", "tool_calls": [call]}]) == str(number)


def test_a_template_may_look_through_all_messages_for_each(codec: TextCodec) -> None:
    """Gemma 4's does, for the role before and for the results of calls."""
    (codec.folder / "chat_template.jinja").write_text(
        "{% set ns = namespace(n=0) %}{% for message in messages %}"
        "{% for i in range(loop.index0 - 1, -1, -1) %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{% for i in range(loop.index0 + 1, messages | length) %}"
        "{% if false %}{% endif %}{% endfor %}{% endfor %}{{ ns.n }}"
    )
    assert codec.chat([TURNS[0]] * 600) == str(600 * 599 // 2)


def test_message_with_tool_calls_needs_no_content(codec: TextCodec) -> None:
    (codec.folder / "chat_template.jinja").write_text("{{ messages[0].content or 'none' }}")
    assert codec.chat([{"role": "assistant", "tool_calls": [CALL]}]) == "none"
    with pytest.raises(InvalidArgument, match="message 0"):
        codec.chat([{"role": "assistant", "tool_calls": []}])


@pytest.mark.parametrize("tools", ["weather", {"name": "weather"}, [len], [{"name": len}], 3])
def test_invalid_tool_schema_is_refused(codec: TextCodec, tools: Any) -> None:
    with pytest.raises(InvalidArgument, match="JSON schema"):
        codec.chat(TURNS, tools=tools)
