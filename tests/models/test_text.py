"""Text to ids and back, whole and token by token; chat templates."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer

from kvkeep.errors import BadModelFile, InvalidArgument, UnsupportedModel
from kvkeep.models.text.codec import TextCodec
from tests.examples import examples

HI = [{"role": "user", "content": "Hi there"}]


@pytest.fixture(scope="module")
def codec(smollm2_folder: Path) -> TextCodec:
    return TextCodec.open(smollm2_folder)


@pytest.fixture
def with_template(smollm2_folder: Path, tmp_path: Path) -> TextCodec:
    """A codec whose folder has no template yet."""
    shutil.copy(smollm2_folder / "tokenizer.json", tmp_path)
    return TextCodec.open(tmp_path)


def test_encode_adds_nothing_and_special_encodes_special_tokens(codec: TextCodec) -> None:
    assert codec.encode("") == []
    assert codec.encode("<|im_start|><|im_end|>", special=True) == [1, 2]
    assert codec.opening_ids == []
    ids = codec.encode("<|im_start|>a<|im_end|>", special=True)
    assert codec.decode(ids) == "<|im_start|>a<|im_end|>"
    assert codec.decode(ids, skip_special=True) == "a"


def test_negative_ids_are_refused(codec: TextCodec) -> None:
    with pytest.raises(InvalidArgument, match="-3"):
        codec.decode([1, -3])


@settings(max_examples=examples(200))
@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_streamed_pieces_join_to_the_text(codec: TextCodec, ids: list[int], skip: bool) -> None:
    whole = codec.decode(ids, skip_special=skip)
    stream = codec.piece_stream(skip)
    given_so_far = ""
    for index in ids:
        given_so_far += stream.push(index)
        assert whole.startswith(given_so_far)
    assert given_so_far + stream.flush() == whole


@settings(max_examples=examples(200))
@given(text=st.text(max_size=30))
def test_stream_holds_back_incomplete_characters(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text)
    whole = codec.decode(ids)
    stream = codec.piece_stream()
    pieces = [stream.push(index) for index in ids]
    assert "".join(pieces) + stream.flush() == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


def test_character_of_several_tokens_is_returned_with_its_last_token(codec: TextCodec) -> None:
    ids = codec.encode("🎉")
    assert len(ids) > 1
    stream = codec.piece_stream()
    assert [stream.push(index) for index in ids] == [""] * (len(ids) - 1) + ["🎉"]
    assert stream.flush() == ""
    assert [stream.push(index) for index in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_stream_keeps_leading_spaces_of_words(tmp_path: Path) -> None:
    """SentencePiece-like decoders drop the space before the first word, and only that one."""
    vocab = {"▁a": 0, "▁b": 1, "▁": 2}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stream = TextCodec.open(tmp_path).piece_stream()
    assert [stream.push(index) for index in (0, 1, 2, 1)] == ["a", " b", " ", " b"]


@pytest.mark.parametrize("content", [None, "", "{", "{}", '{"model": {"type": "Unknown"}}'])
def test_broken_tokenizer_raises_bad_model_file(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadModelFile, match=r"tokenizer\.json"):
        TextCodec.open(tmp_path)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        HI,
        [{"role": "system", "content": "Be brief."}, *HI],
        [*HI, {"role": "assistant", "content": "<b>é\n"}, {"role": "user", "content": " x "}],
    ],
    ids=["user", "system", "turns"],
)
def test_chat_equals_transformers_rendering(
    codec: TextCodec, smollm2_folder: Path, messages: list[dict[str, str]], prompt: bool
) -> None:
    reference = AutoTokenizer.from_pretrained(smollm2_folder)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert codec.chat(messages, add_generation_prompt=prompt) == expected


def test_template_is_read_from_the_tokenizer_config(with_template: TextCodec) -> None:
    path = with_template.folder / "tokenizer_config.json"
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    path.write_text(json.dumps({"chat_template": template, "bos_token": {"content": "<s>"}}))
    assert with_template.chat(HI) == "<s>Hi there"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": template}]
    path.write_text(json.dumps({"chat_template": named, "eos_token": "</s>"}))
    assert TextCodec.open(with_template.folder).chat(HI) == "Hi there</s>"


def test_templates_have_the_helpers_of_transformers(with_template: TextCodec) -> None:
    (with_template.folder / "chat_template.jinja").write_text(
        "{%- for m in messages %}\n"
        "    {% if loop.index > 2 %}\n{% break %}\n    {% endif %}\n"
        "{{ m | tojson }}\n"
        "{% endfor %}\n"
        "{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}"
    )
    messages = [{"role": "user", "content": "<é>"}] * 3
    assert with_template.chat(messages) == '{"role": "user", "content": "<é>"}\n' * 2 + "4"


@pytest.mark.parametrize(
    "attack",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}"],
)
def test_template_can_raise_but_not_escape_the_sandbox(
    with_template: TextCodec, attack: str
) -> None:
    (with_template.folder / "chat_template.jinja").write_text(attack)
    with pytest.raises(InvalidArgument, match="template rejects"):
        with_template.chat(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}a{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
        "{% set a = [1] * 999 %}"
        "{% for i in a %}{% for j in a %}{% for k in a %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set s = namespace(x='aaaa') %}"
        "{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "{% set s = namespace(x='aaaa') %}"
        "{% for i in range(60) %}{% set s.x = s.x + s.x %}{% endfor %}",
        "{% set s = namespace(x='aaaa') %}"
        "{% for i in range(60) %}{% set s.x = [s.x, s.x] | join %}{% endfor %}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ 'a'.zfill(10 ** 10) }}",
        "{{ (5).to_bytes(10 ** 10) }}",
        "{{ 5 | round(-(10 ** 7)) }}",
        "{{ [1] | batch(10 ** 10, 0) | list }}",
        "{{ [1] | slice(10 ** 10) | list }}",
        "{{ ['a'] | map('center', 10 ** 10) | list }}",
        "{{ range(10 ** 9) | list }}",
        "{% for i in range(9999) %}{% set numbers = range(9999) %}{% endfor %}",
        "{{ lipsum(10 ** 9) }}",
        "{% set s = 'a' * 10 ** 6 %}{% for i in range(1000) %}{{ s }}{% endfor %}",
        "{% set s = 'a' * 10 ** 6 %}{% macro m() %}{% for i in range(1000) %}{{ s }}{% endfor %}"
        "{% endmacro %}{{ m() | length }}",
        "{% set s = 'a' * 10 ** 6 %}{% set t %}{% for i in range(1000) %}{{ s }}{% endfor %}"
        "{% endset %}",
        "{% set s = 'a' * 10 ** 6 %}{{ ([s] * 1000) | tojson }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ([s] * 1000) | join }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ','.join([s] * 1000) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ s | replace('a', s) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ s.replace('a', s) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ ('%s' * 400) % ([s] * 400) }}",
        "{% set s = 'a' * 10 ** 6 %}{{ [[s] * 40, [s] * 40] * 9 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '%(a)9999999s' % {'a': 1} }}",
        "{{ '%(a(b)c)9999999s' | format(**{'a(b)c': 1}) }}",
        "{{ '{0[}]:{1}}'.format({'}': 'x'}, 9999999) }}",
        "{% set b = 'aaaa'.encode() %}{{ b + b }}",
        "{{ (5).to_bytes(9) }}",
        "{{ ('x' * 10 ** 3).translate({120: 'y' * 10 ** 4}) }}",
        "{% set s = 'a' * 10 ** 5 %}{{ s | replace(new=s, old='a') | length }}",
        "{% set s = {'x': ['a' * 10 ** 6] * 1000} %}{{ s.values() }}",
        "{% set s = namespace(x=['a' * 10 ** 6] * 1000) %}{{ s }}",
        "{{ [1] | slice(10 ** 6) | list | length }}",
        "{{ ([[1] * 10] * 10 ** 4) | sum(start=[]) | length }}",
        "{{ ('a' * 10 ** 5).rfind('b' + 'a' * 10 ** 5) }}",
        "{{ (('<!---->' * 10 ** 4) | safe).striptags() }}",
        *(
            f"{{% set r = range(10 ** 5) | list %}}{{% for i in range(999) %}}{work}{{% endfor %}}"
            for work in (
                "{{ r | sum }}",
                "{{ r | max }}",
                "{{ r | reject('integer') | first }}",
                "{{ r.index(99999) }}",
                "{% if -1 in r %}{% endif %}",
                "{% if -1 is in r %}{% endif %}",
            )
        ),
        "{{ ('a\\n' * 10 ** 6) | indent(10 ** 6) }}",
        "{% set s = namespace(x=[1, 2]) %}"
        "{% for i in range(60) %}{% set s.x = [s.x, s.x] %}{% endfor %}{{ s.x }}",
        "{{ [1] | tojson(indent=10 ** 6) }}",
        "{{ 1 + 'a' }}",
        "{{ messages[0] + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.strip() }}",
        "{{ messages | sort(attribute='content') | sort }}{{ [1, 'a'] | sort }}",
        "{{ strftime_now(3) }}",
        "{{ '%d' % 'a' }}",
        "{{ raise_exception(3) }}",
    ],
)
def test_failing_or_endless_template_is_refused(with_template: TextCodec, source) -> None:
    (with_template.folder / "chat_template.jinja").write_text(source)
    with pytest.raises(InvalidArgument, match="chat template"):
        with_template.chat(HI)


@pytest.mark.parametrize(
    "content",
    [
        "{% for %}",
        "{{ 'a' | no_such_filter }}",
        "{{ 'a' | striptags }}",
        "{{ " + "(" * 400 + "1" + ")" * 400,
    ],
)
def test_invalid_template_is_refused(with_template: TextCodec, content: str) -> None:
    (with_template.folder / "chat_template.jinja").write_text(content)
    with pytest.raises(UnsupportedModel, match="cannot be rendered"):
        with_template.chat(HI)


def test_unreadable_template_raises_bad_model_file(with_template: TextCodec) -> None:
    (with_template.folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(BadModelFile, match="cannot be read"):
        with_template.chat(HI)
    (with_template.folder / "chat_template.jinja").unlink()
    for value in ([1], [{"name": 1}], [{"name": "default", "template": 7}], 7, {}):
        text = json.dumps({"chat_template": value})
        (with_template.folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(UnsupportedModel, match="no chat template"):
            TextCodec.open(with_template.folder).chat(HI)


def test_long_conversation_is_within_the_sandbox_limits(with_template: TextCodec) -> None:
    (with_template.folder / "chat_template.jinja").write_text(
        "{% macro m(t) %}{% if t.content is string %}{{ t.content | trim ~ '\n' }}{% endif %}"
        "{% endmacro %}{% for t in messages[::-1] if t.role %}{{ m(t) + (2 * '-') }}{% endfor %}"
        "{% for i in range(messages | length) %}{{ '%d,' % i }}{% endfor %}"
    )
    long = [{"role": "user", "content": "x" * 100}] * 2000
    text = with_template.chat(long)
    assert text == ("x" * 100 + "\n--") * 2000 + "".join(f"{n}," for n in range(2000))


def test_missing_template_suggests_a_remedy(with_template: TextCodec) -> None:
    with pytest.raises(UnsupportedModel, match="no chat template"):
        with_template.chat(HI)
    (with_template.folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UnsupportedModel, match="line 1"):
        TextCodec.open(with_template.folder).chat(HI)


@pytest.mark.parametrize("message", [{}, {"role": "user"}, {"role": 1, "content": "x"}])
def test_malformed_messages_are_refused(codec: TextCodec, message: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="message 1"):
        codec.chat([*HI, message])
