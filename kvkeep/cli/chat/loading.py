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
from typing import TYPE_CHECKING, NoReturn, TypeVar

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
    loading = _in_thread(call)
    try:
        goes_on = reader.read_during(loading, status)
    except KeyboardInterrupt:
        raise LoadingAbandoned(128 + (termination_signal() or signal.SIGINT)) from None
    if not goes_on:
        raise LoadingAbandoned(0)
    return loading.result()


def _in_thread(call: Callable[[], _Result]) -> "Future[_Result]":
    """Start a call in a thread, with the options of the command that is running."""
    future, context = Future[_Result](), click.get_current_context()

    def run() -> None:
        try:
            with context.scope(cleanup=False):  # click's current context is one of each thread
                result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="kvkeep chat", daemon=True).start()
    return future
