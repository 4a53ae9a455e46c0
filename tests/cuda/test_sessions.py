"""Sessions on a GPU: policies, quantised cells, edits, groups, files and stores."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda.conftest import Placed
from engine.workload import Request, batch
from session_state import differences, going_on, whole_state
from small_models import local_spec, small_model, state_specs

from kvkeep import PrefixStore, Sampling, SessionGroup, Snapshot
from kvkeep.compression.calibration.calibration import load_calibration
from kvkeep.compression.methods import METHODS
from kvkeep.engine import Engine
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.calibrate import calibrate
from kvkeep.model import Model
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.session.session import Session
from kvkeep.storage.objects.folder import FolderObjectStore
from kvkeep.storage.prefixes.shared import SharedPrefixCache

# Different for 250 tokens: equal ones have equal scores, of which rounding would choose.
IDS = [97 * (i % 250 + 1) % 251 for i in range(300)]
DRAWN = Sampling(0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3)
SPECS: dict[str, ModelSpec | None] = {"dense": None, "local": local_spec(16), **state_specs()}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "sliding": {"max_kv_size": 64},
    "8 bits": {"max_kv_size": 64, "kv_bits": "8"},
    "4 bits": {"max_kv_size": 64, "kv_bits": "4"},
    "8/4 bits": {"max_kv_size": 64, "kv_bits": "8/4", "keep": 12},
    "far bits": {"max_kv_size": 64, "keep": 20, "far_bits": "8"},
    "shift": {"max_kv_size": 50, "policy": "shift", "discard": 10},
    "self-extend": {"max_kv_size": 400, "policy": "self_extend", "group": 4, "window": 32},
    "archive": {"max_kv_size": 96, "policy": "archive", "window": 48},
    "archive by heads": {
        "max_kv_size": 96,
        "policy": "archive",
        "window": 48,
        "method": "knorm",
        "budget": "heads",
        "far_bits": "8",
    },
}
OF_STATES = ("full", "sliding", "8 bits")


def pairs_of(names: Any = SETTINGS) -> list[Any]:
    cases = [(spec, name) for spec in SPECS for name in names]
    return [pytest.param(*c, id=" ".join(c)) for c in cases if allowed(*c)]


def allowed(spec: str, name: str) -> bool:
    return spec in ("dense", "local") or name in OF_STATES


def fed(model: Model, name: str, count: int = 150) -> Session:
    session = model.session(prefill_step=24, **SETTINGS[name])
    session.feed(IDS[:count])
    return session


def logits(session: Session) -> torch.Tensor:
    found = session.logits
    assert found is not None
    return found.cpu()


def require_close(one: torch.Tensor, other: torch.Tensor, most: float = 1e-3) -> None:
    assert (one - other).abs().max() <= most * other.abs().max().clamp_min(1)


@pytest.mark.parametrize(("spec", "name"), pairs_of())
def test_a_session_equals_one_on_a_cpu_and_goes_on_from_files_of_either(
    spec: str, name: str, placed: Placed, tmp_path: Path
) -> None:
    """In each policy, past its budget. A number that is rounded otherwise may round to another
    one of 16, so quantised cells are compared more coarsely."""
    here, on_cpu = placed(SPECS[spec]), small_model(spec=SPECS[spec])
    most = 0.2 if "bits" in name or "heads" in name else 2e-3
    session, again, there = fed(here, name), fed(here, name), fed(on_cpu, name)
    require_close(logits(session), logits(there), most)
    for token in IDS[150:220]:
        for each in (session, again, there):
            each.feed([token])
        assert torch.equal(logits(session), logits(again))
        require_close(logits(session), logits(there), most)
    for index, codec in enumerate(("none", "zstd")):
        session.snapshot().save(tmp_path / str(index), codec=codec)  # type: ignore[arg-type]
        restored = here.restore(Snapshot.load(tmp_path / str(index)))
        expected = going_on(session.fork())
        found = going_on(restored.fork())
        assert torch.equal(expected["logits"], found["logits"])
        assert expected["tokens"] == found["tokens"]
    session.snapshot().save(tmp_path / "rounded", codec="int8")
    fed_on = here.restore(Snapshot.load(tmp_path / "rounded"))
    fed_on.feed(IDS[:2])
    assert logits(fed_on).isfinite().all()
    moved = on_cpu.restore(Snapshot.load(tmp_path / "0"))
    there.snapshot().save(tmp_path / "there")
    arrived = here.restore(Snapshot.load(tmp_path / "there"))
    for token in IDS[220:240]:
        for each in (session, moved, there, arrived):
            each.feed([token])
        require_close(logits(moved), logits(session), 1e-3 if "bits" not in name else most)
        require_close(logits(arrived), logits(there), 1e-3 if "bits" not in name else most)


@pytest.mark.parametrize(("spec", "name"), pairs_of(("full", "sliding", "archive")))
def test_forks_edits_and_rewinds_are_independent(spec: str, name: str, placed: Placed) -> None:
    session = fed(placed(SPECS[spec]), name)
    other = fed(placed(SPECS[spec]), name)
    fork = session.fork()
    before = whole_state(fork)
    session.rewind(2)
    session.feed(IDS[10:30])
    if spec == "dense":
        session.pin(len(session.tokens) - 30, len(session.tokens) - 25)
        session.replace(len(session.tokens) - 10, len(session.tokens) - 8, IDS[:5])
        session.delete(len(session.tokens) - 20, len(session.tokens) - 15)
    going_on(session)
    assert list(differences(whole_state(fork), before)) == []
    for each in (fork, other):
        each.feed(IDS[:8])
        for _ in range(8):
            each.next_token(DRAWN)
    assert list(fork.tokens) == list(other.tokens)
    require_close(logits(fork), logits(other), 1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_a_group_writes_what_each_session_writes_alone(spec: str, placed: Placed) -> None:
    model = placed(SPECS[spec])
    names = SETTINGS if spec in ("dense", "local") else OF_STATES
    names = [name for name in names if "archive" not in name or spec == "dense"]
    alone = [fed(model, name, 90 + i) for i, name in enumerate(names)]
    alone.append(alone[0].fork())
    together = [fed(model, name, 90 + i) for i, name in enumerate(names)]
    together.append(together[0].fork())
    alone[-1].feed([9])
    together[-1].feed([9])
    group = SessionGroup(together)
    for _ in range(40):
        assert group.next_tokens() == [session.next_token() for session in alone]
    for name, one, other in zip([*names, names[0]], together, alone, strict=True):
        require_close(logits(one), logits(other), 0.2 if "bits" in name else 1e-3)


def test_an_engine_answers_as_a_session_alone(placed: Placed) -> None:
    model = placed()
    requests = [Request(tuple(IDS[:count]), 12) for count in (20, 90, 140)]
    with Engine(model, settings={"max_kv_size": 100, "prefill_step": 32}) as engine:
        results = [result for (result,) in batch(engine, requests)]
    for request, result in zip(requests, results, strict=True):
        session = model.session(100, prefill_step=32)
        session.feed(list(request.prompt))
        assert result.written == [session.next_token(Sampling()) for _ in range(12)]


@pytest.mark.parametrize("budget", ["uniform", "heads"])
@pytest.mark.parametrize("method", METHODS)
def test_compression_selects_the_same_cells_as_on_a_cpu(
    method: str, budget: str, placed: Placed
) -> None:
    results = []
    for model in (placed(), small_model()):
        statistics = calibrate(model, [IDS[i % 250] for i in range(3 * 512)])
        session = model.session(policy="full", prefill_step=24)
        session.cache.observe()
        session.feed(IDS[:120])
        try:
            report = session.compress(
                3.0,
                method,
                recent=8,
                calibration=statistics,
                budget=budget,  # type: ignore[arg-type]
            )
        except InvalidArgument as error:
            results.append((str(error), 0, torch.zeros(1)))
            continue
        session.feed(IDS[120:140])
        for token in IDS[140:150]:
            session.feed([token])
        results.append((report.budget, report.cells_after, logits(session)))
        group = SessionGroup([session, session.fork()])
        first = group.next_tokens()
        assert first[0] == first[1]
        restored = model.restore(session.snapshot())
        assert torch.equal(going_on(restored)["logits"], going_on(session)["logits"])
    assert results[0][:2] == results[1][:2]
    if method != "snapkv":  # neighbours share the highest score of them all: any may be chosen
        require_close(results[0][2], results[1][2], 1e-2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("spec", ["dense", "local", "delta_net"])
def test_a_prefix_store_returns_the_same_bits(
    spec: str, shared: bool, placed: Placed, tmp_path: Path
) -> None:
    model = placed(SPECS[spec])
    prompt = [IDS[i % 250] for i in range(700)]
    results = []
    for _ in range(2):
        store: PrefixStore | SharedPrefixCache = PrefixStore(tmp_path)
        if shared:
            store = SharedPrefixCache(FolderObjectStore(tmp_path), bytes(32), model.arithmetic)
        session = model.session(policy="full", store=store, prefill_step=128)
        report = session.feed(prompt)
        if isinstance(store, SharedPrefixCache):
            store.flush()
        results.append((report.reused, going_on(session)))
    assert results[0][0] == 0
    assert results[1][0] >= 512
    assert list(results[0][1]["tokens"]) == list(results[1][1]["tokens"])
    assert torch.equal(results[0][1]["logits"], results[1][1]["logits"])


def test_an_archive_compresses_by_a_calibration(placed: Placed, tmp_path: Path) -> None:
    model = placed()
    calibration = calibrate(model, [IDS[i % 250] for i in range(3 * 512)])
    calibration.save(tmp_path / "calibration")
    assert load_calibration(tmp_path / "calibration", model).digest == calibration.digest
    for method in ("fitted", "kvzap"):
        settings = {"policy": "archive", "window": 48, "method": method}
        session = model.session(96, calibration=calibration, **settings)
        session.feed(IDS)
        restored = model.restore(session.snapshot(), calibration=calibration)
        assert torch.equal(going_on(restored)["logits"], going_on(session)["logits"])
        assert session.cache.cells <= 96


def test_scores_embeddings_and_speculation_equal_those_of_a_cpu(placed: Placed) -> None:
    model, on_cpu = placed(), small_model()
    scores = [m.session(policy="full").score(IDS[:100]) for m in (model, on_cpu)]
    assert (scores[0].cpu() - scores[1].cpu())[1:].abs().max() < 1e-3  # the first has none
    texts = []
    for speculate in (False, True):
        session = model.session(max_kv_size=64)
        session.feed([IDS[i % 7] for i in range(100)])
        texts.append("".join(session.stream(40, ignore_eos=True, speculate=speculate)))
    assert texts[0] == texts[1]
