"""A KvkeepCache that is copied, pickled or differentiated, or whose model was moved."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from module_hooks import hooked_modules
from transformers import Cache, DynamicCache, PreTrainedModel

from benchmarks.architectures import small_model
from kvkeep.errors import InvalidArgument
from kvkeep.integrations.transformers import KvkeepCache, from_transformers, unhook

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def logits_of(model: PreTrainedModel, cache: Cache, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def test_a_forward_with_gradients_is_refused() -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 64)
    for forward in (model, model.model):
        with pytest.raises(InvalidArgument, match=r"torch\.no_grad"):
            forward(IDS, past_key_values=cache)
    with pytest.raises(InvalidArgument, match=r"torch\.no_grad"):
        model(IDS, labels=IDS, past_key_values=cache)
    assert not cache.tokens
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with pytest.raises(InvalidArgument, match=r"torch\.no_grad"):
        model(IDS, past_key_values=cache)
    model.requires_grad_(False)
    embedded = torch.ones_like(IDS, dtype=torch.float32, requires_grad=True)
    with pytest.raises(InvalidArgument, match=r"torch\.no_grad"):
        model(IDS, attention_mask=embedded, past_key_values=cache)
    assert not cache.tokens
    assert not model(IDS, past_key_values=cache).logits.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_appends_its_tokens(mode: Callable[[], torch.no_grad]) -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 64)
    with mode():
        output = model(IDS, labels=IDS, past_key_values=cache)
        expected = model(IDS, labels=IDS)
    assert torch.allclose(output.loss, expected.loss, atol=1e-5)
    assert list(cache.tokens) == IDS[0].tolist()


@pytest.mark.parametrize("copy_of", [copy.deepcopy, copy.copy])
def test_a_copied_cache_is_a_fork(
    model: PreTrainedModel, tokenizer, copy_of: Callable[[KvkeepCache], KvkeepCache]
) -> None:
    """Prefix reuse as in transformers' documentation: one prefill, copied for each prompt."""
    prefix = "You are a helpful assistant who answers in one word."
    shared = KvkeepCache(model, 256, policy="full")
    logits_of(model, shared, tokenizer(prefix, return_tensors="pt").input_ids)
    before = list(shared.tokens)
    for question in (" The capital of France is", " Two and two is"):
        inputs = tokenizer(prefix + question, return_tensors="pt")
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        cache = copy_of(shared)
        assert cache.executor is shared.executor
        output = model.generate(**inputs, past_key_values=cache, **options)
        assert torch.equal(output, model.generate(**inputs, **options))
        assert list(shared.tokens) == before


def test_deepcopy_of_a_list_forks_a_repeated_cache_once() -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 64)
    logits_of(model, cache)
    one, other = copy.deepcopy([cache, cache])
    assert one is other
    assert one is not cache
    assert list(one.tokens) == list(cache.tokens)


def test_a_copied_session_is_a_fork() -> None:
    """The copies are independent, even if the window has begun to rotate."""
    session = from_transformers(small_model("llama")).session(16, 2)
    session.feed(list(range(3, 43)))
    for copy_of in (copy.copy, copy.deepcopy):
        expected, other = session.fork(), copy_of(session)
        assert other.core.model is session.core.model
        other.feed([7] * 20)
        assert len(session.tokens) == 40
        for continued in (expected, session):
            continued.feed([9] * 20)
        assert torch.equal(expected.logits, session.logits)
        session.rewind(len(session.tokens))
        session.feed(list(range(3, 43)))


def test_caches_and_sessions_cannot_be_pickled() -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 64)
    logits_of(model, cache)
    for value in (cache, cache.session):
        with pytest.raises(InvalidArgument, match=r"snapshot\(\)\.save"):
            pickle.dumps(value)
        with pytest.raises(InvalidArgument, match=r"snapshot\(\)\.save"):
            torch.save({"value": value}, io.BytesIO())


def pickle_round_trip(model: PreTrainedModel) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickle_round_trip])
def test_a_model_is_copied_with_its_hooks(
    copy_of: Callable[[PreTrainedModel], PreTrainedModel], tokenizer
) -> None:
    """The copy is an independent model with caches of its own."""
    model = small_model("llama")
    cache = KvkeepCache(model, 64, tokenizer=tokenizer)
    other = copy_of(model)
    with pytest.raises(InvalidArgument, match="another model"):
        logits_of(other, cache)
    logits = logits_of(other, KvkeepCache(other, 64, tokenizer=tokenizer))
    assert torch.equal(logits, logits_of(model, cache))
    unhook(other)
    assert not hooked_modules(other)
    assert torch.equal(logits_of(model, KvkeepCache(model, 64)), logits)


def test_a_moved_model_is_refused_with_both_places() -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 64, policy="full")
    expected, before = logits_of(model, cache), list(cache.tokens)
    session = cache.fork().session
    model.to(torch.bfloat16)
    for operation in (
        lambda: logits_of(model, cache),
        lambda: model.generate(IDS, past_key_values=cache.fork(), max_new_tokens=2),
        lambda: cache.insert(0, [5, 6]),
        lambda: cache.rewind(1),
        lambda: session.feed([5]),
        lambda: session.next_token(),
    ):
        with pytest.raises(InvalidArgument, match=r"float32 on cpu .* bfloat16 on cpu now"):
            operation()
    new_cache = KvkeepCache(model, 64)  # probes the model again
    assert logits_of(model, new_cache).dtype == torch.bfloat16
    with pytest.raises(InvalidArgument, match=r"float32 on cpu .* bfloat16 on cpu now"):
        logits_of(model, cache)
    assert list(cache.tokens) == before
    moved_back = small_model("llama")
    other = KvkeepCache(moved_back, 64, policy="full")
    moved_back.to(torch.bfloat16).to(torch.float32)
    assert (logits_of(moved_back, other) - expected).abs().max() < 0.1


@pytest.mark.parametrize("name", ["llama", "smollm3"])  # RoPE in all layers; in some
def test_autocast_does_not_change_the_dtype_of_cells(name: str) -> None:
    model = small_model(name)
    cache = KvkeepCache(model, 64)
    with torch.autocast("cpu", torch.bfloat16):
        logits = [logits_of(model, cache, IDS), logits_of(model, cache, IDS[:, :1])]
        expected = logits_of(
            model, DynamicCache(config=model.config), torch.cat((IDS, IDS[:, :1]), 1)
        )
    assert (torch.cat(logits, 1) - expected).abs().max() < 0.05
    assert cache.session.cache.layout.dtype == torch.float32
    assert logits_of(model, cache).isfinite().all()
