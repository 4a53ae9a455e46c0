"""The state of a run, in a file that is replaced after each window."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak4m.runs import Run
from kvkeep.errors import InvalidArgument


@dataclass(frozen=True)
class Window:
    """tokens: evaluated by its end. perplexity: of all its tokens, but the first of the text.

    cpu_ms: CPU time of the process per token, in all threads. life_windows: since the process
    started, this one included. rss_bytes: of the process at the end of the window. compared,
    fresh: perplexity of the window's later tokens, and the same of a new session that was fed
    this window alone; None for a window without a comparison.
    """

    tokens: int
    perplexity: float
    cpu_ms: float
    life_windows: int
    rss_bytes: int
    kv_bytes: int
    cells: int
    snapshot_bytes: int
    compared: float | None = None
    fresh: float | None = None


@dataclass(frozen=True)
class Restored:
    """A process that continued another's. same_logits: of the restored session and the saved one.

    same_next: of the step after it, where the killed process had gone on; None where it had not.
    """

    tokens: int
    same_logits: bool
    same_next: bool | None


@dataclass
class State:
    """Progress of a run, kept in a file. logits, next_logits: digests at the snapshot.

    next_logits: after one more step; None if the process did not get there. lives: processes.
    machines: of each life; None for those of earlier versions, which did not record it.
    """

    run: dict[str, object]
    tokens: int = 0
    logits: str | None = None
    next_logits: str | None = None
    lives: int = 0
    windows: list[Window] = field(default_factory=list)
    restored: list[Restored] = field(default_factory=list)
    machines: list[dict[str, Any] | None] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, run: Run) -> "State":
        """Return the state in a file, or a new one. Raises InvalidArgument for another run's."""
        definition = json.loads(json.dumps(asdict(run)))
        if not path.exists():
            return cls(definition)
        saved = json.loads(path.read_bytes())
        if saved["run"] != definition:
            raise InvalidArgument(
                f"{path} is of a run with other settings; expected {definition}, found "
                f"{saved['run']}: take another --folder"
            )
        saved["windows"] = [Window(**window) for window in saved["windows"]]
        saved["restored"] = [Restored(**restored) for restored in saved["restored"]]
        saved.setdefault("machines", [None] * saved["lives"])
        return cls(**saved)

    @property
    def is_complete(self) -> bool:
        return self.tokens >= int(str(self.run["tokens"]))
