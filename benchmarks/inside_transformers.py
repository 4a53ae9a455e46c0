"""Time and memory per token of a KvkeepCache in `generate`, against a DynamicCache.

    python -m benchmarks.inside_transformers [--tokens 5000] [--out docs/results/....json]

The default model in bfloat16 generates in 512 cells; between rounds, transformers' own cache
generates some tokens at a context of 512, so that both are measured alternately.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.command import Measurement, ResultFile, out_option
from benchmarks.peers.unpacked import unpacked_folder
from kvkeep.integrations.transformers import KvkeepCache
from kvkeep.models.hub.source import DEFAULT_MODEL, resolve

CELLS, TOKENS_PER_ROUND, DYNAMIC_TOKENS = 512, 500, 40


class TokenTimes:
    """A streamer that records the time of each token."""

    def __init__(self) -> None:
        self.at = [time.perf_counter()]

    def put(self, token: Any) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass

    def each(self) -> list[float]:
        """Return the seconds of each token, without the prompt and the first token."""
        return [b - a for a, b in zip(self.at[2:], self.at[3:], strict=False)]


def generate(
    model: PreTrainedModel, ids: torch.Tensor, cache: Any, count: int
) -> tuple[Any, TokenTimes]:
    """Generate `count` tokens; return all ids and the token times."""
    times = TokenTimes()
    output = model.generate(  # type: ignore[operator]  # torch takes it for a tensor
        ids,
        past_key_values=cache,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        streamer=times,
    )
    return output, times


def measure(tokens: int, result: ResultFile) -> dict[str, Any]:
    """Measure round after round, each of which is written; return the medians over all."""
    folder = unpacked_folder(resolve(DEFAULT_MODEL, progress=True), progress=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.train(False)
    process, cache = psutil.Process(), KvkeepCache(model, CELLS, 4)
    prompt = torch.randint(5, 40_000, (1, CELLS), generator=torch.Generator().manual_seed(1))
    ids, rounds, summary = prompt, list[dict[str, Any]](), dict[str, Any]()
    while ids.shape[1] < CELLS + tokens:
        ids, times = generate(
            model, ids, cache, min(TOKENS_PER_ROUND, CELLS + tokens - ids.shape[1])
        )
        _, dynamic_times = generate(
            model, prompt, DynamicCache(config=model.config), DYNAMIC_TOKENS
        )
        rounds.append(
            {
                "tokens": ids.shape[1] - CELLS,
                "ms": 1e3 * statistics.median(times.each()),
                "dynamic_ms_at_512": 1e3 * statistics.median(dynamic_times.each()),
                "cache_bytes": cache.session.cache.nbytes,
                "resident_bytes": process.memory_info().rss,
                "cells": cache.session.cache.cells,
            }
        )
        print(rounds[-1], flush=True)
        ratios = [round_["ms"] / round_["dynamic_ms_at_512"] for round_ in rounds]
        summary = {
            "time_against_dynamic_at_512": statistics.median(ratios),
            "last_against_first": rounds[-1]["ms"] / rounds[0]["ms"],
        }
        result.write(parts=rounds, **summary)
    return summary


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--tokens", default=5000, type=click.IntRange(1), help="Tokens to generate.")
@out_option
def main(tokens: int, out: Path | None) -> None:
    """Compare a token's time with a KvkeepCache and with a DynamicCache."""
    summary = measure(tokens, ResultFile(out, model=DEFAULT_MODEL, cells=CELLS))
    print(
        f"a token takes {summary['time_against_dynamic_at_512']:.2f} of that with a DynamicCache "
        f"at {CELLS}; the last ones {summary['last_against_first']:.2f} of the first ones"
    )


if __name__ == "__main__":
    main()
