"""Edits, pins and all else on the default model as users run it: compiled, in bfloat16.

After each call one token is evaluated, and held to what a float32 reference finds in the cells that
it saw; where the naive memory has the policy, the session is held to that as well.
"""

import random
from contextlib import suppress

import pytest
from dense_reference import DenseMemory
from edit_actions import Pair
from seen_cells import SeenCells
from test_edits import held
from topics import topic_ids

from kvkeep import Snapshot
from kvkeep.cache import RaggedCells
from kvkeep.errors import KvkeepError
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.session.session import Session

BUDGET = 32
SETTINGS = {
    "full": {"policy": "full", "max_kv_size": 128},
    "full, 8 bits": {"policy": "full", "max_kv_size": 128, "kv_bits": "8"},
    "full, 4 bits": {"policy": "full", "max_kv_size": 128, "kv_bits": "4"},
    "sliding": {"policy": "sliding"},
    "sliding, 8 and 4 bits": {"policy": "sliding", "kv_bits": "8/4"},
    "sliding, 4 bits far": {"policy": "sliding", "far_bits": "4"},
    "shift": {"policy": "shift"},
    "shift, 8 bits": {"policy": "shift", "kv_bits": "8"},
    "self_extend": {"policy": "self_extend", "max_kv_size": 128, "group": 2, "window": 24},
    "self_extend, no groups": {
        "policy": "self_extend", "max_kv_size": 128, "group": 1, "window": 12,
    },
    "self_extend, 8 bits far": {
        "policy": "self_extend", "max_kv_size": 128, "group": 1, "window": 12, "far_bits": "8",
    },
    "archive": {"policy": "archive", "max_kv_size": 40},
    "archive, 4 bits far": {"policy": "archive", "max_kv_size": 40, "far_bits": "4"},
    "archive, by heads": {
        "policy": "archive", "max_kv_size": 40, "method": "knorm", "budget": "heads",
    },
    "archive, by heads, 8 bits far": {
        "policy": "archive", "max_kv_size": 40, "method": "knorm", "budget": "heads",
        "far_bits": "8",
    },
}  # fmt: skip


def act(model: Model, session: Session, draw: random.Random, ids: list[int], file) -> Session:
    """One call of any kind, anywhere; the session that goes on."""
    kinds = ("feed", "edit", "edit", "edit", "pin", "unpin", "rewind", "fork", "snapshot", "write")
    kind, total = draw.choice(kinds), len(session.tokens)
    start, count = max(0, total - draw.randint(1, BUDGET)), draw.randint(0, 4)
    if session.core.memory.pins and draw.random() < 0.5:
        start = list(session.core.memory.serials).index(min(session.core.memory.pins))
    new = ids[draw.randrange(len(ids) - 16) :][: draw.randint(1, 6)]
    if kind == "feed":
        session.feed(new * 2)
    elif kind == "edit" and count:
        session.replace(start, start + count, new if draw.random() < 0.7 else "")
    elif kind == "edit":
        session.insert(start, new)
    elif kind in ("pin", "unpin"):
        getattr(session, kind)(start, start + count + 1)
    elif kind == "rewind":
        session.rewind(count)
    elif kind == "write":
        session.next_token()
    else:
        session = session.fork()
        if kind == "snapshot":
            session.snapshot().save(file)
            session = model.restore(Snapshot.load(file))
    return session


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_queries_attend_to_exactly_the_cells_in_view(
    setting, smollm2: Model, smollm2_fp32: Model, tmp_path
) -> None:
    session = smollm2.session(**{"max_kv_size": BUDGET} | setting)
    session.feed(topic_ids(smollm2)[:30])
    require_found(session, random.Random(str(setting)), smollm2_fp32, tmp_path)


@pytest.mark.parametrize("bits", [None, "8", "4"])
def test_queries_attend_to_exactly_the_ragged_cells_in_view(
    bits, smollm2: Model, smollm2_fp32: Model, tmp_path
) -> None:
    session = smollm2.session(128, policy="full", kv_bits=bits)
    session.feed(topic_ids(smollm2)[:110])
    session.pin(50, 54)
    session.compress(2.0, "knorm", recent=24, budget="heads")
    require_found(session, random.Random(bits), smollm2_fp32, tmp_path)
    assert any(isinstance(segment.block.slots, RaggedCells) for segment in session.cache.segments)


def require_found(session: Session, draw: random.Random, exact: Model, tmp_path) -> None:
    """After each of some calls, the newest token finds what float32 finds in the same cells."""
    model, checked = session.core.model, 0
    ids = topic_ids(model)[:300]
    for turn in range(7):
        with suppress(KvkeepError):
            session = act(model, session, draw, ids, tmp_path / "file")
        if session.feed(ids[40 + turn :][:1]).compressions:
            continue
        seen = SeenCells(session, exact)
        difference = (seen.logits() - session.logits).abs()
        assert difference.mean() <= 0.25
        assert difference.max() <= 1.0
        assert seen.off <= (1.5 if "4" in (session.bits.kv or "") else 0.25)
        checked += 1
    assert checked >= 4


@pytest.fixture(scope="module")
def smollm2_fp32(smollm2: Model) -> Model:
    """float32, with the weights that prompts are multiplied by: rounded to bfloat16."""
    tensors = {name: tensor.float() for name, tensor in smollm2.decoder.weights.items()}
    return Model("fp32", smollm2.folder, Decoder(smollm2.spec, tensors), smollm2.text)


@pytest.mark.parametrize("policy", ["full", "sliding", "shift"])
def test_random_edits_equal_the_naive_memory(
    policy: str, smollm2: Model, smollm2_fp32: Model, tmp_path
) -> None:
    draw, ids, size = random.Random(policy), topic_ids(smollm2), 80 if policy == "full" else 16
    dense = DenseMemory(
        smollm2_fp32.decoder,
        size,
        size if policy == "full" else 4,
        0 if policy == "shift" else 1,
        bounded=policy != "full",
    )
    pair, done = Pair(smollm2.session(size, policy=policy), dense), 0
    pair.act(("feed", (ids[:14],)), tmp_path)
    for turn in range(16):
        new = ids[draw.randrange(200) :][: draw.randint(0, 4)]
        kind = ("edit", "edit", "feed", "pin", "unpin", "rewind")[turn % 6]
        place, count = draw.random(), draw.randint(0, 3)
        arguments = {
            "edit": (place, count, new, draw.choice(["none", "none", "suffix"])),
            "feed": (ids[turn:][:3],),
            "rewind": (count,),
        }.get(kind, (place, count + 1))
        if not pair.act((kind, arguments), tmp_path):
            continue
        difference = (pair.session.logits - pair.dense.logits()).abs()
        cells = [pair.session.tokens[index] for index in held(pair.session)]
        assert cells == [token.id for token in pair.dense.held]
        assert difference.mean() <= 0.25
        assert difference.max() <= 1.0
        done += 1
    assert done >= 6
