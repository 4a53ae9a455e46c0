"""The runs: which session evaluates how many tokens, and when it is measured, saved and killed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gguf_shapes import Shape, States
from kvkeep import Calibration, Model, Session, calibrate, load_calibration, load_model

ARCHIVE_TOKENS = 1_000_000  # an archive takes twice as long for a token
SHORT_TOKENS = 500_000  # of runs with random weights
CALIBRATION_TOKENS = 12_000
# Converted shapes of known models, narrow enough for half a million tokens on a CPU.
SHAPES = {
    "qwen35": Shape(
        *(512, 1536, 8, 8, 2, 64, 8192, True, "qwen35"),
        rotated=0.25,
        states=States((3, 7), conv_width=4, heads=8, head_dim=64),
    ),
    "gemma3": Shape(512, 1536, 12, 8, 2, 64, 8192, True, "gemma3", window=256),
}


@dataclass(frozen=True)
class Plan:
    """Sizes in tokens.

    step: evaluated at once. window: measured together. reference_from: tokens of a window that are
    not scored in a comparison with a fresh session, which has not filled its cells before.
    reference_every: in windows. kill_every: in tokens; a multiple of the window.
    """

    window: int = 20_000
    step: int = 1000
    reference_from: int = 4000
    reference_every: int = 10
    kill_every: int = 200_000


@dataclass(frozen=True)
class Run:
    """One session. model: a name as for `kvkeep generate`, or one of `SHAPES`. settings: of it."""

    name: str
    model: str
    settings: Mapping[str, Any]
    tokens: int
    plan: Plan

    @property
    def is_random(self) -> bool:
        return self.model in SHAPES

    @property
    def text_name(self) -> str:
        """The name of the stored token ids: one for each tokenizer."""
        return f"{self.model if self.is_random else 'text'}-{self.tokens}"


def all_runs(model: str, tokens: int, plan: Plan) -> dict[str, Run]:
    """Return the runs by name, in their order."""
    archived, short = min(tokens, ARCHIVE_TOKENS), min(tokens, SHORT_TOKENS)
    runs = (
        Run("sliding-512", model, {"max_kv_size": 512}, tokens, plan),
        Run("sliding-1024", model, {"max_kv_size": 1024}, tokens, plan),
        Run("archive-1024", model, {"max_kv_size": 1024, "policy": "archive"}, archived, plan),
        Run("hybrid-1024", "qwen35", {"max_kv_size": 1024}, short, plan),
        Run("local-1024", "gemma3", {"max_kv_size": 1024}, short, plan),
    )
    return {run.name: run for run in runs}


def open_model(run: Run, folder: Path) -> Model:
    """Load the model of a run; random weights are written to the folder if they are not there."""
    if not run.is_random:
        return load_model(run.model, dtype="bfloat16")
    path = folder / f"{run.model}.gguf"
    if not path.exists():
        from benchmarks.random_gguf import write

        partial = path.with_suffix(".partial")
        write(partial, SHAPES[run.model], "BF16")
        partial.rename(path)
    return load_model(str(path), dtype="bfloat16")


def stored_calibration(
    run: Run, model: Model, folder: Path, ids: NDArray[np.uint32]
) -> Calibration | None:
    """Return the calibration of an archive, made of the text's first tokens and stored; or None."""
    if run.settings.get("policy") != "archive":
        return None
    path = folder / "archive.kvcal"
    if not path.exists():
        calibrate(model, ids[:CALIBRATION_TOKENS].tolist()).save(path)
    return load_calibration(path, model)


def new_session(run: Run, model: Model, calibration: Calibration | None) -> Session:
    """Return a new session of a run."""
    return model.session(prefill_step=run.plan.step, calibration=calibration, **run.settings)
