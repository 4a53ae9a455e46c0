"""Tokens that only tokenizer_config.json or added_tokens.json state, against transformers."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from small_models import small_tokenizer, write_small_folder
from tokenizers import AddedToken
from transformers import AutoTokenizer

from kvkeep import load_model
from kvkeep.errors import BadModelFile
from kvkeep.models.text.codec import TextCodec
from kvkeep.storage.snapshots.fingerprint import matches_tokenizer

# The tokenizer's own: 256 bytes, and <eos> with the id 256.
TEXTS = ["a <eos> b", "x  <tool>  y", "<tool><think>z", "<pad> <pad>"]


def write_folder(
    folder: Path, decoder: Any = None, legacy: Any = None, rows: int = 300, **config: Any
) -> Path:
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<eos>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows}))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    if decoder is not None:
        config["added_tokens_decoder"] = decoder
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if legacy is not None:
        (folder / "added_tokens.json").write_text(json.dumps(legacy))
    return folder


def entry(content: str, **flags: bool) -> dict[str, Any]:
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": content, **dict.fromkeys(names, False), **flags}


def require_same_ids(folder: Path) -> TextCodec:
    reference = AutoTokenizer.from_pretrained(folder)
    with warnings.catch_warnings(action="error"):
        codec = TextCodec.open(folder)
    for text in TEXTS:
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert codec.encode(text, special=True) == ids
        assert codec.decode(ids) == reference.decode(ids)
    assert codec.tokenizer.get_vocab() == reference.get_vocab()
    return codec


@pytest.mark.parametrize("flags", [{}, {"special": True}, {"lstrip": True, "rstrip": True}])
def test_tokens_behind_those_of_tokenizer_json_are_added(
    tmp_path: Path, flags: dict[str, bool]
) -> None:
    decoder = {"258": entry("<think>"), "256": entry("<eos>", special=True)}
    decoder |= {"257": entry("<tool>", **flags)}
    codec = require_same_ids(write_folder(tmp_path, decoder))
    assert codec.encode("<tool><think>", special=True) == [257, 258]
    assert codec.is_control(257) == flags.get("special", False)


def test_a_token_with_a_role_is_special(tmp_path: Path) -> None:
    codec = require_same_ids(write_folder(tmp_path, {"257": entry("<pad>")}, pad_token="<pad>"))
    assert codec.is_control(257)


def test_added_tokens_json_counts_where_tokenizer_config_lists_none(tmp_path: Path) -> None:
    legacy = {"<think>": 258, "<tool>": 257, "<eos>": 256}
    codec = require_same_ids(write_folder(tmp_path, legacy=legacy, pad_token="<tool>"))
    assert [codec.is_control(i) for i in (256, 257, 258)] == [True, True, False]
    codec = require_same_ids(write_folder(tmp_path, {"257": entry("<think>")}, legacy))
    assert codec.encode("<think>", special=True) == [257]


def test_a_token_without_a_row_in_the_embedding_is_left_out(tmp_path: Path) -> None:
    decoder = {"257": entry("<tool>"), "258": entry("<think>")}
    for config in ({"vocab_size": 258}, {"vocab_size": 1, "text_config": {"vocab_size": 258}}):
        folder = write_folder(tmp_path, decoder)
        (folder / "config.json").write_text(json.dumps(config))
        assert TextCodec.open(folder).vocab_size == 258


@pytest.mark.parametrize(
    ("decoder", "count"),
    [
        ({"256": entry("<tool>")}, 257),  # is <eos>
        ({"97": entry("<tool>")}, 257),  # is a byte
        ({"257": entry(""), "258": entry("<tool>")}, 257),  # is no token, and leaves a gap
        ({"257": entry("<eos>")}, 257),  # has the id 256
        ({"259": entry("<tool>")}, 257),  # leaves a gap
        ({"257": entry("<tool>"), "258": entry("<tool>")}, 258),
    ],
)
def test_tokens_that_contradict_tokenizer_json_are_left_out_with_a_warning(
    tmp_path: Path, decoder: dict[str, Any], count: int
) -> None:
    folder = write_folder(tmp_path, decoder)
    with pytest.warns(
        RuntimeWarning, match=r"tokenizer_config\.json states tokens.*'(<tool>|<eos>|)'"
    ):
        codec = TextCodec.open(folder)
    assert codec.vocab_size == count


@pytest.mark.parametrize(
    "decoder", [[], {"x": entry("<a>")}, {"257": "<a>"}, {"257": {"content": 5}}, {"9" * 99: {}}]
)
def test_malformed_entries_are_refused(tmp_path: Path, decoder: Any) -> None:
    with pytest.raises(BadModelFile, match=r"tokenizer_config\.json: added_tokens_decoder"):
        TextCodec.open(write_folder(tmp_path, decoder))


def test_null_states_no_tokens(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": None}
    assert TextCodec.open(write_folder(tmp_path, **config)).vocab_size == 257


@pytest.mark.parametrize("token_id", ["257", -1, None, 1.5, True])
def test_malformed_legacy_entries_are_refused(tmp_path: Path, token_id: Any) -> None:
    with pytest.raises(BadModelFile, match=r"added_tokens\.json: '<a>'"):
        TextCodec.open(write_folder(tmp_path, legacy={"<a>": token_id}))


def test_entries_that_repeat_tokenizer_json_change_nothing(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path)
    fingerprint = load_model(str(folder), dtype="float32").fingerprint.to_dict()
    assert TextCodec.open(write_folder(tmp_path, {"256": entry("<eos>")})).vocab_size == 257
    repeated = {str(i): entry(small_tokenizer().id_to_token(i)) for i in (3, 97)}
    small_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": repeated}))
    tokenizer = TextCodec.open(folder).tokenizer
    assert tokenizer.to_str() == small_tokenizer().to_str()
    assert matches_tokenizer(fingerprint, tokenizer)
