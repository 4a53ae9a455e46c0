"""A snapshot belongs to one model; a restore into another one is refused with the difference."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from small_models import small_model
from tokenizers import Tokenizer

from kvkeep.errors import FingerprintMismatch
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.spec.model_spec import ModelSpec, RopeSpec
from kvkeep.models.spec.state_layers import StateLayers
from kvkeep.models.text.codec import TextCodec
from kvkeep.storage.snapshots.fingerprint import Fingerprint, compute_fingerprint

MODEL = small_model()
TEXT = list(b"whose cells are these?")


def fingerprint_of(spec: ModelSpec) -> Fingerprint:
    layout = MODEL.decoder.new_cache().layout
    return compute_fingerprint(spec, MODEL.decoder.tensors, MODEL.text.tokenizer, layout)


def other_weights() -> Model:
    return small_model(seed=1)


def one_weight_changed() -> Model:
    model = small_model()
    model.decoder.tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    return model


def other_theta() -> Model:
    rope = RopeSpec("default", tuple(500_000.0 ** (-2 * i / 16) for i in range(8)))
    spec = replace(MODEL.spec, rope=rope)
    return Model("small", Path(), Decoder(spec, MODEL.decoder.tensors), MODEL.text)


def other_tokenizer() -> Model:
    tokenizer = Tokenizer.from_str(MODEL.text.tokenizer.to_str())
    tokenizer.add_special_tokens(["<|new|>"])
    return Model("small", Path(), MODEL.decoder, TextCodec(Path(), tokenizer))


def other_dtype() -> Model:
    tensors = {name: tensor.bfloat16() for name, tensor in MODEL.decoder.tensors.items()}
    return Model("small", Path(), Decoder(MODEL.spec, tensors), MODEL.text)


def other_end_of_text() -> Model:
    spec = replace(MODEL.spec, eos_token_ids=(7,))
    return Model("small", Path(), Decoder(spec, MODEL.decoder.tensors), MODEL.text)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (other_weights, "the weights differ"),
        (one_weight_changed, "the weights differ"),
        (other_theta, "the rope differs"),
        (other_tokenizer, "the tokenizer differs"),
        (other_dtype, "the dtype differs (float32 saved, bfloat16 loaded)"),
        (other_end_of_text, "the config differs"),
    ],
)
def test_another_model_is_refused_and_the_difference_is_named(
    other: Callable[[], Model], difference: str
) -> None:
    session, model = MODEL.session(64), other()
    session.feed(TEXT)
    with pytest.raises(FingerprintMismatch) as refusal:
        model.restore(session.snapshot())
    message = str(refusal.value)
    assert f"belongs to another model: {difference}" in message
    assert "Load the model it was saved with" in message
    assert message.count("differ") == 1


def test_a_different_layout_is_named() -> None:
    session = MODEL.session(64)
    session.feed(TEXT)
    snapshot = session.snapshot()
    foreign = snapshot.fingerprint | {"layout": "3 layers x 2 KV heads x 16"}
    with pytest.raises(FingerprintMismatch, match="the layout differs \\(3 layers x 2 KV heads"):
        MODEL.restore(replace(snapshot, fingerprint=foreign))


def test_a_refused_restore_changes_no_live_session() -> None:
    session, other = MODEL.session(64), other_weights()
    live = other.session(64)
    session.feed(TEXT)
    live.feed(TEXT)
    tokens, logits, cells = live.tokens, live.logits, live.cache.cells
    with pytest.raises(FingerprintMismatch):
        other.restore(session.snapshot())
    assert (live.tokens, live.cache.cells) == (tokens, cells)
    assert torch.equal(live.logits, logits)


def test_the_fingerprint_depends_on_the_contents_not_on_the_name() -> None:
    renamed = Model("another name", Path("/elsewhere"), small_model().decoder, MODEL.text)
    assert renamed.fingerprint == MODEL.fingerprint


def test_new_spec_fields_and_tokenizer_formatting_keep_the_fingerprint() -> None:
    @dataclass(frozen=True)
    class LaterSpec(ModelSpec):
        softcap: float | None = None

    fields = {
        field.name: getattr(MODEL.spec, field.name) for field in dataclasses.fields(ModelSpec)
    }
    tokenizer_json = json.loads(MODEL.text.tokenizer.to_str())
    tokenizer_json["truncation"] = {"max_length": 9, "strategy": "LongestFirst", "stride": 0} | {
        "direction": "Right"
    }
    text = TextCodec(Path(), Tokenizer.from_str(json.dumps(tokenizer_json)))
    later = Model("small", Path(), Decoder(LaterSpec(**fields), MODEL.decoder.tensors), text)
    assert text.tokenizer.to_str() != MODEL.text.tokenizer.to_str()
    assert later.fingerprint == MODEL.fingerprint
    session = MODEL.session(64)
    session.feed(TEXT)
    assert later.restore(session.snapshot()).tokens == TEXT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norms_before", False),
        ("norms_after", True),
        ("centred_norms", True),
        ("parallel", True),
        ("qk_norm_whole", True),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("logits_multiplier", 0.125),
        ("attention_multiplier", 0.25),
        ("per_layer_vocab", 200),
        ("altup_inputs", 4),
        ("altup_active", 1),
        ("laurel_rank", 5),
        ("activation_sparsity", (0.95, 0.0)),
        ("mlp_widths", (96, 64)),
        ("gated_attention", True),
        ("sigmoid_router", True),
        ("router_bias", True),
        ("ungated_shared_expert", True),
        ("routed_scale", 2.0),
        ("states", StateLayers("convolution", (1,), 64, 3)),
    ],
)
def test_fields_beyond_llama_change_the_config_digest(field: str, value: object) -> None:
    other = fingerprint_of(replace(MODEL.spec, **{field: value}))
    assert other.config != MODEL.fingerprint.config
    assert replace(other, config=MODEL.fingerprint.config) == MODEL.fingerprint


def test_the_config_digest_of_a_llama_is_the_same_as_in_the_first_release() -> None:
    assert fingerprint_of(MODEL.spec).config == (
        "88a4044ef71c8128de0636a0feca0afb36c82ad92934f4b51bf1becab2698e21"
    )
