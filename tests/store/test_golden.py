"""A file of format 1, kept since then, still gives the tokens that followed."""

from dataclasses import replace

from store.golden import PATH, TEXT, golden_model

from kvkeep.store.snapshot import Snapshot, describe

NEXT = [35, 8, 146, 15, 23, 77, 160, 166, 58, 194, 133, 60, 133, 77, 54, 74]


def test_a_file_of_format_1_goes_on_as_it_did() -> None:
    model, snapshot = golden_model(), Snapshot.load(PATH)
    # How the tokenizers library writes a tokenizer down is for its next version to change.
    same_text = {"tokenizer": model.fingerprint.tokenizer}
    session = model.restore(replace(snapshot, fingerprint=snapshot.fingerprint | same_text))
    assert session.tokens[: len(TEXT)] == TEXT
    assert (session.policy, session.max_kv_size, session.keep) == ("sliding", 40, 4)
    assert session.cache.cells == 40
    assert [session.next_token() for _ in range(16)] == NEXT


def test_it_is_a_wrapped_window_of_less_than_60_kb() -> None:
    assert PATH.stat().st_size < 60_000
    ring = describe(PATH)["segments"][-1]
    assert ring["slot_order"]
    assert ring["start"] > 0
