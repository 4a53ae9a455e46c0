"""`--model transformers:FOLDER`, and what kvkeep builds on a model of theirs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvkeep
from benchmarks.architectures import small_model
from kvkeep import PrefixStore, SessionGroup
from kvkeep.engine import Engine, GenerationRequest
from kvkeep.errors import InvalidArgument, UnsupportedModel
from kvkeep.model import Model
from kvkeep.model_facts import model_facts


@pytest.fixture(scope="module")
def theirs(unpacked_folder: Path) -> Model:
    return kvkeep.load_model(f"transformers:{unpacked_folder}", dtype="float32")


def kept_running(*given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvkeep", *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_the_command_line_writes_with_it(unpacked_folder: Path, tmp_path: Path) -> None:
    how = ["--prompt", "The sea is", "--max-tokens", "12", "--temperature", "0"]
    found = kept_running("generate", "--model", f"transformers:{unpacked_folder}", *how)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip()
    assert "cells" in found.stderr


def test_one_that_is_packed_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedModel, match="kvkeep models export smollm2-135m-instruct"):
        kvkeep.load_model("transformers:smollm2-135m-instruct")
    with pytest.raises(InvalidArgument, match="transformers"):
        kvkeep.load_model("transformers:anything", weights="int8")
    with pytest.raises(InvalidArgument, match="once it is loaded"):
        model_facts("transformers:anything")


def test_sessions_in_a_group_write_what_each_writes_alone(theirs: Model) -> None:
    prompts = ["The sea is", "A very small house stood by the road, and in it", "One, two,"]

    def begun() -> list[kvkeep.Session]:
        sessions = [theirs.session(16, 2) for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.feed(prompt)
        return sessions

    together, alone = SessionGroup(begun()), begun()
    for _ in range(12):
        expected = [session.next_token() for session in alone]
        assert together.next_tokens() == expected


def test_a_prefix_store_keeps_its_prompts(theirs: Model, tmp_path: Path) -> None:
    store, prompt = PrefixStore(tmp_path), "The garden was green. " * 60
    first = theirs.session(1024, policy="full", prefill_step=64, store=store)
    assert first.feed(prompt).reused == 0
    again = theirs.session(1024, policy="full", prefill_step=64, store=store)
    assert again.feed(prompt + "And").reused > 200
    plain = theirs.session(1024, policy="full", prefill_step=64)
    plain.feed(prompt + "And")
    assert (again.logits - plain.logits).abs().max() < 1e-3


def test_an_engine_serves_it(theirs: Model) -> None:
    with Engine(theirs) as engine:
        asks = [
            GenerationRequest(tuple(theirs.text.encode(text)), 8)
            for text in ("The sea is", "One, two,")
        ]
        answers = [engine.generate(ask) for ask in asks]
        assert all(answer.text() for answer in answers)


def test_score_and_stop(theirs: Model, unpacked_folder: Path) -> None:
    own = kvkeep.load_model(str(unpacked_folder), dtype="float32")
    text = "The quick brown fox jumps over the lazy dog. " * 3
    found, expected = (each.session(24, 2).score(text)[1:] for each in (theirs, own))
    assert torch.allclose(found, expected, atol=1e-3)


def test_a_hybrid_keeps_no_prefixes(tmp_path: Path) -> None:
    model = kvkeep.from_transformers(small_model("qwen3_next"))
    session = model.session(64, prefill_step=8, store=PrefixStore(tmp_path))
    report = session.feed(list(range(3, 50)))
    assert "states" in (report.store_error or "")
