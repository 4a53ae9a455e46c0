"""Only sampled tokens are multiplied by packed weights."""

from collections.abc import Callable

import pytest
import torch
from packed_model import packed_model, spec_of
from torch import Tensor

import kvkeep
from kvkeep import PrefixStore, Sampling, SessionGroup
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.instruction_sets import selected_set
from kvkeep.compiled.matrices import MAX_KERNEL_ROWS
from kvkeep.compiled.products import prompt_products
from kvkeep.evaluate.perplexity import perplexity_points
from kvkeep.executors import new_decoder
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.prefixes.store import BLOCK_TOKENS

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

PROMPT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(65)]
# Packing to 4 bits loses so much of these weights that no rounding could be taken for it.
PACKED = packed_model(spec_of(), 4, lossless=False)
ROUNDED = 0.1  # bfloat16 alone makes up to 0.03, packing 0.4 and more


def plain(model: Model) -> Model:
    """Return the same model without packed layers; the head stays packed."""
    packed = {k: v for k, v in model.decoder.packed.items() if k == "lm_head.weight"}
    decoder = new_decoder(model.spec, model.decoder.tensors, packed)
    return Model(model.name, model.folder, decoder, model.text)


def fed_in_steps_of(model: Model, step: int, **settings: object) -> Session:
    session = model.session(prefill_step=step, **settings)  # type: ignore[arg-type]
    session.feed(PROMPT)
    return session


def fed_token_by_token(model: Model) -> Session:
    session = model.session()
    for token in PROMPT:
        session.feed([token])
    return session


def scored(model: Model) -> Session:
    session = model.session(prefill_step=1)
    session.score(PROMPT)
    return session


def rewound(model: Model) -> Session:
    session = model.session()
    session.feed(PROMPT)
    for _ in range(5):
        session.next_token()
    session.rewind(5)
    return session


def edited(model: Model, recompute: str) -> Session:
    session = model.session()
    session.feed([*PROMPT[:30], 9, 8, *PROMPT[31:]])
    session.replace(30, 32, PROMPT[30:31], recompute=recompute)  # type: ignore[arg-type]
    return session


MADE: dict[str, Callable[[Model], Session]] = {
    "one by one": lambda model: fed_in_steps_of(model, 1),
    "a rest of one": lambda model: fed_in_steps_of(model, 64, keep=0),
    "one kept": lambda model: fed_in_steps_of(model, 64, keep=1),
    "one a call": fed_token_by_token,
    "scored": scored,
    "rewound": rewound,
    "edited": lambda model: edited(model, "none"),
    "edited, with its suffix": lambda model: edited(model, "suffix"),
    "quantised cells": lambda model: fed_in_steps_of(model, 1, kv_bits="8"),
    "a full window": lambda model: fed_in_steps_of(model, 1, max_kv_size=40),
}


def cells(session: Session) -> list[Tensor]:
    actual = []
    for segment in session.cache.segments:
        read = segment.read(0, segment.length).dequantise(torch.float32)
        actual += [read.keys, read.values, read.positions]
    return actual


def relative_distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def last(session: Session) -> Tensor:
    assert session.logits is not None
    return session.logits


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_prompts_are_evaluated_as_by_a_model_without_packed_weights(
    make: Callable[[Model], Session],
) -> None:
    session, expected = make(PACKED), make(plain(PACKED))
    assert session.tokens == expected.tokens == PROMPT
    assert all(torch.equal(*pair) for pair in zip(cells(session), cells(expected), strict=True))
    assert torch.equal(last(session), last(expected))


@pytest.mark.parametrize("step", [1, 64, 7])
def test_the_prefill_step_changes_logits_by_no_more_than_rounding(step: int) -> None:
    whole = last(fed_in_steps_of(PACKED, 512, keep=0))
    actual = last(fed_in_steps_of(PACKED, step, keep=0))
    assert relative_distance(actual, whole) <= ROUNDED


def test_sampled_tokens_read_packed_weights() -> None:
    session, other = fed_in_steps_of(PACKED, 512), fed_in_steps_of(plain(PACKED), 512)
    assert torch.equal(last(session), last(other))
    assert session.next_token() == other.next_token()
    assert relative_distance(last(session), last(other)) > 4 * ROUNDED


def test_a_group_reads_packed_weights_as_each_session_alone() -> None:
    parent = fed_in_steps_of(PACKED, 512)
    together, alone = [parent.fork() for _ in range(3)], [parent.fork() for _ in range(3)]
    how = [Sampling(temperature=1, seed=seed) for seed in range(3)]
    for _ in range(4):
        SessionGroup(together).next_tokens(how)
        for session, each in zip(alone, how, strict=True):
            session.next_token(each)
    assert all(torch.equal(last(a), last(b)) for a, b in zip(together, alone, strict=True))


def test_score_as_written_reads_packed_weights() -> None:
    prompt, written = (PACKED.session() for _ in range(2))
    first, second = prompt.score(PROMPT), written.score(PROMPT, token_by_token=True)
    assert prompt.tokens == written.tokens
    assert (first[1:] - second[1:]).abs().max() > 0.1
    # As the model itself would: sampled one by one, the same tokens leave the same cells.
    session = PACKED.session()
    session.feed(PROMPT[:1])
    chosen = [session.next_token() for _ in range(10)]
    other = PACKED.session()
    other.feed(PROMPT[:1])
    other.score(chosen, token_by_token=True)
    assert all(torch.equal(*pair) for pair in zip(cells(session), cells(other), strict=True))


def test_cells_in_a_prefix_store_do_not_depend_on_the_step(tmp_path) -> None:  # type: ignore[no-untyped-def]
    store, prompt = PrefixStore(tmp_path), (PROMPT * 4)[: BLOCK_TOKENS + 4]
    PACKED.session(prefill_step=1, store=store).feed(prompt)
    session, expected = PACKED.session(store=store), PACKED.session()
    assert session.feed(prompt).reused == BLOCK_TOKENS
    expected.feed(prompt)
    assert relative_distance(last(session), last(expected)) <= ROUNDED


@pytest.mark.parametrize("step", [20, 8, 1])
def test_the_default_model_evaluates_a_prompt_alike_with_any_weights(
    smollm2: Model, step: int
) -> None:
    assert smollm2.weights == "Q4_1"
    ids = smollm2.text.encode("The cells of a prompt are those of its own weights, all of them.")
    actual = []
    for model in (smollm2, kvkeep.load_model(weights="bf16")):
        session = model.session(keep=0, prefill_step=step)
        session.feed((ids * 2)[:20])
        actual.append(cells(session))
    if step > MAX_KERNEL_ROWS and not prompt_products().row_bits:  # the same, by the same library
        assert all(torch.equal(*pair) for pair in zip(*actual, strict=True))
    for one, other in zip(*actual, strict=True):
        assert relative_distance(one.float(), other.float()) <= ROUNDED


def test_a_prompt_as_integers_is_that_of_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fast bfloat16 products, a prompt's weights are not rounded either."""
    monkeypatch.setattr("kvkeep.compiled.products.has_fast_bf16", lambda: False)
    monkeypatch.setattr("kvkeep.compiled.products._INTEGER_SETS", (selected_set().name,))
    tensors = {k: v for k, v in PACKED.decoder.tensors.items() if k not in PACKED.decoder.packed}
    decoder = new_decoder(PACKED.spec, tensors, PACKED.decoder.packed)
    model = Model(PACKED.name, PACKED.folder, decoder, PACKED.text)
    assert decoder.executor.name.endswith("packed weights as integers")
    session, one_by_one = model.session(), model.session()
    session.feed(PROMPT)
    one_by_one.score(PROMPT, token_by_token=True)
    assert relative_distance(last(session), last(one_by_one)) <= ROUNDED
    again = model.session(prefill_step=20)
    again.feed(PROMPT)
    assert relative_distance(last(again), last(session)) <= ROUNDED


def test_perplexity_of_a_written_text_reads_packed_weights() -> None:
    prompt, written, other, by_one = (
        list(perplexity_points(model.session(), PROMPT, token_by_token=written))[-1].perplexity
        for model in (PACKED, plain(PACKED))
        for written in (False, True)
    )
    assert prompt == other
    assert abs(by_one - other) < 0.03 * other < abs(written - other)
