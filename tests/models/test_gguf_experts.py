"""Mixtures of experts in GGUF files, written by gguf-py with its names."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from models.gguf_kinds import GRANITE4_H, LFM2, NEMOTRON_H, QWEN35, STATE, WHOLE, WITH_DECAYS
from models.gguf_states import delta_net_tensors, mamba_tensors
from models.gguf_writing import add_fields
from safetensors.torch import load_file, save_file
from tiny_gguf import SIZES, interleaved, write_tokens

from kvkeep import load_model
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.compiled.products import ProductExecutor
from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.convert import convert
from kvkeep.models.layers.delta_net import DELTA_NET_OUTPUT, output_columns
from kvkeep.models.spec.config import read_spec
from kvkeep.models.weights.checkpoint import decoder_tensors
from kvkeep.models.weights.export import export
from kvkeep.models.weights.packing import PackedMatrix, as_tensor
from kvkeep.models.weights.tensors import is_router, matrix_shapes

TOKENS = [(17 * i * i + 5 * i) % 250 for i in range(60)]
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 3.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "truncate": False,
}
LFM2_MOE = {
    **{name: value for name, value in LFM2.items() if not name.startswith("block_")},
    **EXPERTS,
    "num_dense_layers": 1,
}
NEMOTRON_H_EXPERTS = NEMOTRON_H | {
    "layers_block_type": [STATE, "moe", STATE, STATE, WHOLE, "moe", WHOLE, "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 160,
    "routed_scaling_factor": 2.5,
}
SHARED = {"shared_expert_intermediate_size": 512}
MADE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", "llama", {"num_local_experts": 5}),
    "qwen2moe": ("Qwen2Moe", "qwen2moe", EXPERTS | SHARED),
    "qwen3moe": ("Qwen3Moe", "qwen3moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 32}),
    "qwen3moe-dense-first": (
        "Qwen3Moe",
        "qwen3moe",
        EXPERTS | {"norm_topk_prob": True, "head_dim": 32, "mlp_only_layers": [0]},
    ),
    "qwen3vlmoe": ("Qwen3Moe", "qwen3vlmoe", EXPERTS | {"norm_topk_prob": True, "head_dim": 32}),
    "qwen3.5-moe": ("Qwen3_5MoeText", "qwen35moe", QWEN35 | EXPERTS | SHARED),
    "qwen3-next": ("Qwen3Next", "qwen3next", QWEN35 | EXPERTS | SHARED),
    "lfm2moe": ("Lfm2Moe", "lfm2moe", LFM2_MOE),
    "granite4-h": (
        "GraniteMoeHybrid",
        "granitehybrid",
        MULTIPLIERS | GRANITE4_H | {"num_local_experts": 6},
    ),
    "nemotron-h": ("NemotronH", "nemotron_h_moe", NEMOTRON_H_EXPERTS),
    "nemotron-h-latent": (
        "NemotronH",
        "nemotron_h_moe",
        NEMOTRON_H_EXPERTS | {"moe_latent_size": 64},
    ),
    "olmoe": (
        "Olmoe",
        "olmoe",
        {"num_experts": 7, "num_experts_per_tok": 3, "pad_token_id": 0, "eos_token_id": 1},
    ),
    "granitemoe": ("GraniteMoe", "granitemoe", MULTIPLIERS | {"num_local_experts": 6}),
    "gpt-oss": (
        "GptOss",
        "gpt-oss",
        {
            "num_hidden_layers": 5,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "sliding_window": 20,
            "rope_parameters": YARN,
        },
    ),
}
DELTA_NETS = ("qwen3_5_moe_text", "qwen3_next")
Edit = Callable[[GGUFWriter], None]


def random_model(kind: str) -> Any:
    """Return a random model whose weights are exact in bfloat16."""
    name, _, changes = MADE[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            spread = (
                0.6 if "gate_up_proj" in parameter and name == "GptOss" else 0.15
            )  # some are clamped
            usual = (
                weight[0].item() if parameter.endswith("norm.weight") else 0
            )  # 1, or 0 for 1 + 0
            weight.normal_(usual, spread)
            weight.copy_(weight.bfloat16())
        for buffer, values in model.named_buffers():
            if buffer.endswith(("expert_bias", "e_score_correction_bias")):
                values.normal_(0, 0.3)
    return model


def gpt_oss_tensors(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """What a layer's tensor is in GGUF that is of experts: gates and ups are stored in turn."""
    block, matrix = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\w+)", name).groups()
    kind = "bias" if matrix.endswith("_bias") else "weight"
    rows = array if kind == "bias" else array.swapaxes(1, 2)
    parts = {"down": rows}
    if matrix.startswith("gate_up"):
        parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]}
    for part, some in parts.items():
        yield f"blk.{block}.ffn_{part}_exps.{kind}", np.ascontiguousarray(some)


def arrays(model: Any, names: gguf.TensorNameMap) -> Iterator[tuple[str, np.ndarray]]:
    """Return a model's tensors by GGUF name, with the gates of a layer stacked, and so on."""
    is_nemotron = model.config.model_type == "nemotron_h"
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        block = "".join(filter(str.isdigit, name))
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".experts." in name and model.config.model_type == "gpt_oss":
            yield from gpt_oss_tensors(name, array)
        elif name.endswith("self_attn.sinks"):
            yield f"blk.{block}.attn_sinks.weight", array
        elif name.endswith("experts.gate_up_proj"):
            for kind, part in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                yield f"blk.{block}.ffn_{kind}_exps.weight", part
        elif name.endswith("experts.up_proj"):
            yield f"blk.{block}.ffn_up_exps.weight", array
        elif name.endswith("experts.down_proj"):
            yield f"blk.{block}.ffn_down_exps.weight", array
        elif name.endswith("block_sparse_moe.router.weight"):
            yield f"blk.{block}.ffn_gate_inp.weight", array
        elif name.endswith(".expert_bias"):
            yield f"blk.{block}.exp_probs_b.bias", array
        elif ".conv.conv." in name:
            yield f"blk.{block}.shortconv.conv.weight", array.squeeze(1)
        elif name.endswith("shared_expert_gate.weight"):
            yield f"blk.{block}.ffn_gate_inp_shexp.weight", array[0]
        elif re.search(r"\.mlp\.(gate|up|down)_proj", name):  # gguf-py has none in a mixture
            yield f"blk.{block}.ffn_{name.split('.')[4].removesuffix('_proj')}.weight", array
        elif re.search(r"\.mamba\.|\.shared_mlp\.", name) or is_nemotron:
            for new_name, changed in mamba_tensors(name, array, model.config):
                yield names.get_name(new_name, try_suffixes=(".weight", ".bias")), changed
        elif model.config.model_type in DELTA_NETS:
            for new_name, changed in delta_net_tensors(name, array, model.config):
                yield names.get_name(new_name, try_suffixes=(".weight", ".bias")), changed
        else:
            there = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert there is not None, name
            heads = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
            for part, count in heads.items():
                if part in name and type(model).__name__[:7] in ("Mixtral", "Granite"):
                    array = interleaved(array, getattr(model.config, count))
            yield there, array


def write(
    path: Path, kind: str, model: Any, stored: Type = Type.F32, edit: Edit = lambda writer: None
) -> Path:
    """stored: of all matrices but routers, which llama.cpp's quantiser leaves alone, too."""
    _, architecture, _ = MADE[kind]
    config = model.config
    writer = GGUFWriter(path, architecture)
    add_fields(writer, architecture, config)
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture in ("granitemoe", "granitehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    write_tokens(writer)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, array in arrays(model, names):
        is_matrix = array.ndim > 1 and not re.search(
            "gate_inp|conv1d|shortconv.conv|ssm_(norm|a$|d$)|bias$", name
        )
        form = stored if is_matrix else Type.F32
        writer.add_tensor(name, gguf.quantize(array, form), raw_dtype=form)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", MADE)
def test_converted_folder_equals_the_original_model(kind: str, tmp_path: Path) -> None:
    model = random_model(kind)
    convert(write(tmp_path / "m.gguf", kind, model), tmp_path / "own", False)
    export(tmp_path / "own", tmp_path / "out", torch.float32)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert type(loaded) is type(model)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
        found = loaded.eval()(torch.tensor([TOKENS])).logits[0]
    most = 1e-4 if model.config.model_type in WITH_DECAYS else 1e-6
    assert (found - expected).abs().max() <= most * expected.abs().max()


@pytest.mark.parametrize("stored", [Type.F32, Type.BF16])
@pytest.mark.parametrize("kind", MADE)
def test_logits_equal_the_original_model(
    kind: str, stored: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    model = random_model(kind)
    path = write(tmp_path / "m.gguf", kind, model, stored)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    session, found = load_model(str(path), dtype="float32").session(policy="full"), []
    session.feed(TOKENS[:40])
    found.append(session.logits)
    for token in TOKENS[40:]:
        session.feed([token])
        found.append(session.logits)
    assert (torch.stack(found) - expected[39:]).abs().max() <= 1e-4 * expected.abs().max()


def quantised(array: np.ndarray, stored: Type) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(gguf.quantize(array, stored), stored))


def test_mxfp4_experts_equal_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As published, in a folder and in GGUF; transformers gets the dequantised weights."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    model = random_model("gpt-oss")
    folder = tmp_path / "folder"
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        packed = gguf.quantize(stored.pop(name).mT.contiguous().numpy(), Type.MXFP4)
        values = torch.from_numpy(gguf.dequantize(packed, Type.MXFP4))
        model.get_parameter(name).data.copy_(values.mT)
        blocks = torch.from_numpy(packed).unflatten(2, (-1, 17))
        low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
        codes = torch.cat((low, high), -1)  # by their columns; there even ones lie in low halves
        stored[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{name}_scales"] = blocks[..., 0].contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))

    def only_experts(writer: GGUFWriter) -> None:
        for name in [name for name in writer.tensors[0] if name.endswith("_exps.weight")]:
            array = writer.tensors[0].pop(name).tensor
            writer.add_tensor(name, gguf.quantize(array, Type.MXFP4), raw_dtype=Type.MXFP4)

    path = write(tmp_path / "m.gguf", "gpt-oss", model, edit=only_experts)
    convert(path, tmp_path / "own", False)
    shutil.copy(tmp_path / "own" / "tokenizer.json", folder)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, -1]
    for source in (folder, path):
        session = load_model(str(source), dtype="float32").session(policy="full")
        session.feed(TOKENS)
        assert (session.logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels on this machine")
@pytest.mark.parametrize("stored", [Type.Q4_0, Type.Q8_0])
@pytest.mark.parametrize("kind", MADE)
def test_experts_keep_their_quantised_bytes(
    kind: str, stored: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    reference = random_model(kind)
    model = load_model(str(write(tmp_path / "m.gguf", kind, reference, stored)))
    executor = ProductExecutor if kind == "nemotron-h-latent" else CompiledExecutor
    assert isinstance(model.decoder.executor, executor)
    values = {}
    for name, tensor in reference.state_dict().items():
        turned = kind == "gpt-oss" and tensor.dim() == 3  # whose stacks have columns first
        rows = tensor.mT.contiguous() if turned else tensor
        if tensor.dim() > 1 and not re.search("router|gate.w|bias|conv1d|conv.conv", name):
            rows = quantised(rows.numpy(), stored)
        values[name] = rows.mT if turned else rows
    wanted = decoder_tensors(model.spec, values)
    names = set(matrix_shapes(model.spec)) - ({"lm_head.weight"} if model.spec.tied_head else set())
    for name in names:
        packed = model.decoder.packed[name]
        assert isinstance(packed, PackedMatrix) != is_router(name)
        found = as_tensor(packed, torch.float32)
        if name.endswith(DELTA_NET_OUTPUT):
            found = output_columns(model.spec.states, found)
        assert torch.equal(found, wanted[name]), name
    session = model.session(policy="full")
    session.feed(TOKENS[:20])
    assert len([session.next_token() for _ in range(3)]) == 3


# gguf-py unpacks K-quants and packs none: random blocks, whose scales are small and finite.
@pytest.mark.parametrize(("stored", "halves"), [(Type.Q4_K, (0, 2)), (Type.Q6_K, (208,))])
def test_k_quant_stack_is_split_without_unpacking(
    stored: Type, halves: tuple[int, ...], tmp_path: Path
) -> None:
    model, random = random_model("qwen3moe"), np.random.default_rng(1)
    blocks: dict[str, np.ndarray] = {}

    def drawn(rows: int, columns: int) -> np.ndarray:
        span, nbytes = gguf.GGML_QUANT_SIZES[stored]
        found = random.integers(0, 256, (5, rows, columns // span, nbytes), dtype=np.uint8)
        for at in halves:
            found[..., at : at + 2] = np.array([1e-3], dtype=np.float16).view(np.uint8)
        return found.reshape(5, rows, -1)

    def edit(writer: GGUFWriter) -> None:
        for kind in ("gate", "up", "down"):
            name = f"blk.1.ffn_{kind}_exps.weight"
            del writer.tensors[0][name]
            blocks[kind] = drawn(256, 256)
            writer.add_tensor(name, blocks[kind], raw_dtype=stored)

    convert(write(tmp_path / "m.gguf", "qwen3moe", model, edit=edit), tmp_path / "own", False)
    export(tmp_path / "own", tmp_path / "out", torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    )
    experts = loaded.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    for kind, found in {"gate": gate, "up": up, "down": experts.down_proj}.items():
        assert np.array_equal(found.detach().numpy(), gguf.dequantize(blocks[kind], stored)), kind


def test_files_with_separate_experts_are_read(tmp_path: Path) -> None:
    """llama.cpp wrote Mixtral so until April 2024. Gate and up may also be one stack."""
    model = random_model("mixtral")

    def separate(writer: GGUFWriter) -> None:
        for name in [name for name in writer.tensors[0] if "_exps" in name]:
            stack = writer.tensors[0].pop(name).tensor
            for expert, matrix in enumerate(stack):
                writer.add_tensor(name.replace("_exps", f".{expert}"), matrix)

    def stacked(writer: GGUFWriter) -> None:
        for layer in range(2):
            names = [f"blk.{layer}.ffn_{kind}_exps.weight" for kind in ("gate", "up")]
            both = np.concatenate([writer.tensors[0].pop(name).tensor for name in names], axis=1)
            writer.add_tensor(f"blk.{layer}.ffn_gate_up_exps.weight", both)

    files = []
    for name, edit in {"usual": lambda writer: None, "a": separate, "t": stacked}.items():
        path = write(tmp_path / f"{name}.gguf", "mixtral", model, edit=edit)
        convert(path, tmp_path / name, False)
        files.append((tmp_path / name / "packed.safetensors").read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize(
    ("kind", "edit", "why"),
    [
        ("qwen3moe", lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "gati"),
        ("qwen3moe", lambda w: w.add_expert_weights_scale(2.5), "expert_weights_scale 2.5"),
        ("olmoe", lambda w: w.add_expert_group_count(8), "expert_group_count 8"),
        ("granitemoe", lambda w: w.add_expert_shared_feed_forward_length(64), "expert_shared"),
        (
            "mixtral",
            lambda w: w.add_tensor("blk.0.ffn_gate_exps.bias", np.ones((5, 512), np.float32)),
            r"ffn_gate_exps\.bias",
        ),
    ],
)
def test_unsupported_router_is_refused(kind: str, edit: Edit, why: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", kind, random_model(kind), edit=edit)
    with pytest.raises(UnsupportedModel, match=why):
        convert(path, tmp_path / "out", False)
    assert not (tmp_path / "out").exists()


def test_dense_layers_are_recognised_by_their_tensors(tmp_path: Path) -> None:
    kind = "qwen3moe-dense-first"
    convert(write(tmp_path / "m.gguf", kind, random_model(kind)), tmp_path / "out", False)
    spec = read_spec(tmp_path / "out")
    assert [spec.has_experts(layer) for layer in range(spec.layers)] == [False, True]


@pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels on this machine")
@pytest.mark.parametrize("written", [False, True])
def test_router_weights_keep_the_precision_of_the_file(
    written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, experts 0 and 1 score alike; 0, with the lower index, would produce NaN."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    model = random_model("mixtral")
    model.config.num_experts_per_tok = 1
    signs = model.model.layers[0].mlp.gate.weight[0].detach().sign()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(signs * (0.5 + torch.rand(259, 1)))
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.fill_(1)
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.gate.weight.copy_(-signs.expand(5, -1))
            layer.mlp.gate.weight[0] = signs
            layer.mlp.gate.weight[1] = signs * (1 + 2.0**-12)
            layer.mlp.experts.down_proj.zero_()
            layer.mlp.experts.down_proj[0] = torch.nan
    loaded = load_model(str(write(tmp_path / "m.gguf", "mixtral", model)))
    assert isinstance(loaded.decoder.executor, CompiledExecutor)
    session = loaded.session(policy="full")
    session.feed(TOKENS[:40])
    for token in TOKENS[40:]:
        session.score([token], token_by_token=written)
    assert session.logits.isfinite().all()
