"""Measure the kvkeep on `PYTHONPATH` in this process; prints one line of JSON.

Uses only the public API that all releases have, and is run by its path, so that other checkouts can
be measured with it.
"""

import json
import sys
import tempfile
import time

PROCESS_START = time.perf_counter()

from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from pydoc_data.topics import topics  # noqa: E402

from kvkeep import Snapshot, load_model  # noqa: E402

PROMPT, BUDGET = 2048, 512
SAVES = 20  # the first saves are slower: the system allocates their pages


def fastest_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the shortest of several calls: other load on the machine only adds to it."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    model = load_model()
    ids = model.text.encode(str(topics["typesseq"]))[:PROMPT]
    start = time.perf_counter()
    model.session(BUDGET).feed(ids[:8])
    start_up = time.perf_counter() - start + start - PROCESS_START
    prefill = fastest_seconds(lambda: model.session(policy="full").feed(ids), 4)
    full = model.session(policy="full")
    full.feed(ids)
    bounded = model.session(BUDGET)
    bounded.feed(ids[: 2 * BUDGET])
    figures = {
        "start_up_s": start_up,
        "prefill_tok_s": len(ids) / prefill,
        "decode_at_2048_tok_s": 1 / fastest_seconds(full.next_token, 200),
        "endless_at_512_tok_s": 1 / fastest_seconds(bounded.next_token, 200),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.kvkeep"
        snapshot = full.snapshot()
        figures["save_s"] = fastest_seconds(lambda: snapshot.save(path), SAVES)
        to_logits, to_token = [], []
        for _ in range(SAVES):
            start = time.perf_counter()
            session = model.restore(Snapshot.load(path))
            assert session.logits is not None
            to_logits.append(time.perf_counter() - start)
            session.next_token()  # the first read of the cells
            to_token.append(time.perf_counter() - start)
        figures["load_to_logits_s"] = min(to_logits)
        figures["load_to_next_token_s"] = min(to_token)
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main()
