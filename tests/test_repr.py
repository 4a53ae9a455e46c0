"""What a person sees of a model, a session, its cells, a snapshot and a group."""

from small import small_model

from kvkeep import SessionGroup


def test_each_says_in_a_line_what_it_is() -> None:
    model = small_model()
    session = model.session(24, keep=2)
    session.feed(list(range(1, 31)))
    with session.span("turn"):
        session.feed([7, 8])
    session.pin("turn")
    nbytes = f"{session.cache.nbytes / 1e6:,.1f} MB"
    assert repr(model) == (
        "<Model small: LlamaForCausalLM, 2 layers, 0.1 million weights in float32 on cpu>"
    )
    assert repr(session) == (
        f"<Session of small: sliding, 24 of 24 cells ({nbytes}), 32 tokens, 1 spans, 2 pinned>"
    )
    segments = len(session.cache.segments)
    assert repr(session.cache) == f"<KVCache: 24 cells in {segments} segments, {nbytes}>"
    assert repr(session.snapshot()) == (
        f"<Snapshot of small: sliding, 24 cells ({nbytes}), 32 tokens, 1 spans>"
    )
    assert repr(SessionGroup([session, session.fork()])).startswith(
        "<SessionGroup of 2 sessions of small: 48 cells, "
    )
    assert repr(model.session()) == (
        "<Session of small: sliding, 0 of 4,096 cells (0.0 MB), 0 tokens>"
    )
