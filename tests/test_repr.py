"""What a person sees of a model, a session, its cells, a snapshot and a group."""

from small_models import small_model

from kvkeep import SessionGroup


def test_repr_is_one_informative_line() -> None:
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


def test_repr_of_ragged_cells_gives_the_mean_per_head_and_all_bytes() -> None:
    session = small_model().session(policy="full")
    session.feed([(i * i * 7 + 3 * i) % 255 + 1 for i in range(300)])
    session.compress(4.0, "knorm", recent=20, budget="heads")
    (ragged,) = (s.block.slots for s in session.cache.segments if s.compressed)
    vector = 16 * 4  # bytes of a key or a value
    own = 51 * 4 * (2 * vector + 12) + 4 * 8  # and a position and a bias; and four counts
    assert ragged.nbytes == own
    assert session.cache.nbytes == own + 24 * 4 * 2 * vector
    nbytes = f"{session.cache.nbytes / 1e6:,.1f} MB"
    assert repr(session) == f"<Session of small: full, 75 of 4,096 cells ({nbytes}), 300 tokens>"
    assert repr(session.cache) == f"<KVCache: 75 cells in 3 segments, {nbytes}>"
    assert repr(session.snapshot()) == f"<Snapshot of small: full, 75 cells ({nbytes}), 300 tokens>"
    group = SessionGroup([session, session.fork()])
    assert group.nbytes == session.cache.nbytes
    assert repr(group) == f"<SessionGroup of 2 sessions of small: 150 cells, {nbytes}>"
