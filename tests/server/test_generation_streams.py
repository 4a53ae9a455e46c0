"""Streams of generations, apart from a server."""

import asyncio
import gc
from typing import Any

from kvkeep.engine import Generation
from kvkeep.errors import NoRoom
from kvkeep.server.service import GenerationStream


def test_a_refused_admission_that_is_not_awaited_is_no_error_of_the_loop() -> None:
    problems: list[dict[str, Any]] = []

    async def refuse() -> list[Generation]:
        await asyncio.sleep(0.02)
        raise NoRoom("too many requests", retry_after=1.0)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, problem: problems.append(problem)
        )
        stream = GenerationStream(1)
        await stream.start(refuse(), patience=0)
        await asyncio.sleep(0.1)
        del stream
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert not problems
