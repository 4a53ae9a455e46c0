"""A generation ends at the end of a text, a turn or a tool call, in whichever file it is named."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from small_models import small_spec, write_small_folder
from tiny_gguf import tiny_llama, write_gguf, write_tokens
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from kvkeep import Sampling, load_model
from kvkeep.engine import Engine, GenerationRequest
from kvkeep.models.gguf.convert import convert
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.end_of_turn import end_token_ids, message_end_ids
from kvkeep.server.grammar import Grammar
from kvkeep.storage.snapshots.fingerprint import compute_fingerprint
from tests.models.chat_templates import TEMPLATES


def codec_with(folder: Path, control: Sequence[str], plain: Sequence[str] = ()) -> TextCodec:
    """Return a codec of all bytes and these tokens. plain: added tokens that are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec.open(folder)


def ends(text: TextCodec) -> set[str]:
    """Return the texts of the end tokens except id 0, which the model's spec states."""
    ids = end_token_ids(small_spec(), text)
    assert ids[0] == 0
    return {text.token_bytes(index).decode() for index in ids[1:]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", {"eos_token_id": 257}),
        ("config.json", {"text_config": {"eos_token_id": [256, 257]}}),
        ("generation_config.json", {"eos_token_id": [257, None, 1.5]}),
        ("tokenizer_config.json", {"eos_token": "<b>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<b>"}}),
        ("tokenizer_config.json", {"eot_token": "<b>", "eom_token": "<missing>"}),
        ("tokenizer_config.json", {"eom_token": "<b>"}),
        ("special_tokens_map.json", {"eos_token": {"content": "<b>"}}),
    ],
)
def test_each_file_may_state_an_end_token(
    tmp_path: Path, name: str, content: dict[str, Any]
) -> None:
    text = codec_with(tmp_path, ["<a>", "<b>"])
    assert ends(text) == set()
    (tmp_path / name).write_text(json.dumps(content))
    assert "<b>" in ends(text)
    (tmp_path / name).write_text("{")
    assert ends(text) == set()  # whoever needs the file says that it is broken


CONTROL = ["<s>", "</s>", "<|start|>", "<|stop|>", "<start_of_turn>", "[/INST]", "<|user|>"]


@pytest.mark.parametrize(
    ("template", "closing"),
    [
        (TEMPLATES["llama3"], {"<|stop|>"}),
        (TEMPLATES["qwen"], {"<|stop|>"}),
        (TEMPLATES["gemma"], {"<end_of_turn>"}),
        (TEMPLATES["mistral"], {"</s>"}),
        (TEMPLATES["phi3"], {"<|stop|>", "</s>"}),  # which writes an answer twice
        # Nothing closes an answer but the token that begins the next turn, as GLM has it.
        ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}", {"<|user|>"}),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", set()),
        ("{% for m in messages %}{{ m.content }}  <b>{% endfor %}", {"<b>"}),  # no special token
        ("{% for m in messages %}{{ m.content }}\n\n{% endfor %}", set()),  # white space, a token
        ("{{ raise_exception('no answer here') }}", set()),
        ("{% for %}", set()),
    ],
)
def test_template_reveals_the_end_of_a_turn(
    tmp_path: Path, template: str, closing: set[str]
) -> None:
    text = codec_with(tmp_path, [*CONTROL, "<end_of_turn>"], ["<b>", "\n\n"])
    known = ends(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    if template == TEMPLATES["mistral"] or template == TEMPLATES["phi3"]:
        config = {"bos_token": "<s>", "eos_token": "</s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(template)
    assert ends(TextCodec.open(tmp_path)) == known | closing


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATES["qwen"], {"<|stop|>"}),
        (TEMPLATES["gemma"], {"<end_of_turn>"}),
        (TEMPLATES["mistral"], {"[/INST]", "</s>"}),
        # Nothing closes a message but the token that begins the next one, as GLM has it.
        (
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}",
            {"<|user|>", "<|assistant|>"},
        ),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", set()),
        ("{{ raise_exception('no chat here') }}", set()),
    ],
)
def test_template_reveals_the_ends_of_messages(
    tmp_path: Path, template: str, expected: set[str]
) -> None:
    text = codec_with(tmp_path, [*CONTROL, "<end_of_turn>", "<|assistant|>"])
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert not message_end_ids(small_spec(), text)
    (tmp_path / "chat_template.jinja").write_text(template)
    text = TextCodec.open(tmp_path)
    found = {text.token_bytes(index).decode() for index in message_end_ids(small_spec(), text)}
    assert expected <= found
    assert not found - expected - ends(text) - {text.token_bytes(0).decode()}


HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], {"<|im_end|>", "<|endoftext|>"}),
        (["<|eot_id|>", "<|eom_id|>", "<|start_header_id|>"], {"<|eot_id|>", "<|eom_id|>"}),
        (["<|user|>", "<|end|>"], {"<|end|>"}),
        # The end of a message in a channel is not that of an answer.
        (
            ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"],
            {"<|call|>", "<|return|>"},
        ),
        (["</s>", "<eos>", "<|fim_pad|>", "<|file_sep|>"], set()),
    ],
)
def test_well_known_end_tokens_count_without_being_named(
    tmp_path: Path, control: list[str], expected: set[str]
) -> None:
    text = codec_with(tmp_path, control)
    assert ends(text) == expected
    if "<|channel|>" in control:
        (tmp_path / "chat_template.jinja").write_text(HARMONY)
        assert ends(TextCodec.open(tmp_path)) == expected


def test_answer_ends_at_the_tokenizer_s_end_token(tiny_folder: Path, tmp_path: Path) -> None:
    """In a session, an engine and a conversation; snapshots stay valid."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = load_model(str(folder), dtype="float32")
    end = model.text.encode("<|im_end|>", special=True)[0]
    assert model.spec.eos_token_ids == (0,)
    sampling = Sampling(logit_bias=((end, 1e9),))
    session = model.session()
    session.feed("Hi")
    assert list(session.stream(5, sampling)) == []
    assert (session.finish_reason, session.tokens[-1]) == ("eos", end)
    engine = Engine(model)
    try:
        (answer,) = engine.submit(
            GenerationRequest(tuple(model.text.encode("Hi")), 5, sampling)
        ).result()
        assert answer.text() == ""
        assert answer.end_reason == "eos"
    finally:
        engine.close()
    layout = model.decoder.new_cache().layout
    alone = compute_fingerprint(model.spec, model.decoder.weights, model.text.tokenizer, layout)
    assert model.fingerprint == alone
    assert model.restore(session.snapshot()).tokens == session.tokens


def test_gguf_with_a_wrong_eos_ends_by_its_template(tmp_path: Path) -> None:
    def wrong(writer: gguf.GGUFWriter) -> None:
        write_tokens(writer)
        writer.add_chat_template(
            "{% for m in messages %}<|start|>{{ m.content }}<|stop|>{% endfor %}"
        )

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 257
        writer.add_uint32("tokenizer.ggml.eom_token_id", 256)

    convert(
        write_gguf(tmp_path / "m.gguf", tiny_llama(), edit=edit, tokens=wrong),
        tmp_path / "m",
        False,
    )
    model = load_model(str(tmp_path / "m"), dtype="float32")
    assert model.spec.eos_token_ids == (257,)  # as it was, so that snapshots stay valid
    assert model.end_token_ids == (257, 256, 258)


def test_grammar_ends_an_answer_without_end_tokens(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(str(folder), dtype="float32")
    assert model.end_token_ids == ()
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    session = model.session()
    session.feed("Hi")
    text = "".join(session.stream(50, Sampling(constraint=Grammar.from_schema(model, schema))))
    assert json.loads(text)["a"] in (1, 22)
    assert session.finish_reason == "eos"
    endless = Sampling(constraint=Grammar.from_gbnf(model, "root ::= [a-z]+"))
    assert "".join(session.stream(9, endless)).isalpha()
    assert session.finish_reason == "length"
