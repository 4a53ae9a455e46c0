"""Logits of models with state layers against those that llama.cpp computes from the same files.

Needs a Python with llama-cpp-python: this one, or the program that `KVKEEP_LLAMA_PYTHON` names.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from models import test_gguf_experts, test_gguf_families

from kvkeep import load_model

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gguf_fuzz_llama.py"
PYTHON = os.environ.get("KVKEEP_LLAMA_PYTHON") or (
    sys.executable if importlib.util.find_spec("llama_cpp") else ""
)
# Longer than a chunk of a state layer's prompt.
TOKENS = [(17 * i * i + 5 * i) % 250 for i in range(150)]
ENDS = (1, 60, 70, 140, 149, 150)
KINDS = {
    **dict.fromkeys(("lfm2", "lfm2-untied", "granite4-h"), test_gguf_families),
    **dict.fromkeys(("falcon-h1", "falcon-h1-norms", "nemotron-h"), test_gguf_families),
    **dict.fromkeys(("qwen3.5", "qwen3.5-heads-alike"), test_gguf_families),
    "lfm2moe experts": test_gguf_experts,
    "granite4-h experts": test_gguf_experts,
    "nemotron-h experts": test_gguf_experts,
    "nemotron-h-latent experts": test_gguf_experts,
    "qwen3.5-moe experts": test_gguf_experts,
    "qwen3-next experts": test_gguf_experts,
}
# llama.cpp 0.3.36 rotates other rows of a Bamba than its converter puts in front, so its logits are
# not the model's.

# llama.cpp rounds the input of a product to the type of the matrix. Experts would differ more: the
# router may choose others.
ROUNDED = [
    *((kind, Type.F16, 1e-2) for kind in KINDS if "experts" not in kind),
    *((kind, Type.Q8_0, 0.2) for kind in KINDS if "experts" not in kind),
]

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not PYTHON, reason="llama-cpp-python is not installed"),
]


class LlamaCpp:
    """llama.cpp in a process of its own, which is started again after it has ended."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def logits(self, path: Path) -> torch.Tensor:
        """Return the logits of all TOKENS, `[n, vocabulary]`."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [PYTHON, str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self._folder / "log.txt").open("w"),
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out = self._folder / "logits.npy"
        job = {"path": str(path), "tokens": TOKENS, "out": str(out)}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, (self._folder / "log.txt").read_text(errors="replace")[-2000:]
        assert json.loads(answer)["error"] is None
        return torch.from_numpy(np.load(out))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCpp]:
    process = LlamaCpp(tmp_path_factory.mktemp("llama"))
    yield process
    process.close()


def difference(kind: str, stored: Type, llama: LlamaCpp, folder: Path) -> float:
    """Return the largest difference between logits, relative to the largest logit."""
    writer, name = KINDS[kind], kind.removesuffix(" experts")
    path = writer.write(folder / "m.gguf", name, writer.random_model(name), stored)
    session, logits = load_model(str(path), dtype="float32").session(policy="full"), []
    for first, end in zip((0, *ENDS), ENDS, strict=False):
        session.feed(TOKENS[first:end])
        logits.append(session.logits)
    expected = llama.logits(path)[[end - 1 for end in ENDS]]
    found = torch.stack(logits)
    return float((found - expected[:, : found.shape[1]]).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_state_layers_equal_llama_cpp(
    kind: str, llama: LlamaCpp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    assert difference(kind, Type.F32, llama, tmp_path) <= 1e-4


@pytest.mark.parametrize(("kind", "stored", "most"), ROUNDED)
def test_logits_of_rounded_weights_are_close_to_llama_cpp(
    kind: str,
    stored: Type,
    most: float,
    llama: LlamaCpp,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    assert difference(kind, stored, llama, tmp_path) <= most
