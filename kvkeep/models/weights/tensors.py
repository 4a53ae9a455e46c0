"""A model's tensors: memory-mapped reading from safetensors files, and checks."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.layers.gemma import PER_LAYER_TABLE
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.layers.primitives import EMBEDDING, LM_HEAD
from kvkeep.models.spec.config_fields import read_json
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.spec.state_layers import is_float32_weight
from kvkeep.runtime.signals import interrupts_deferred

_ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_MXFP4_ENDINGS = ("_blocks", "_scales")
_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def read_tensors(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, Tensor]:
    """Read the wanted tensors of a model, by Hugging Face name.

    A tensor that is stored in `dtype` and stays on the CPU is a view of the mapped file: it is read
    on first use, and processes share the memory.

    dtype: of all but a few small ones; see `is_float32_weight`.

    Raises BadModelFile naming the file that is missing, empty, truncated or not safetensors.
    """
    names_by_file = {
        path: list(filter(is_wanted, names)) for path, names in _names_by_file(folder).items()
    }
    tensors: dict[str, Tensor] = {}
    with tqdm(
        total=sum(len(names) for names in names_by_file.values()),
        desc="loading weights",
        unit=" tensors",
        disable=None if progress else True,
        leave=False,
    ) as bar:
        for path, names in names_by_file.items():
            with _open_safetensors(path) as file:
                for name in names:
                    tensor = _read_tensor(file, path, name)
                    target_dtype = dtype if tensor.is_floating_point() else tensor.dtype  # MXFP4
                    if is_float32_weight(name):
                        target_dtype = torch.float32
                    tensors[name] = tensor.to(device=device, dtype=target_dtype)
                    bar.update()
    return tensors


def read_shapes(
    folder: Path, is_wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, tuple[int, ...]]:
    """Read the shape of each tensor from the files' headers.

    is_wanted: whether a tensor will be read; the dtype of others does not matter.

    Raises BadModelFile, and UnsupportedModel for a wanted tensor that is not of floats.
    """
    shapes = {}
    for path, names in _names_by_file(folder).items():
        with _open_safetensors(path) as file:
            for name in names:
                try:
                    entry = file.get_slice(name)
                except SafetensorError as error:
                    raise _missing_error(path, name, error) from error
                if is_wanted(name) and not _is_readable(name, entry.get_dtype()):
                    raise UnsupportedModel(
                        f"{path}: {name} has the dtype {entry.get_dtype()}, and config.json has no "
                        "quantization_config that says how to read it: use the model's bf16 "
                        "safetensors or a .gguf file"
                    )
                shapes[name] = tuple(entry.get_shape())
    return shapes


def weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files that belong to a folder. Raises BadModelFile."""
    has_index = (folder / _INDEX_FILE).exists()
    return sorted(set(_indexed_files(folder).values())) if has_index else [_SINGLE_FILE]


def is_router(name: str) -> bool:
    """Whether a matrix routes tokens to experts. It is never quantised: errors change experts."""
    return name.endswith(_ROUTERS)


def check_tensors(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Check that the tensors are those of the model that `spec` describes.

    Raises BadModelFile if one is missing or has another shape, and UnsupportedModel for one that
    the forward pass would not use. source: for messages.
    """
    requirement, minimum = f"{spec.layers} layers", spec.layers
    if minimum <= len(shapes) and any(map(spec.has_experts, range(spec.layers))):
        requirement, minimum = f"{requirement} and {spec.experts} experts", spec.experts
    if minimum > len(shapes):  # checked before that many names are generated
        raise BadModelFile(
            f"{source} has {len(shapes)} tensors in all, too few for the {requirement} in "
            "config.json; fetch the model again"
        )
    expected = tensor_shapes(spec)
    if spec.tied_head and LM_HEAD in shapes:  # a copy of the embedding: see `check_head`
        expected[LM_HEAD] = expected[EMBEDDING]
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise BadModelFile(
            f"{source} lacks {len(missing)} of the {len(expected)} tensors of a "
            f"{spec.architecture}, among them {', '.join(missing[:3])}; fetch the model again"
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise BadModelFile(
                f"{source}: {name} has shape {list(shapes[name])}, and config.json needs "
                f"{list(shape)}; weights and config belong to different models: fetch it again"
            )
    # Tables of RoPE frequencies repeat the config.
    unused = [name for name in shapes if name not in expected and "rotary_emb" not in name]
    if unused:
        raise UnsupportedModel(
            f"{source} has {len(unused)} tensors that a {spec.architecture} does not use, among "
            f"them {', '.join(unused[:3])}: it is another kind of model"
        )


def check_head(spec: ModelSpec, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Raise UnsupportedModel if a tied head differs from the embedding. source: for messages."""
    head = tensors.get(LM_HEAD)
    if spec.tied_head and head is not None and not torch.equal(head, tensors[EMBEDDING]):
        raise UnsupportedModel(
            f"{source} has {LM_HEAD}, but its config.json ties the head to the embedding: if "
            f'{LM_HEAD} is right, set "tie_word_embeddings" to false there'
        )


def step_matrices(spec: ModelSpec) -> list[str]:
    """Return the matrices that a decode step reads, by name: the first experts stand for any."""

    def is_read(name: str) -> bool:
        match = re.search(r"\.mlp\.experts\.(\d+)\.", name)
        return match is None or int(match.group(1)) < spec.experts_per_token

    return list(filter(is_read, matrix_shapes(spec)))


def matrix_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the shapes of the matrices that a decode step multiplies by; LM_HEAD also if tied."""
    shapes = tensor_shapes(spec)
    shapes[LM_HEAD] = shapes.pop(EMBEDDING)
    shapes.pop(PER_LAYER_TABLE, None)  # read by lookup
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}


def _names_by_file(folder: Path) -> dict[Path, list[str]]:
    """Return the names of the tensors in each safetensors file of a model."""
    single_path, index_path = folder / _SINGLE_FILE, folder / _INDEX_FILE
    if single_path.exists():
        with _open_safetensors(single_path) as file:
            return {single_path: list(file.keys())}
    if not index_path.exists():
        raise BadModelFile(
            f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; kvkeep reads weights from "
            "safetensors or a .gguf file: fetch the model in one of these formats"
        )
    names_by_file: dict[Path, list[str]] = {}
    for name, file_name in _indexed_files(folder).items():
        names_by_file.setdefault(folder / file_name, []).append(name)
    return names_by_file


def _indexed_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index of a folder states. Raises BadModelFile."""
    path = folder / _INDEX_FILE
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModelFile(f"{path} has no weight_map; fetch the model again")
    return {name: str(file_name) for name, file_name in weight_map.items()}


def _read_tensor(file: safe_open, path: Path, name: str) -> Tensor:
    try:
        with interrupts_deferred():  # torch would turn a Ctrl-C into another error
            tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor
    except SafetensorError as error:
        raise _missing_error(path, name, error) from error


def _missing_error(path: Path, name: str, error: SafetensorError) -> BadModelFile:
    return BadModelFile(f"{path} does not contain {name} ({error}); fetch the model again")


def _is_readable(name: str, dtype: str) -> bool:
    """Whether a tensor is of floats, or of MXFP4's bytes. dtype: its safetensors name."""
    return dtype in _FLOATS or (dtype == "U8" and name.endswith(_MXFP4_ENDINGS))


def _open_safetensors(path: Path) -> safe_open:
    """Open a safetensors file, with its header checked against its length."""
    try:
        if path.stat().st_size == 0:
            raise BadModelFile(f"{path} is empty; fetch the model again")
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise BadModelFile(
            f"{path} is truncated, corrupt or not a safetensors file ({error}); "
            "fetch the model again"
        ) from error
    except OSError as error:
        raise BadModelFile(
            f"{path} cannot be read ({error.strerror or error}); fetch the model again"
        ) from error
