"""The samples of a grid measured one after the other, each written down at once."""

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
    asked: GridChoice,
    passkeys: dict[str, Samples],
    choice: ModelChoice,
    out: Path | None,
    progress: bool,
) -> None:
    """Adds to `grid` what it lacks, sample by sample, so that all tasks come equally far.

    passkeys: the tasks that are drawn without the model.
    """
    drawn = dict(passkeys)
    if any(name not in passkeys for name in asked.tasks):
        drawn |= asked.of_text(_haystack(model, asked.haystack))
    tasks = {name: drawn[name] for name in asked.tasks}
    plan = GridPlan(tasks, asked.methods, asked.ratios, asked.seed)
    calibration = choice.calibrated(model)
    bar: tqdm[Never]
    with tqdm(
        total=asked.samples * len(tasks),
        desc="measuring",
        unit=" samples",
        leave=False,
        disable=None if progress else True,
    ) as bar:
        for index, task in itertools.product(range(asked.samples), tasks):
            if missing := plan.missing(grid, task, index):
                sample = tasks[task].sample(index)
                try:
                    for reading in read_sample(
                        model, sample, missing, calibration, choice.prefill_step, asked.kv_bits
                    ):
                        grid.add(reading)
                finally:
                    write_json(out, grid.as_json())
            bar.update(1)


def _haystack(model: Model, name: str) -> Haystack:
    return Haystack.of(TEXTS[name](), lambda text: len(model.text.encode(text)))
