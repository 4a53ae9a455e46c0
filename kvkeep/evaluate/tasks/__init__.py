"""What may be hidden in a real text and asked for: RULER's tasks (arXiv:2404.06654), and ours."""

from kvkeep.evaluate.tasks.counted import Counted
from kvkeep.evaluate.tasks.needles import MultiValue, Needles
from kvkeep.evaluate.tasks.reworded import Reworded
from kvkeep.evaluate.tasks.task import Posed, Task
from kvkeep.evaluate.tasks.variables import Variables
from kvkeep.evaluate.words import CODE_WORDS, WORDS

TASKS: dict[str, Task] = {
    "single": Needles(hidden=1, asked=1),
    "several": Needles(hidden=4, asked=1, same_thing=True),  # RULER's multi-key
    "second": Needles(hidden=2, asked=2),
    "multivalue": MultiValue(values=3),
    "multiquery": Needles(hidden=4, asked=4),
    "variables": Variables(hops=2),
    "common": Counted(WORDS, times=(5, 5, 5, *[1] * 10), name="word"),
    "frequent": Counted(CODE_WORDS, times=(12, 8, 6, 2, 1, 1), name="code word"),
    "reworded": Reworded(),
}

__all__ = ["TASKS", "Posed", "Task"]
