"""What a KvkeepCache costs in `generate`: time and memory of each token, against a DynamicCache.

    python -m benchmarks.inside_transformers [--tokens 5000] [--out docs/results/....json]

The default model in bfloat16. With 512 cells it writes on and on; in between, transformers' own
cache writes some tokens at 512 tokens of context. What is compared was so measured in turn.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.machine import describe_machine
from benchmarks.peers.unpacked import unpacked
from kvkeep.integrations.transformers import KvkeepCache
from kvkeep.models.hub.source import DEFAULT_MODEL, resolve

CELLS, PART, OTHERS = 512, 500, 40


class Times:
    """When each token came, as `generate` has them streamed."""

    def __init__(self) -> None:
        self.at = [time.perf_counter()]

    def put(self, token: Any) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass

    def each(self) -> list[float]:
        """Seconds of each token; the prompt's and the first one's are left out."""
        return [b - a for a, b in zip(self.at[2:], self.at[3:], strict=False)]


def written(model: PreTrainedModel, ids: torch.Tensor, cache: Any, count: int) -> tuple[Any, Times]:
    """`count` more tokens, and how long each took."""
    times = Times()
    found = model.generate(  # type: ignore[operator]  # torch takes it for a tensor
        ids,
        past_key_values=cache,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        streamer=times,
    )
    return found, times


def measure(tokens: int) -> dict[str, Any]:
    folder = unpacked(resolve(DEFAULT_MODEL, progress=True), progress=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.train(False)
    process, own = psutil.Process(), KvkeepCache(model, CELLS, 4)
    prompt = torch.randint(5, 40_000, (1, CELLS), generator=torch.Generator().manual_seed(1))
    ids, parts = prompt, []
    while ids.shape[1] < CELLS + tokens:
        ids, times = written(model, ids, own, min(PART, CELLS + tokens - ids.shape[1]))
        _, others = written(model, prompt, DynamicCache(config=model.config), OTHERS)
        parts.append(
            {
                "tokens": ids.shape[1] - CELLS,
                "ms": 1e3 * statistics.median(times.each()),
                "dynamic_ms_at_512": 1e3 * statistics.median(others.each()),
                "cache_bytes": own.session.cache.nbytes,
                "resident_bytes": process.memory_info().rss,
                "cells": own.session.cache.cells,
            }
        )
        print(parts[-1], flush=True)
    ratios = [part["ms"] / part["dynamic_ms_at_512"] for part in parts]
    return {
        "machine": asdict(describe_machine()),
        "model": DEFAULT_MODEL,
        "cells": CELLS,
        "parts": parts,
        "time_against_dynamic_at_512": statistics.median(ratios),
        "last_against_first": parts[-1]["ms"] / parts[0]["ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = measure(asked.tokens)
    print(
        f"a token takes {found['time_against_dynamic_at_512']:.2f} of a DynamicCache's at {CELLS}; "
        f"the last ones {found['last_against_first']:.2f} of the first ones"
    )
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
