"""Requests that the Python API refuses, and those that fail alone."""

import threading
from pathlib import Path
from typing import Any

import pytest
from engine.killed import MODEL, new_engine, text, write
from torch import Tensor

from kvkeep.engine import GeneratedToken, GenerationRequest
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.session.sampling import Sampling


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": 5},
        {"prompt": "ab"},
        {"priority": 10**400},
        {"priority": -(10**7)},
        {"end_tokens": 5},
        {"end_tokens": ("a",)},
        {"pins": 5},
        {"pins": ("a",)},
    ],
)
def test_a_request_with_an_invalid_field_is_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidArgument, match=name.removesuffix("s").replace("_", ".")):
        GenerationRequest(**{"prompt": (1, 2), "max_tokens": 1, **fields})


@pytest.mark.parametrize("prompt", [(2**40,), (2**31,), (-1,), (256,), ("a",), (1.5,)])
def test_a_prompt_of_other_values_than_token_ids_is_refused(prompt: Any) -> None:
    with new_engine() as engine:
        write(engine, engine.create().result().name, 1, text(0, 20))
        request = GenerationRequest(prompt, 1)
        whole_text = GenerationRequest(prompt, 1, whole_text=True)
        for submit in (
            lambda: engine.submit(request),
            lambda: engine.submit(whole_text, "new"),
            lambda: engine.prepare(prompt, "new"),
            lambda: engine.explain(prompt),
        ):
            with pytest.raises(InvalidArgument, match=r"token ids|whole number"):
                submit().result()
        assert len(engine.sessions(unnamed=True).result()) == 1


class FailingOnce:
    """A constraint whose `complete` raises when it is read for the second time."""

    def __init__(self) -> None:
        self.reads = 0

    def masked(self, logits: Tensor) -> Tensor:
        return logits

    def accept(self, token: int) -> None:
        pass

    @property
    def complete(self) -> bool:
        self.reads += 1
        if self.reads == 2:
            raise RuntimeError("a defect of the constraint")
        return False


def test_an_answer_whose_report_fails_ends_no_other_generation() -> None:
    constraint, admitted = FailingOnce(), threading.Event()
    with new_engine() as engine:
        blocked = engine.call(admitted.wait)  # so that both begin together
        failing = GenerationRequest(text(0, 20), 4, Sampling(constraint=constraint))
        sound = GenerationRequest(text(1, 20), 4, ignore_eos=True)
        submitted = [engine.submit(failing), engine.submit(sound)]
        admitted.set()
        assert blocked.result(60)
        (first,), (second,) = (future.result(60) for future in submitted)
        with pytest.raises(RuntimeError, match="defect"):
            list(first)
        answer = [event.token for event in second if isinstance(event, GeneratedToken)]
        assert len(answer) == 4
        assert list(second.record.live.tokens) == [*sound.prompt, *answer]
    session = MODEL.session(64, prefill_step=16)
    session.feed(sound.prompt)
    assert answer == [session.next_token() for _ in range(4)]


def test_a_snapshot_in_a_folder_that_cannot_be_made_raises_a_store_error(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="a").result()
        (tmp_path / "0" / "snapshots").write_text("no folder")
        with pytest.raises(StoreError, match="snapshots"):
            engine.snapshot("a", "label").result()
