"""The speed of whatever kvkeep can be imported, in one process: a JSON line on standard output.

It uses what every release has, and is run by its path, so that `PYTHONPATH` says which kvkeep it
measures.
"""

import json
import sys
import tempfile
import time

BEGUN = time.perf_counter()

from pathlib import Path  # noqa: E402
from pydoc_data.topics import topics  # noqa: E402

from kvkeep import Snapshot, load_model  # noqa: E402

PROMPT, BUDGET = 2048, 512
SAVED = 20  # times; the first few take pages that the system has yet to find


def seconds(call: "object", times: int) -> float:
    """The least of several calls: whatever else runs on a machine only adds to it."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()  # type: ignore[operator]
        found.append(time.perf_counter() - begun)
    return min(found)


def main() -> None:
    model = load_model()
    ids = model.text.encode(str(topics["typesseq"]))[:PROMPT]
    begun = time.perf_counter()
    model.session(BUDGET).feed(ids[:8])
    first = time.perf_counter() - begun + begun - BEGUN
    prefill = seconds(lambda: model.session(policy="full").feed(ids), 4)
    whole = model.session(policy="full")
    whole.feed(ids)
    bounded = model.session(BUDGET)
    bounded.feed(ids[: 2 * BUDGET])
    figures = {
        "start_up_s": first,
        "prefill_tok_s": len(ids) / prefill,
        "decode_at_2048_tok_s": 1 / seconds(whole.next_token, 200),
        "endless_at_512_tok_s": 1 / seconds(bounded.next_token, 200),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.kvkeep"
        snapshot = whole.snapshot()
        figures["save_s"] = seconds(lambda: snapshot.save(path), SAVED)
        to_logits, to_token = [], []
        for _ in range(SAVED):
            begun = time.perf_counter()
            session = model.restore(Snapshot.load(path))
            assert session.logits is not None
            to_logits.append(time.perf_counter() - begun)
            session.next_token()  # the first that looks at the cells
            to_token.append(time.perf_counter() - begun)
        figures["load_to_logits_s"] = min(to_logits)
        figures["load_to_next_token_s"] = min(to_token)
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main()
