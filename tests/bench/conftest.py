"""A model folder that every peer reads."""

import json
from pathlib import Path

import pytest
from small_models import write_small_folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `write_small_folder` makes it, with the name that transformers and mlx-lm know it by."""
    folder = write_small_folder(tmp_path_factory.mktemp("peers") / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    return folder
