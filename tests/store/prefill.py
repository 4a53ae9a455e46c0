"""A script: one of several processes that share a prefix store.

`python prefill.py MODEL DTYPE STORE QUOTA SEED TOKENS OUT` evaluates a prompt and writes to OUT
the logits and the number of reused tokens.
"""

import random
import sys
from pathlib import Path

import torch

from kvkeep.loader import load_model
from kvkeep.storage.prefixes.store import PrefixStore


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 256) for _ in range(tokens)]


def main(model: str, dtype: str, store: str, quota: str, seed: str, tokens: str, out: str) -> None:
    torch.set_num_threads(1)
    session = load_model(model, dtype=dtype).session(
        policy="full", store=PrefixStore(store, int(quota))
    )
    report = session.feed(prompt(int(seed), int(tokens)))
    torch.save({"logits": session.logits, "reused": report.reused}, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
