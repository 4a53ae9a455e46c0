"""Random configurations of every family against transformers in float32.

A seed is an architecture and a number; `check_seed("LlamaForCausalLM", 17, ...)` repeats one. If a
model is so sensitive that transformers' float32 logits differ from its float64 logits by more than
`NEAR`, kvkeep's may differ by twice as much.
"""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from models.family_checkpoints import open_model
from models.test_text_part import IMAGES
from random_configs import class_defaults, family_name, random_config
from safetensors.torch import load_file, save_file
from small_models import small_tokenizer

from kvkeep.errors import KvkeepError
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.text.codec import TextCodec

EACH = 110  # seeds of each architecture: more than 3,000
KEPT = "_size$|^num_(hidden|attention|.*experts)|^max_position"  # sizes, which a config must have
NEAR = 1e-4  # of the largest logit
TEXT = TextCodec(Path(), small_tokenizer())
# What is refused, and why that is right: no published model of these families has it.
REFUSED = {
    "query and key norms": "Command R+ has, which is refused as such",
    "clip_qkv": "not computed, and refused as such",
    "an expert clamp other than 7": "not computed, and refused as such",
    "activation 'relu' is not supported": "not computed, and refused as such",
    "sliding_window must be a whole number": "a window of 0 tokens, not even of the one that looks",
    "found null and .* such layers": "layers that slide, and no window: transformers raises, too",
    "leaves no pairs to rotate": "a part of a head that is less than a pair",
}


def random_model(architecture: str, values: dict[str, Any]) -> transformers.PreTrainedModel:
    """Return a transformers model with random weights, after `torch.manual_seed`.

    For Gemma 3n, which needs another library for images, only the language model.
    """
    kind = architecture.removesuffix("ForConditionalGeneration")
    if kind == architecture or kind == "Gemma3n":
        config = transformers.AutoConfig.for_model(text_type(architecture), **values)
        model = getattr(transformers, architecture.replace("ConditionalGeneration", "CausalLM"))
    else:
        images = dict(IMAGES[kind])
        if "out_hidden_size" in images:
            images["out_hidden_size"] = values["hidden_size"]
        text = values | {"model_type": text_type(architecture)}
        tied = values.get("tie_word_embeddings", False)
        config = getattr(transformers, architecture).config_class(
            text_config=text, vision_config=images, tie_word_embeddings=tied
        )
        model = getattr(transformers, architecture)
    config._experts_implementation = "eager"  # other kernels need rows of certain sizes
    result = model(config).eval()
    randomise(result, family_name(architecture))
    return result


def text_type(architecture: str) -> str:
    text = getattr(transformers, architecture).config_class().get_text_config()
    return str(text.model_type)


def randomise(model: transformers.PreTrainedModel, family: str) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            default = weight.flatten()[0].item() if name.endswith("norm.weight") else 0.0
            if family in ("Gemma3nText", "Gemma4Text") and name.endswith("q_norm.weight"):
                default = 0.3  # products of queries and keys are not scaled
            if re.search(r"norm_[12]\.weight|router\.(per_expert_)?scale", name):
                default = 1.0
            weight.normal_(default, 0.15)
        for name, scale in model.named_buffers():
            if name.endswith("layer_scalar"):
                scale.uniform_(0.7, 1.3)
            if name.endswith("expert_bias"):
                scale.normal_(0, 0.3)


def write(
    model: transformers.PreTrainedModel,
    folder: Path,
    architecture: str,
    values: dict[str, Any],
    random: Random,
) -> None:
    """Save the model as transformers does, with a config rewritten at random."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if architecture == "Gemma3nForConditionalGeneration":
        config = {"architectures": [architecture], "text_config": config}
        tensors = {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    rewrite_config(config.get("text_config", config), architecture, values, random)
    path.write_text(json.dumps(config))


def rewrite_config(
    text: dict[str, Any], architecture: str, values: dict[str, Any], random: Random
) -> None:
    """Leave out defaults and derived fields at random, or write RoPE as transformers 4."""
    for name, default in class_defaults(architecture).items():
        if name not in text or random.random() < 0.5:
            continue
        derived = (
            default is None and name not in values and name in ("layer_types", "no_rope_layers")
        )
        if derived or (text[name] == default and not re.search(KEPT, name)):
            del text[name]
    if "sliding_window_pattern" in values:
        text["sliding_window_pattern"] = values["sliding_window_pattern"]
    width = text["hidden_size"] // text["num_attention_heads"]
    if text.get("head_dim") == width and class_defaults(architecture).get("head_dim", 0) is None:
        text["head_dim"] = random.choice([None, width])
    if "per_layer_config" in text and random.random() < 0.5:  # as in published files
        del text["per_layer_config"]
        for name in ("global_head_dim", "num_global_key_value_heads"):
            text[name] = values.get(name)
    rope = text.get("rope_parameters")
    if rope and "rope_theta" in rope and random.random() < 0.3:
        text["rope_scaling"] = text.pop("rope_parameters")
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope:
                text[name] = rope.pop(name)
        if random.random() < 0.5:
            rope["type"] = rope.pop("rope_type")


def check_seed(architecture: str, number: int, folder: Path) -> str:
    """Compare logits for a seed. Returns the reason if kvkeep refuses the config, else ""."""
    random = Random(f"{architecture} {number}")
    values = random_config(architecture, random)
    torch.manual_seed(number)
    model = random_model(architecture, values)
    write(model, folder, architecture, values, random)
    try:
        model_under_test = open_model(folder, TEXT)
    except KvkeepError as error:
        return str(error).replace(str(folder), "")
    count = min(random.randint(12, 40), model_under_test.spec.max_positions)
    tokens = [random.randrange(3, values["vocab_size"]) for _ in range(count)]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    session = model_under_test.session(policy="full", prefill_step=random.choice([1, 5, 512]))
    fed, logits, positions = 0, [], []
    while fed < count:
        step = random.choice([1, 1, 4, 9, 17])
        session.feed(tokens[fed : fed + step])
        fed = min(fed + step, count)
        logits.append(session.logits)
        positions.append(fed - 1)
    result, largest = torch.stack(logits), expected.abs().max()
    if (result - expected[positions]).abs().max() > NEAR * largest:
        with torch.no_grad():
            exact = model.double()(torch.tensor([tokens])).logits[0]
        own_error, their_error = (
            (x - exact[positions]).abs().max() for x in (result, expected[positions])
        )
        assert own_error <= 2 * their_error, (
            f"{own_error / largest:.2g} off, transformers {their_error / largest:.2g}: {values}"
        )
    return ""


def check_all(architecture: str, numbers: range, folder: Path) -> None:
    """Fail with all seeds whose logits are wrong, or that are refused for an unexpected reason."""
    wrong, refused = [], 0
    for number in numbers:
        try:
            reason = check_seed(architecture, number, folder / str(number))
        except Exception as error:  # collect the errors of all seeds
            wrong.append(f"{architecture} {number}: {type(error).__name__}: {error}")
            continue
        refused += bool(reason)
        if reason and not any(re.search(explained, reason) for explained in REFUSED):
            wrong.append(f"{architecture} {number}: {reason}")
    assert not wrong, "\n".join(wrong)
    assert refused <= max(1, 0.1 * len(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_random_configurations_equal_transformers(architecture: str, tmp_path: Path) -> None:
    check_all(architecture, range(EACH), tmp_path)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_few_random_configurations_equal_transformers(architecture: str, tmp_path: Path) -> None:
    check_all(architecture, range(2), tmp_path)
