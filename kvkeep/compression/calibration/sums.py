"""A calibration in the making: sums over the parts of a text that are done, and their file."""

from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.cache.checks import require_finite, require_tensor, require_whole
from kvkeep.compression.calibration.measured import Measured
from kvkeep.compression.calibration.regression import Regression
from kvkeep.errors import CorruptFile, NewerFormat, TruncatedFile
from kvkeep.storage.snapshots.container import read_container, write_container

KIND, FORMAT = "unfinished calibration", 1


class CalibrationSums:
    """done: parts that are in the sums. fitted, held_back: what a surrogate is fitted to, and what
    it is judged by."""

    def __init__(self, layout: Layout):
        width = 2 * layout.head_dim + 1
        self.done = 0
        self.measured = Measured(layout)
        self.fitted, self.held_back = (
            Regression(layout.layers, layout.kv_heads, width) for _ in range(2)
        )

    def tensors(self) -> dict[str, Tensor]:
        every: dict[str, Measured | Regression] = {
            "measured": self.measured,
            "fitted": self.fitted,
            "held_back": self.held_back,
        }
        return {
            f"{whose}.{name}": tensor
            for whose, sums in every.items()
            for name, tensor in sums.tensors().items()
        }

    def save(self, path: Path, of: str) -> None:
        """of: what says which model and text they are of. Raises StoreError."""
        write_container(path, KIND, FORMAT, {"of": of, "done": self.done}, self.tensors())

    @classmethod
    def begun(cls, path: Path, of: str, layout: Layout, parts: int) -> Self:
        """Those that a file holds; none yet where there is no file, or one of something else.

        A file of another model or text is taken for a leaving of a run that nobody goes on with, as
        is one that is damaged. Raises ForeignFile for one that is no such file at all.
        """
        sums = cls(layout)
        if not path.exists():
            return sums
        try:
            container = read_container(path, KIND, FORMAT)
            if container.document["of"] != of:
                return sums
            require_whole("done", container.document["done"], 1, parts)
            for name, tensor in sums.tensors().items():
                found = container.tensors[name]
                require_tensor(name, found, tensor.dtype, *tensor.shape)
                if tensor.dtype != torch.int64:
                    require_finite(name, found)
        except (CorruptFile, TruncatedFile, NewerFormat, LookupError, ValueError):
            return sums
        for name, tensor in sums.tensors().items():
            tensor.copy_(container.tensors[name])
        sums.done = container.document["done"]
        return sums
