"""`progress` callbacks that use the session which is being changed."""

from collections.abc import Callable

import pytest
from small_models import small_model, state_specs
from topics import topic_ids

from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.model import Model
from kvkeep.session.session import Session

Progress = Callable[[int], None]
Change = Callable[[Session, Progress], object]

ADDED = 7


def _align(session: Session, mode: str, progress: Progress) -> None:
    tokens = session.tokens
    target = [*tokens[:5], 6, *tokens[5:]]
    assert session.align(target, mode=mode, progress=progress).mode == mode  # type: ignore[arg-type]


CHANGES: dict[str, Change] = {
    "delete": lambda session, call: session.delete(3, 5, "suffix", progress=call),
    "insert": lambda session, call: session.insert(3, [5, 6, 7], progress=call),
    "replace": lambda session, call: session.replace(3, 9, [5, 6], progress=call),
    "align in place": lambda session, call: _align(session, "in_place", call),
    "align exactly": lambda session, call: _align(session, "exact", call),
    "compress": lambda session, call: session.compress(4, method="knorm", progress=call),
    "compact": lambda session, call: session.compact(200, progress=call),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_refused_if_its_session_changes_meanwhile(smollm2: Model, kind: str) -> None:
    session, calls = smollm2.session(400, policy="full"), list[int]()
    tokens = topic_ids(smollm2)[:300]
    session.feed(tokens)

    def feed_once(count: int) -> None:
        if not calls:
            session.feed([ADDED])
        calls.append(count)

    with pytest.raises(InvalidArgument, match="changed the session"):
        CHANGES[kind](session, feed_once)
    assert calls
    assert session.tokens == [*tokens, ADDED]
    CHANGES[kind](session, lambda count: None)


def test_a_rewind_is_refused_if_its_session_changes_meanwhile() -> None:
    session = small_model(spec=state_specs()["delta_net"]).session()
    for _ in range(3):
        session.feed(list(range(1, 40)))
    tokens = session.tokens

    with pytest.raises(InvalidArgument, match="changed the session"):
        session.rewind(60, progress=lambda count: session.feed([ADDED]) and None)
    assert session.tokens[: len(tokens)] == tokens
    assert set(session.tokens[len(tokens) :]) == {ADDED}


@pytest.mark.parametrize("policy", ["full", "self_extend"])
@pytest.mark.parametrize("kind", ["feed", "score"])
def test_a_prompt_that_no_longer_fits_ends_at_a_step(policy: str, kind: str) -> None:
    """Its callback feeds what the rest of the prompt needs."""
    settings = {"group": 2, "window": 16} if policy == "self_extend" else {}
    session = small_model().session(64, policy=policy, prefill_step=16, **settings)

    def feed_once(count: int) -> None:
        if len(session.tokens) == count:
            session.feed(list(range(1, 30)))

    with pytest.raises(ContextFull):
        getattr(session, kind)(list(range(100, 148)), progress=feed_once)
    assert session.cache.cells == len(session.tokens) == 16 + 29
    session.feed(list(range(1, 64 - 16 - 29 + 1)))


def test_progress_may_read_and_fork_the_session(smollm2: Model) -> None:
    session = smollm2.session(400)
    session.feed(topic_ids(smollm2)[:100])
    forks = list[Session]()
    session.replace(3, 9, [5, 6], "suffix", progress=lambda count: forks.append(session.fork()))
    assert [len(fork.tokens) for fork in forks] == [100] * len(forks)
    assert forks
