"""Each family's logits equal transformers', on checkpoints that transformers wrote."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from models.family_checkpoints import TOKENS, open_model, write_checkpoint
from models.family_configs import FAMILIES, SMALL
from reference import streaming_logits
from safetensors.torch import load_file, save_file
from topics import topic_ids
from torch import Tensor

from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.network import Network
from kvkeep.models.spec.config import read_spec
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.weights.checkpoint import decoder_tensors
from kvkeep.models.weights.export import export
from kvkeep.models.weights.tensors import read_shapes, read_tensors

BEYOND_LLAMA = ["granite", "granite4-dense", "olmo2", "glm", "glm4", "phi4-mini", "cohere"]
LOCAL = [
    "gemma2",
    "gemma3-two-ropes",
    "cohere2",
    "exaone4",
    "olmo3-yarn",
    "smollm3",
    "smollm3-local",
    "smollm3-local-yarn",
    "exaone4-yarn",
    "gemma4",
    "gemma3n",
    "gemma3n-as-published",
    "gemma4-experts",
    "gemma4-experts-shared",
]
STATES = [
    "granite4-h-experts",
    "bamba",
    "falcon-h1",
    "nemotron-h",
    "nemotron-h-experts",
    "lfm2",
    "lfm2-moe",
    "qwen3.5",
    "qwen3-next",
]
MIXTURES = ["mixtral", "qwen3-moe-alternating", "qwen2-moe", "olmoe", "granite-moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, smollm2_folder: Path, family: str) -> None:
    reference = write_checkpoint(tmp_path, family)
    model = open_model(tmp_path, TextCodec.open(smollm2_folder))
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.1  # not a flat distribution, which anything would match

    largest = expected.abs().max()  # sums over a state of all tokens round more
    most = 1e-4 * (largest if model.spec.states else min(1, largest))
    whole = model.session(policy="full")
    whole.feed(TOKENS)
    assert (whole.logits - expected[-1]).abs().max() <= most

    stepwise, logits, ends = model.session(policy="full"), [], []
    for count in [1] * 4 + [7] * 18 + [1] * 20:
        first = ends[-1] if ends else 0
        stepwise.feed(TOKENS[first : first + count])
        logits.append(stepwise.logits)
        ends.append(first + count)
    assert ends[-1] == len(TOKENS)
    assert (torch.stack(logits) - expected[[end - 1 for end in ends]]).abs().max() <= most


@pytest.mark.extended
@pytest.mark.parametrize("family", STATES)
def test_long_prompts_in_any_steps_equal_transformers(
    tmp_path: Path, smollm2_folder: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SMALL, "max_position_embeddings", 1024)
    reference = write_checkpoint(tmp_path, family)
    model = open_model(tmp_path, TextCodec.open(smollm2_folder))
    tokens = [(17 * i * i + 5 * i) % 320 for i in range(700)]
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    for step in (64, 512, 700):
        session, logits = model.session(1024, policy="full", prefill_step=step), []
        ends = [min(first + step, len(tokens)) for first in range(0, len(tokens), step)]
        for first, end in zip((0, *ends), ends, strict=False):
            session.feed(tokens[first:end])
            logits.append(session.logits)
        errors = torch.stack(logits) - expected[[end - 1 for end in ends]]
        assert errors.abs().max() <= 1e-4 * expected.abs().max()


class BlindStep:
    """A step in which queries see no cells."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        return torch.zeros_like(q).flatten(1)


@pytest.mark.parametrize("family", ["gemma3", "qwen3.5"])
def test_loading_imports_no_compiler_of_torch(tmp_path: Path, family: str) -> None:
    """torch._dynamo takes 70 MB, and most of a second of each start."""
    write_checkpoint(tmp_path, family)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from kvkeep.models.layers.network import tensor_shapes\n"
        "from kvkeep.models.spec.config import read_spec\n"
        "tensor_shapes(read_spec(Path(sys.argv[1])))\n"
        "print({'torch._dynamo', 'torch._inductor', 'sympy'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_bfloat16_rounding_of_embeddings_and_norms_equals_transformers(
    tmp_path: Path, family: str
) -> None:
    """Neither sqrt(96) nor 1 + a weight is exact in bfloat16."""
    reference = write_checkpoint(tmp_path, family).to(torch.bfloat16)
    spec = read_spec(tmp_path)
    whole = read_tensors(tmp_path, torch.bfloat16, torch.device("cpu"), progress=False)
    model = Network(spec, decoder_tensors(spec, whole))
    tokens, lengths = torch.tensor(TOKENS), torch.empty(spec.layers, len(TOKENS))
    with torch.no_grad():
        model.forward(tokens, BlindStep(), lengths)
        embedded = reference.model.embed_tokens(tokens)
        assert torch.equal(lengths[0], embedded.float().norm(dim=-1))
        assert torch.equal(model.norm(embedded), reference.model.norm(embedded))


@pytest.mark.parametrize("family", ["gemma3n", "gemma3n-as-published"])
def test_bfloat16_streams_are_as_close_to_float32_as_transformers(
    tmp_path: Path, smollm2_folder: Path, family: str
) -> None:
    reference = write_checkpoint(tmp_path, family)
    spec = read_spec(tmp_path)
    whole = read_tensors(tmp_path, torch.bfloat16, torch.device("cpu"), progress=False)
    decoder = Decoder(spec, decoder_tensors(spec, whole))
    model = Model("small", tmp_path, decoder, TextCodec.open(smollm2_folder))
    session, logits = model.session(policy="full"), []
    tokens = TOKENS[:75]
    for token in tokens:
        session.feed([token])
        logits.append(session.logits)
    with torch.no_grad():
        rounded = reference.to(torch.bfloat16)(torch.tensor([tokens])).logits[0].float()
        exact = reference.float()(torch.tensor([tokens])).logits[0]  # of the same, rounded weights
    error = (torch.stack(logits) - exact).square().mean().sqrt()
    assert error <= 1.1 * (rounded - exact).square().mean().sqrt()


def test_layers_with_shared_cells_need_no_key_weights(tmp_path: Path, smollm2_folder: Path) -> None:
    """The files on the hub contain such weights nevertheless."""
    write_checkpoint(tmp_path, "gemma4")
    text, logits = TextCodec.open(smollm2_folder), []
    tensors = load_file(tmp_path / "model.safetensors")
    for _ in range(2):
        session = open_model(tmp_path, text).session(policy="full")
        session.feed(TOKENS)
        logits.append(session.logits)
        for name in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.8.self_attn.{name}.weight"] = torch.ones(5)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(*logits)


@pytest.mark.parametrize("family", MIXTURES)
def test_stacked_experts_equal_separate_experts(
    tmp_path: Path, smollm2_folder: Path, family: str
) -> None:
    """transformers can save the stacks as it has them in memory.

    Equal up to rounding: the order of summation depends on the alignment of a matrix in memory.
    """
    text = TextCodec.open(smollm2_folder)
    write_checkpoint(tmp_path / "apart", family).save_pretrained(
        tmp_path / "stacks", save_original_format=False
    )
    stacks = [name for name in read_shapes(tmp_path / "stacks") if name.endswith("gate_up_proj")]
    assert stacks
    logits = []
    for folder in ("apart", "stacks"):
        session = open_model(tmp_path / folder, text).session(policy="full")
        session.feed(TOKENS)
        logits.append(session.logits)
    separate, stacked = logits
    assert (stacked - separate).abs().max() <= 1e-5 * separate.abs().max()


@pytest.mark.parametrize("family", [*BEYOND_LLAMA, *MIXTURES, *LOCAL, *STATES])
def test_bounded_logits_equal_the_naive_reference(
    tmp_path: Path, smollm2_folder: Path, family: str
) -> None:
    write_checkpoint(tmp_path, family)
    model = open_model(tmp_path, TextCodec.open(smollm2_folder))
    tokens, size = TOKENS[:76], 32
    expected = streaming_logits(model.decoder, tokens, max_kv_size=size, keep=4, last=24)
    for prefill_step, single in ((7, 24), (512, 3)):
        session = model.session(size, 4, prefill_step=prefill_step)
        session.feed(tokens[:-single])
        logits = [session.logits]
        for token in tokens[-single:]:
            session.feed([token])
            logits.append(session.logits)
        assert session.cache.cells == size
        errors = torch.stack(logits[1:]) - expected[-single:]
        assert errors.abs().max() <= 1e-4 * expected.abs().max()


def test_converted_model_equals_transformers_on_the_same_weights(
    smollm2_folder: Path, smollm2_fp32: Model, tmp_path: Path
) -> None:
    export(smollm2_folder, tmp_path / "out", torch.float32)
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = topic_ids(smollm2_fp32)[:300]
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0, -3:]
    session = smollm2_fp32.session(policy="full", prefill_step=128)
    session.feed(tokens[:-2])
    logits = [session.logits]
    for token in tokens[-2:]:
        session.feed([token])
        logits.append(session.logits)
    assert (torch.stack(logits) - expected).abs().max() <= 1e-3  # logits reach 40
