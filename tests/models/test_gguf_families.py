"""GGUF files of families other than Llama and Qwen, written by gguf-py with its names."""

from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from models.gguf_kinds import MADE, TOKENS, WITH_DECAYS, random_model
from models.gguf_writing import Edit, gguf_type, write

from kvkeep import load_model
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.errors import BadModelFile, InvalidArgument, UnsupportedModel
from kvkeep.models.gguf.convert import convert
from kvkeep.models.layers.delta_net import DELTA_NET_OUTPUT, output_columns
from kvkeep.models.spec.config import read_spec
from kvkeep.models.weights.checkpoint import decoder_tensors
from kvkeep.models.weights.export import export
from kvkeep.models.weights.packing import as_tensor
from kvkeep.models.weights.tensors import matrix_shapes

# The kernels do not support these.
BY_TORCH = ["gemma3n", "gemma3n-widths"]


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


@pytest.mark.parametrize("kind", MADE)
def test_logits_equal_the_original_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    model = random_model(kind)
    path = write(tmp_path / "m.gguf", kind, model)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    session, found = load_model(str(path), dtype="float32").session(policy="full"), []
    session.feed(TOKENS[:40])
    found.append(session.logits)
    for token in TOKENS[40:]:
        session.feed([token])
        found.append(session.logits)
    assert (torch.stack(found) - expected[39:]).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("stored", [Type.Q4_0, Type.Q8_0])
@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != "falcon-h1"])
def test_fused_matrices_are_split_and_reordered_when_packed(
    kind: str, stored: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one each by itself, and rows in the order in which they are rotated.

    Where there are no kernels for them they are unpacked, and rounded to bfloat16.
    """
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    reference = random_model(kind)
    model = load_model(str(write(tmp_path / "m.gguf", kind, reference, stored)))
    compiled = kernel_library() is not None and kind not in BY_TORCH
    assert isinstance(model.decoder.executor, CompiledExecutor) == compiled
    values = {}
    for name, tensor in reference.state_dict().items():
        if tensor.dim() > 1:
            form = gguf_type(name, tensor.numpy(), stored)
            read = gguf.dequantize(gguf.quantize(tensor.numpy(), form), form)
            values[name] = torch.from_numpy(read)
    wanted = decoder_tensors(model.spec, values)
    assert model.decoder.packed.keys() <= wanted.keys()
    held = model.decoder.packed if compiled else model.decoder.tensors
    rounded = torch.float32 if compiled else torch.bfloat16
    for name in matrix_shapes(model.spec):
        if name in held:  # a head that is the embedding has no other name
            found = as_tensor(held[name], torch.float32)
            if name.endswith(DELTA_NET_OUTPUT):
                found = output_columns(model.spec.states, found)
            assert torch.equal(found, wanted[name].to(rounded).float()), name
    session = model.session(policy="full")
    session.feed(TOKENS[:20])
    assert len([session.next_token() for _ in range(3)]) == 3


@pytest.mark.parametrize(
    ("kind", "edit", "why"),
    [
        ("glm4", lambda writer: writer.add_rope_dimension_sections([4, 2, 2, 0]), "GLM-4V"),
        ("granite", lambda writer: writer.add_rope_scaling_finetuned(False), "without RoPE"),
    ],
)
def test_unsupported_variant_of_a_family_is_refused(
    kind: str, edit: Edit, why: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", kind, random_model(kind), edit=edit)
    with pytest.raises(UnsupportedModel, match=why):
        convert(path, tmp_path / "out", False)
    assert not (tmp_path / "out").exists()


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["qwen35.block_count"]
        writer.add_block_count(7)
        writer.add_nextn_predict_layers(1)
        for name in ("attn_norm", "attn_q", "nextn.eh_proj"):
            writer.add_tensor(f"blk.6.{name}.weight", np.ones((32, 32), np.float32))

    convert(
        write(tmp_path / "m.gguf", "qwen3.5", random_model("qwen3.5"), edit=edit),
        tmp_path / "out",
        False,
    )
    spec = read_spec(tmp_path / "out")
    assert spec.layers == 6
    assert spec.states is not None
    assert spec.states.layers == (0, 1, 3, 4)


def per_layer_count(writer: GGUFWriter, each: list[int]) -> None:
    del writer.kv_data[0][gguf.Keys.Attention.HEAD_COUNT_KV.format(arch="granite")]
    writer.add_head_count_kv(each)


@pytest.mark.parametrize(
    ("each", "found"),
    [([2, 2], None), ([2, 0], UnsupportedModel), ([0, 0], BadModelFile)],
    ids=str,
)
def test_kv_heads_may_be_stated_per_layer_if_equal(
    each: list[int], found: type[Exception] | None, tmp_path: Path
) -> None:
    model = random_model("granite")
    edit = partial(per_layer_count, each=each)
    path = write(tmp_path / "m.gguf", "granite", model, edit=edit)
    if found is None:
        convert(path, tmp_path / "out", False)
        assert read_spec(tmp_path / "out").kv_heads == 2
    else:
        with pytest.raises(found, match="head_count_kv"):
            convert(path, tmp_path / "out", False)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("jamba", "Mamba"),
        ("deepseek2", "multi-head latent attention"),
        ("glm4moe", "routes to experts by biased scores"),
    ],
)
def test_unsupported_architecture_is_refused_with_an_alternative(
    architecture: str, why: str, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=rf"{architecture}.* it .*{why}.* supported;"):
        convert(tmp_path / "m.gguf", tmp_path / "out", False)


def test_longrope_length_is_that_of_the_short_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    path = write(tmp_path / "m.gguf", "phi4-mini", random_model("phi4-mini"))
    model = load_model(str(path), dtype="float32")
    assert model.spec.max_positions == 128
    assert model.session().max_kv_size == 128
    with pytest.raises(InvalidArgument, match=r"1 to 128.*longrope.*frequencies.*self_extend"):
        model.session(max_kv_size=129)
