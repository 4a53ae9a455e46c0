"""Measurement of a grid, sample by sample, each written to the file immediately."""

import itertools
from pathlib import Path
from typing import Never

from tqdm import tqdm

from kvkeep import Model
from kvkeep.cli.evaluate.grid_choice import GridChoice
from kvkeep.cli.evaluate.options import ModelChoice
from kvkeep.evaluate.facts import Samples
from kvkeep.evaluate.grid import Grid, GridPlan, read_sample
from kvkeep.evaluate.haystack import TEXTS, Haystack
from kvkeep.storage.files.atomic import write_json


def measure_grid(
    model: Model,
    grid: Grid,
    grid_choice: GridChoice,
    passkeys: dict[str, Samples],
    choice: ModelChoice,
    out: Path | None,
    progress: bool,
) -> None:
    """Add the missing readings to `grid`, one sample of each task in turn.

    An interrupted run has therefore measured about as many samples of each task.
    passkeys: the tasks whose samples need no tokenizer. out: the file, written after each sample.
    """
    drawn = dict(passkeys)
    if any(name not in passkeys for name in grid_choice.tasks):
        drawn |= grid_choice.text_tasks(_haystack(model, grid_choice.haystack))
    tasks = {name: drawn[name] for name in grid_choice.tasks}
    plan = GridPlan(tasks, grid_choice.methods, grid_choice.ratios, grid_choice.seed)
    calibration = choice.calibrated(model)
    bar: tqdm[Never]
    with tqdm(
        total=grid_choice.samples * len(tasks),
        desc="measuring",
        unit=" samples",
        leave=False,
        disable=None if progress else True,
    ) as bar:
        for index, task in itertools.product(range(grid_choice.samples), tasks):
            if missing := plan.missing(grid, task, index):
                sample = tasks[task].sample(index)
                try:
                    for reading in read_sample(
                        model,
                        sample,
                        missing,
                        calibration,
                        choice.prefill_step,
                        grid_choice.kv_bits,
                    ):
                        grid.add(reading)
                finally:
                    write_json(out, grid.as_json())
            bar.update(1)


def _haystack(model: Model, name: str) -> Haystack:
    return Haystack.of(TEXTS[name](), lambda text: len(model.text.encode(text)))
