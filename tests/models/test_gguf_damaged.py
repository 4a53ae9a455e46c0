"""GGUF files with metadata values of wrong types are refused as damaged."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from models.gguf_kinds import MADE, random_model
from models.gguf_writing import write
from tiny_gguf import tiny_llama, write_gguf

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.config import config_from_gguf, eos_token_ids
from kvkeep.models.gguf.convert import convert
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.tokenizer import build_tokenizer
from kvkeep.models.spec.config import spec_from_config

ODD: list[Any] = ["text", -1, 1.5, True, [], [1, "a"], [[1]], float("nan"), 1 << 62]
# Fields that are read where they are there, and that no file of the tests has.
FURTHER = [
    *("attention.head_count_kv", "attention.key_length", "expert_used_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_ext_factor"),
    *("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.finetuned", "rope.freq_base_swa"),
    *("attention.causal", "attention.clamp_kqv", "attention.temperature_scale", "logit_scale"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "nextn_predict_layers"),
    *("expert_count", "expert_weights_norm", "rope.dimension_sections", "altup.active_idx"),
    *("attention.shared_kv_layers", "embedding_length_per_layer_input", "attention.scale"),
    *("final_logit_softcapping", "attn_logit_softcapping", "activation_sparsity_scale"),
]
TOKENIZER = ["pre", "add_bos_token", "scores", "eot_token_id", "unknown_token_id"]


def read(file: GgufFile) -> None:
    spec_from_config(config_from_gguf(file), {}, file.path)
    build_tokenizer(file)
    eos_token_ids(file)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "kind", ["granite", "ministral3", "phi4-mini", "gemma3", "gemma4", "gemma3n"]
)
def test_wrong_field_values_raise_typed_errors(kind: str, tmp_path: Path) -> None:
    file = GgufFile.open(write(tmp_path / "m.gguf", kind, random_model(kind)))
    architecture, refused = MADE[kind][1], dict[str, str]()
    keys = [*file.metadata, *(f"{architecture}.{key}" for key in FURTHER)]
    keys += [f"tokenizer.ggml.{key}" for key in TOKENIZER]
    read(file)
    for key in keys:
        for value in ODD:
            try:
                read(replace(file, metadata={**file.metadata, key: value}))
            except (BadModelFile, UnsupportedModel) as error:
                refused[key] = str(error)
    assert {f"{architecture}.block_count", "tokenizer.ggml.tokens"} <= refused.keys()
    assert len(refused) > len(keys) // 2
    assert max(map(len, refused.values())) < 1000  # none shows a list of tokens


@pytest.mark.parametrize("template", [["{{ messages }}"], 7, True], ids=str)
def test_chat_template_of_another_type_is_refused(template: Any, tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGUFValueType.get_type(template)
        writer.add_key_value("tokenizer.chat_template", template, kind)

    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), edit=edit)
    with pytest.raises(BadModelFile, match=r"tokenizer\.chat_template must be text"):
        convert(path, tmp_path / "out", False)
    assert not (tmp_path / "out").exists()


def test_undefined_tensor_is_left_out_with_a_warning(tmp_path: Path) -> None:
    divisors = tiny_llama().state_dict()["model.norm.weight"].numpy()

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.of_tomorrow.weight", divisors)
        writer.add_tensor("of_today", divisors)

    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), edit=edit)
    with pytest.warns(RuntimeWarning, match=r"ignored: blk\.0\.of_tomorrow\.weight, of_today$"):
        convert(path, tmp_path / "out", False)
    assert (tmp_path / "out" / "config.json").exists()
