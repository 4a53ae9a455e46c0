"""Opening a chat in the background, while the user types the first message.

Importing torch and loading a model take seconds. Meanwhile a prompt is there already.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

import click

from kvkeep.cli.terminal import termination_signal

if TYPE_CHECKING:
    from kvkeep.cli.chat.message_reader import MessageReader

_Result = TypeVar("_Result")


class LoadingAbandoned(Exception):
    """Raised if the user ended the chat before it was open. status: the exit status."""

    def __init__(self, status: int):
        super().__init__()
        self.status = status

    def exit(self) -> NoReturn:
        """End the process at once: Python's own cleanup would wait for the thread's imports."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(self.status)


def open_while_reading(
    reader: "MessageReader", call: Callable[[], _Result], status: str
) -> _Result:
    """Return `call()`, called in a thread while the user types at the reader's prompt.

    status: shown below the prompt. Raises what the call raises, and LoadingAbandoned.
    """
    loading = _Loading(call)
    try:
        goes_on = reader.read_during(loading.start, status)
    except KeyboardInterrupt:
        raise LoadingAbandoned(128 + (termination_signal() or signal.SIGINT)) from None
    if not goes_on:
        raise LoadingAbandoned(0)
    return loading.future.result()


class _Loading(Generic[_Result]):
    """A call in a thread of its own, with the options of the command that is running."""

    def __init__(self, call: Callable[[], _Result]):
        self.future = Future[_Result]()
        self._call, self._context = call, click.get_current_context()

    def start(self) -> "Future[_Result]":
        threading.Thread(target=self._run, name="kvkeep chat", daemon=True).start()
        return self.future

    def _run(self) -> None:
        try:
            with self._context.scope(cleanup=False):  # each thread has a current context
                result = self._call()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
