"""Views of segments that stay the same from token to token: described once, and never outdated."""

from functools import cache
from random import Random

import pytest
import torch
from packed_model import packed_model, spec_of

from kvkeep import SessionGroup
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.row_steps import row_steps
from kvkeep.compiled import step as described_steps
from kvkeep.compiled.binding import kernel_library
from kvkeep.errors import KvkeepError
from kvkeep.model import Model
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

PROMPT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(600)]
KINDS = ["delete", "delete", "insert", "rewind", "fork", "fork that writes", "restore", "pin"]
KINDS += ["compress"]
SETTINGS: list[dict[str, object]] = [
    {"policy": "full"},
    {"policy": "full", "kv_bits": "8/4"},
    {"max_kv_size": 200, "keep": 20},
    {"max_kv_size": 150, "keep": 70, "far_bits": "4"},
    {"max_kv_size": 200, "policy": "shift", "discard": 30},
]


@cache
def model() -> Model:
    return packed_model(spec_of(), 4)


def fed(**settings: object) -> Session:
    session = model().session(**settings)  # type: ignore[arg-type]
    session.feed(PROMPT)
    return session


def cut(session: Session, count: int) -> Session:
    """Delete some tokens in many places; each leaves a segment with a position map of its own."""
    for index in range(count):
        session.delete(10 + 12 * index, 12 + 12 * index)
    return session


def forget_views(session: Session) -> None:
    for segment in session.cache.all_segments:
        segment.block.last_view = None


def test_a_token_describes_only_the_cells_that_differ_from_the_last_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = cut(fed(policy="full"), 30)
    assert len(session.cache.segments) > 30
    session.next_token()
    count, describe = 0, described_steps.stored_cells

    def counted(*arguments: object) -> object:
        nonlocal count
        count += 1
        return describe(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(described_steps, "stored_cells", counted)
    session.next_token()
    assert count == 4  # keys and values: of the new cell's slot, and of the newest segment
    forks = [session.fork() for _ in range(2)]
    group = SessionGroup(forks)
    group.next_tokens()
    count = 0
    group.next_tokens()
    assert count == 8  # of each fork's own


def changed(session: Session, random: Random) -> Session:
    """Return a session after a random change, the same one for any session of the same history."""
    kind, place = random.choice(KINDS), random.random()
    start = int(place * (len(session.tokens) - 20))
    match kind:
        case "delete":
            session.delete(start, start + 3)
        case "insert":
            session.insert(start, [7, 8, 9])
        case "rewind":
            session.rewind(1 + int(place * 3))
        case "pin":
            session.pin(start, start + 4)
        case "compress":
            session.compress(1.2, "keydiff", recent=20)
        case "fork that writes":
            session.fork().feed(PROMPT[:5])
        case "fork":
            return session.fork()
        case "restore":
            return model().restore(session.snapshot())
    return session


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_after_any_change_the_bits_are_those_of_new_views(settings: dict[str, object]) -> None:
    session, other = (fed(**settings) for _ in range(2))
    for seed in range(40):
        refused = []
        for each in (session, other):
            try:
                result = changed(each, Random(seed))
            except KvkeepError as error:
                result = each
                refused.append(str(error))
            session, other = (result, other) if each is session else (session, result)
        assert len(refused) != 1
        for _ in range(3):
            forget_views(other)
            assert session.next_token() == other.next_token()
            assert session.logits is not None
            assert other.logits is not None
            assert torch.equal(session.logits, other.logits)
    assert len(session.cache.segments) > 3


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_of_one_cache_see_each_segment_at_their_own_positions(
    settings: dict[str, object],
) -> None:
    """One view of a segment serves all rows, though their positions towards it differ."""
    together, alone = (cut(fed(**settings), 9) for _ in range(2))
    tokens, results = torch.tensor([3, 5, 8, 13]), []
    for session in (together, alone):
        memory = session.core.memory
        with torch.inference_mode():
            assert memory.policy.open(memory.cache, len(tokens)) == len(tokens)
            if session is together:
                with row_steps(memory.cache, len(tokens)) as rows:
                    results.append(memory.decoder.forward(tokens, GroupStep(rows.steps)))
                continue
            hidden = []
            for token in tokens:
                with memory.cache.step(1) as step:
                    hidden.append(memory.decoder.forward(token[None], step))
                forget_views(session)
            results.append(torch.cat(hidden))
    assert torch.equal(*results)
