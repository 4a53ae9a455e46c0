"""The files of an engine: pins and answers of an earlier one are loaded, and changes are saved."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from kvkeep.engine.answer_files import AnswerLog
from kvkeep.engine.pin_files import PinFiles
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.saving import SessionSaver

_log = logging.getLogger("kvkeep.engine")


class EngineFiles:
    """Saves sessions and pins while an engine runs, and loads pins and answers of an earlier one.

    Used in the engine's thread.
    """

    def __init__(
        self,
        registry: SessionRegistry,
        folder: Path | None,
        keeps_answers: bool,
        post: Callable[[Callable[[], None]], object],
    ):
        """folder: of sessions; None for no folder. keeps_answers: whether a log in the folder has
        the answers of all chats. post: runs a function in the engine's thread."""
        disk, self._disk = registry.disk, registry.disk
        self._save_idle_after = registry.policy.limits.save_idle_after
        self.saver = SessionSaver(registry, post)
        if folder is not None and keeps_answers:
            AnswerLog(disk.written, folder / "answers.jsonl", disk.model, disk.writer).load()
        self.pins = None if folder is None else PinFiles(registry, folder, post)
        if self.pins is not None:
            self.pins.load()

    def save_changed(self) -> None:
        """Begin to save an idle session and a pinned one, if they have changed and it is time."""
        saves = [lambda: self.saver.save_idle(self._save_idle_after)]
        if self.pins is not None:
            saves.append(self.pins.save_changed)
        call_each(saves)

    def close(self) -> None:
        """Save all changes and unlock all files, however much of it fails.

        What cannot be made again is saved first, in case the process is killed meanwhile.
        """
        saves = [self.saver.save_all, *([self.pins.save_all] if self.pins else [])]
        call_each([*saves, self.saver.close, self._disk.close])


def call_each(functions: Iterable[Callable[[], None]]) -> None:
    """Call functions, all of them: an error of one is logged."""
    for function in functions:
        try:
            function()
        except Exception:
            _log.exception("an engine could not save or end all that it should")
