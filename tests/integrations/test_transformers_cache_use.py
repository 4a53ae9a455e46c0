"""A KvkeepCache copied, pickled, differentiated, and used with a model that was moved since."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from benchmarks.architectures import small_model
from kvkeep.errors import InvalidArgument
from kvkeep.integrations.transformers import KvkeepCache, from_transformers, unhook

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def read(model: PreTrainedModel, cache: Cache, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def test_a_forward_whose_gradients_could_be_asked_for_is_refused() -> None:
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
def test_a_forward_without_gradients_reads(mode: Callable[[], torch.no_grad]) -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 64)
    with mode():
        found = model(IDS, labels=IDS, past_key_values=cache)
        expected = model(IDS, labels=IDS)
    assert torch.allclose(found.loss, expected.loss, atol=1e-5)
    assert list(cache.tokens) == IDS[0].tolist()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_a_copied_cache_is_a_fork(
    model: PreTrainedModel, tokenizer, copied: Callable[[KvkeepCache], KvkeepCache]
) -> None:
    """As transformers shows it for a shared prefix: read once, and copied for each prompt."""
    prefix = "You are a helpful assistant who answers in one word."
    shared = KvkeepCache(model, 256, policy="full")
    read(model, shared, tokenizer(prefix, return_tensors="pt").input_ids)
    before = list(shared.tokens)
    for question in (" The capital of France is", " Two and two is"):
        inputs = tokenizer(prefix + question, return_tensors="pt")
        how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        cache = copied(shared)
        assert cache.executor is shared.executor
        found = model.generate(**inputs, past_key_values=cache, **how)
        assert torch.equal(found, model.generate(**inputs, **how))
        assert list(shared.tokens) == before


def test_a_copy_within_something_else_is_one_fork() -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 64)
    read(model, cache)
    one, other = copy.deepcopy([cache, cache])
    assert one is other
    assert one is not cache
    assert list(one.tokens) == list(cache.tokens)


def test_a_copied_session_is_a_fork() -> None:
    """Each goes its own way, in a window that has begun to rotate too."""
    session = from_transformers(small_model("llama")).session(16, 2)
    session.feed(list(range(3, 43)))
    for copied in (copy.copy, copy.deepcopy):
        expected, other = session.fork(), copied(session)
        assert other.core.model is session.core.model
        other.feed([7] * 20)
        assert len(session.tokens) == 40
        for each in (expected, session):
            each.feed([9] * 20)
        assert torch.equal(expected.logits, session.logits)
        session.rewind(len(session.tokens))
        session.feed(list(range(3, 43)))


def test_caches_and_sessions_are_saved_and_not_pickled() -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 64)
    read(model, cache)
    for thing in (cache, cache.session):
        with pytest.raises(InvalidArgument, match=r"snapshot\(\)\.save"):
            pickle.dumps(thing)
        with pytest.raises(InvalidArgument, match=r"snapshot\(\)\.save"):
            torch.save({"it": thing}, io.BytesIO())


def pickled(model: PreTrainedModel) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_model_is_copied_with_what_hangs_on_it(
    copied: Callable[[PreTrainedModel], PreTrainedModel], unpacked_folder, tokenizer
) -> None:
    """The copy is a model by itself, and both take caches of their own."""
    model = small_model("llama")
    cache = KvkeepCache(model, 64, tokenizer=tokenizer)
    other = copied(model)
    with pytest.raises(InvalidArgument, match="another model"):
        read(other, cache)
    found = read(other, KvkeepCache(other, 64, tokenizer=tokenizer))
    assert torch.equal(found, read(model, cache))
    unhook(other)
    assert not any(each._forward_pre_hooks for each in other.modules())
    assert torch.equal(read(model, KvkeepCache(model, 64)), found)


def test_a_model_that_was_moved_since_is_refused_by_name() -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 64, policy="full")
    expected, before = read(model, cache), list(cache.tokens)
    session = cache.fork().session
    model.to(torch.bfloat16)
    for use in (
        lambda: read(model, cache),
        lambda: model.generate(IDS, past_key_values=cache.fork(), max_new_tokens=2),
        lambda: cache.insert(0, [5, 6]),
        lambda: cache.rewind(1),
        lambda: session.feed([5]),
        lambda: session.next_token(),
    ):
        with pytest.raises(InvalidArgument, match=r"float32 on cpu .* bfloat16 on cpu now"):
            use()
    again = KvkeepCache(model, 64)  # the model is looked at anew for it
    assert read(model, again).dtype == torch.bfloat16
    with pytest.raises(InvalidArgument, match=r"float32 on cpu .* bfloat16 on cpu now"):
        read(model, cache)
    assert list(cache.tokens) == before
    moved_back = small_model("llama")
    other = KvkeepCache(moved_back, 64, policy="full")
    moved_back.to(torch.bfloat16).to(torch.float32)
    assert (read(moved_back, other) - expected).abs().max() < 0.1


@pytest.mark.parametrize("name", ["llama", "smollm3"])  # rotated in all layers; in some of them
def test_autocast_computes_in_its_dtype_and_cells_stay_in_theirs(name: str) -> None:
    model = small_model(name)
    cache = KvkeepCache(model, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = [read(model, cache, IDS), read(model, cache, IDS[:, :1])]
        expected = read(model, DynamicCache(config=model.config), torch.cat((IDS, IDS[:, :1]), 1))
    assert (torch.cat(found, 1) - expected).abs().max() < 0.05
    assert cache.session.cache.layout.dtype == torch.float32
    assert read(model, cache).isfinite().all()
