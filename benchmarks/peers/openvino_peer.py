"""OpenVINO, with a model that OpenVINO GenAI converted from a GGUF file."""

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.peers.base import About, Setup
from benchmarks.peers.openvino_files import openvino_model


class OpenVinoPeer:
    """Runs the model as OpenVINO GenAI does for one sequence: it holds the cells itself.

    With the defaults of its CPU plug-in: on a processor with AMX bfloat16, cells in 8 bits,
    activations rounded to 8 bits in groups of 32. It offers neither eviction nor edits.
    """

    def __init__(self, setup: Setup, file: Path):
        import openvino

        self._library: Any = openvino
        model = openvino.Core().read_model(openvino_model(file))
        _keep_last_row(model)
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": setup.threads}
        self._compiled: Any = openvino.compile_model(model, "CPU", settings)
        self._request: Any = self._compiled.create_infer_request()
        self.close()

    def about(self) -> About:
        names = (
            "INFERENCE_PRECISION_HINT",
            "KV_CACHE_PRECISION",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE",
        )
        settings = (f"{name} {_text(self._compiled.get_property(name))}" for name in names)
        return About(f"openvino {self._library.__version__}", ", ".join(settings))

    def open(self, max_tokens: int, forks: int = 0) -> None:
        self.close()

    def close(self) -> None:
        self._request.reset_state()
        self._tokens: list[int] = []
        self._next = 0

    def read(self, ids: list[int]) -> float:
        start = perf_counter()
        self._evaluate(ids)
        return perf_counter() - start

    def write(self, count: int) -> list[float]:
        return [self.read([self._next]) for _ in range(count)]

    def tokens(self) -> list[int]:
        return [*self._tokens]

    def _evaluate(self, ids: list[int]) -> None:
        held, count = len(self._tokens), len(ids)
        self._request.infer(
            {
                "input_ids": np.array([ids], dtype=np.int64),
                "attention_mask": np.ones((1, held + count), dtype=np.int64),
                "position_ids": np.arange(held, held + count, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            },
            share_inputs=True,
        )
        self._tokens += ids
        self._next = int(self._request.get_output_tensor(0).data[0, -1].argmax())


def _keep_last_row(model: Any) -> None:
    """Let the output head multiply the last row alone, as OpenVINO GenAI does.

    Raises RuntimeError if the model has another head.
    """
    from openvino import opset13

    head = model.get_results()[0].input_value(0).get_node()
    if head.get_type_name() != "MatMul":
        raise RuntimeError(f"its logits come from {head.get_type_name()}, not from a product")
    rows = head.input_value(0)
    first, end, step, axis = (np.array([value]) for value in (-1, np.iinfo(np.int64).max, 1, 1))
    last = opset13.slice(rows, first, end, step, axis)
    head.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


def _text(value: Any) -> str:
    return str(value.get_type_name()) if hasattr(value, "get_type_name") else str(value)
