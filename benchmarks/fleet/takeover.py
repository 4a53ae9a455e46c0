"""Delay of an answer whose server is killed in the middle.

    python -m benchmarks.fleet.takeover --out docs/results/fleet_takeover.json

Two servers of one thread each on Ray, with an S3 server on this machine (moto). Repeatedly, the
server that holds a session is killed while it generates; the client repeats the request with the
same idempotency key until the other server answers it.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click
import httpx

from benchmarks.command import Measurement, ResultFile, out_option
from benchmarks.figures import rounded
from benchmarks.fleet.servers import fleet, object_store

ANSWER_TOKENS, KILL_AFTER = 100, 20  # tokens
TEXT = "Once upon a time there was a small town by the sea, in which"


def kill_during_answer(url: str, number: int) -> tuple[float, float, list[int]]:
    """Kill the server of an answer, and repeat the request until another server answers.

    Returns the seconds from the kill to the first token, and to the end; and all tokens.
    """
    name = f"killed-{number}"
    headers = {"x-session-id": name, "Idempotency-Key": f"made {name}"}
    body = {"text": TEXT, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
        client.post("/v1/sessions", json={"name": name}).raise_for_status()
        client.headers["Idempotency-Key"] = f"asked {name}"
        path = f"/v1/sessions/{name}/generate"
        killed_at = 0.0
        try:
            with client.stream("POST", path, json=body) as answer:
                for count, event in enumerate(_events(answer)):
                    if count == KILL_AFTER and event:
                        server = int(answer.headers["x-kvkeep-server"].split(":")[1])
                        killed_at = time.perf_counter()
                        os.kill(server, signal.SIGKILL)
        except httpx.HTTPError:
            pass
        while True:
            first = 0.0
            try:
                with client.stream("POST", path, json=body) as answer:
                    if answer.status_code < 500 and answer.status_code not in (200, 409):
                        raise RuntimeError(answer.read().decode())
                    for kind, data in _events(answer):
                        first = first or time.perf_counter() - killed_at
                        if kind == "done":
                            return first, time.perf_counter() - killed_at, data["tokens"]
            except httpx.HTTPError:
                pass
            time.sleep(0.05)


def _events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


@click.command(cls=Measurement)
@click.option("--rounds", default=6, type=click.IntRange(1))
@out_option
def main(rounds: int, out: Path | None) -> None:
    """Kill servers in the middle of answers, and measure the delay."""
    file = ResultFile(out, written=ANSWER_TOKENS)
    with object_store() as store, fleet(2, store, "--max-kv-size", "512") as url:
        results = list[tuple[float, float, list[int]]]()
        for index in range(rounds):
            results.append(kill_during_answer(url, index))
            click.echo(
                f"first token after {results[-1][0]:.2f} s, all after {results[-1][1]:.2f} s"
            )
            file.write(**summary(results))
            time.sleep(15)  # the replacement loads its model
    click.echo(json.dumps(summary(results)["whole"]))


def summary(results: list[tuple[float, float, list[int]]]) -> dict[str, Any]:
    """Return medians and maxima of `kill_during_answer` over the rounds."""
    return {
        "rounds": len(results),
        "first_token": {
            "median": rounded(median(first for first, _, _ in results)),
            "most": rounded(max(first for first, _, _ in results)),
        },
        "whole": {
            "median": rounded(median(end for _, end, _ in results)),
            "most": rounded(max(end for _, end, _ in results)),
        },
        "equal": all(tokens == results[0][2] for _, _, tokens in results),
    }


if __name__ == "__main__":
    main()
