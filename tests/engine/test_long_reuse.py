"""Long prompts that come again: at most 256 of the tokens they share are evaluated again.

With the engine's own prefill steps, on models with local layers and with states.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from engine.workload import Request, Result
from packed_model import packed_model, spec_of
from small_models import small_model, state_specs

from kvkeep.compiled.binding import kernel_library
from kvkeep.engine import Engine
from kvkeep.model import Model

MAX_TOKENS, MOST_EVALUATED = 6000, 256
SETTINGS: dict[str, Any] = {"policy": "full", "max_kv_size": MAX_TOKENS}
HEAD_DIMS = {"gemma3": 256, "gpt-oss": 64}
KERNELS = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")


@cache
def long_model(name: str) -> Model:
    """Return a small random model: with local layers by the kernels, with states by PyTorch."""
    if name in HEAD_DIMS:
        spec = spec_of(HEAD_DIMS[name], name)
        return packed_model(replace(spec, max_positions=MAX_TOKENS), None)
    return small_model(spec=replace(state_specs()[name], max_positions=MAX_TOKENS))


def text(count: int, seed: int) -> tuple[int, ...]:
    return tuple((i * i * seed + 3 * i) % 250 + 1 for i in range(count))


def requests() -> Iterator[tuple[Request, int]]:
    """Yield requests, and how many tokens of each one earlier ones share.

    A prompt, the same again, the same with another last question, and a chat of five turns, whose
    history has each call in other bytes than the model wrote, and a tool's result.
    """
    shared = text(3960, 7)
    yield Request(shared + text(40, 11), 20), 0
    yield Request(shared + text(40, 11), 20), 4000
    yield Request(shared + text(40, 13), 20), 3960
    prompt, num_shared = shared + text(40, 17), 3960
    for turn in range(5):
        yield Request(prompt, 20), num_shared
        num_shared = len(prompt)
        prompt += text(18, 19 + turn) + text(60, 29 + turn)


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gemma3", marks=KERNELS),
        pytest.param("gpt-oss", marks=(KERNELS, pytest.mark.slow)),
        "delta_net",
        pytest.param("mamba2", marks=pytest.mark.slow),
        pytest.param("convolution", marks=pytest.mark.slow),
    ],
)
def test_shared_tokens_are_evaluated_once(name: str) -> None:
    model, expected = long_model(name), dict[Request, Result]()
    with Engine(model, settings=SETTINGS) as engine:
        for request, num_shared in requests():
            (result,) = request.do(engine)
            assert num_shared - result.reuse.tokens <= MOST_EVALUATED, request
            if request not in expected:
                expected[request] = alone(model, request)
            assert result.same(expected[request])


def alone(model: Model, request: Request) -> Result:
    with Engine(model, settings=SETTINGS) as engine:
        return request.do(engine)[0]
