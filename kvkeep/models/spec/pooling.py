"""The pooling of an embedding model: hidden states of a text to one vector.

Such a model's folder has modules.json and the config of a pooling module, as sentence-transformers
writes them; GGUF files state `pooling_type`, which is converted to the same files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_fields import read_json

MODULES_FILE, POOLING_FOLDER = "modules.json", "1_Pooling"
_GGUF_MODES = {1: "mean", 3: "last"}
_MODES: Mapping[str, Literal["mean", "last"]] = {"mean": "mean", "lasttoken": "last"}
_CAUSAL_ONLY = (
    "the model's attention is bidirectional ({}), and kvkeep computes causal attention only"
)


@dataclass(frozen=True)
class Pooling:
    """A text's vector: the mean of its tokens' hidden states, or that of the last token.

    normalized: whether vectors have length 1.
    """

    mode: Literal["mean", "last"]
    normalized: bool


def read_pooling(folder: Path) -> Pooling:
    """Read the pooling of the model in `folder`.

    Raises UnsupportedModel if it has none, or one that is not supported; BadModelFile.
    """
    path = folder / MODULES_FILE
    if not path.exists():
        raise UnsupportedModel(
            f"the model was not made for embeddings: expected {MODULES_FILE} and "
            f"{POOLING_FOLDER}/config.json in its folder, or pooling_type in its GGUF file, found "
            "neither; use an embedding model, such as Qwen3-Embedding-0.6B"
        )
    config = read_json(folder / "config.json")
    is_bidirectional = {
        "is_causal": config.get("is_causal") is False,
        "use_bidirectional_attention": bool(config.get("use_bidirectional_attention")),
    }
    if fields := [field for field, is_stated in is_bidirectional.items() if is_stated]:
        raise UnsupportedModel(_CAUSAL_ONLY.format(" and ".join(fields)))
    modules = [(str(module.get("type", "")).split(".")[-1], module) for module in _modules(path)]
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise UnsupportedModel(
            f"{path.name} must list a Transformer, a Pooling and at most a Normalize module; found "
            f"{', '.join(kinds)}"
        )
    pooling_folder = modules[1][1].get("path", POOLING_FOLDER)
    pooling_config = read_json(folder / str(pooling_folder) / "config.json")
    return Pooling(_mode(pooling_config), kinds[2:] == ["Normalize"])


def _modules(path: Path) -> list[Mapping[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} cannot be read ({error}); fetch the model again") from error
    if not isinstance(modules, list) or not all(isinstance(entry, dict) for entry in modules):
        raise BadModelFile(f"{path} must be a list of objects; fetch the model again")
    return modules


def _mode(config: Mapping[str, Any]) -> Literal["mean", "last"]:
    """Return the mode of a Pooling module's config, which has one flag for each."""
    names = [
        name.removeprefix("pooling_mode_").removesuffix("_tokens")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    if isinstance(single := config.get("pooling_mode"), str):
        names = [single]
    if len(names) != 1 or names[0] not in _MODES:
        raise UnsupportedModel(
            f"the model's pooling must be mean or lasttoken; found {', '.join(names) or 'none'}"
        )
    return _MODES[names[0]]


def pooling_files(gguf_type: int) -> dict[str, Any]:
    """Return the contents of the files for a GGUF file's `pooling_type`, by path; {} for none."""
    if gguf_type not in _GGUF_MODES:
        return {}
    types = ("Transformer", "Pooling", "Normalize")
    paths = ("", POOLING_FOLDER, "2_Normalize")
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (kind, path) in enumerate(zip(types, paths, strict=True))
    ]
    config = {"pooling_mode": "mean" if _GGUF_MODES[gguf_type] == "mean" else "lasttoken"}
    return {MODULES_FILE: modules, f"{POOLING_FOLDER}/config.json": config}
