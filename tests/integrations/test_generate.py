"""`generate` returns the same with a KvkeepCache as with transformers' own cache."""

import copy
import itertools

import pytest
import torch
from topics import topic_ids
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvkeep.errors import InvalidArgument
from kvkeep.integrations.transformers import KvkeepCache
from kvkeep.model import Model

TEXTS = ["Hello there, my", "The capital of France is a city which is called", "A list: one, two,"]
DECODING = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 50},
    "beam search": {"do_sample": False, "num_beams": 4},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
    "in chunks": {"do_sample": False, "prefill_chunk_size": 3},
}


def full(model: PreTrainedModel) -> KvkeepCache:
    return KvkeepCache(model, 256, policy="full")


def generated(
    model: PreTrainedModel, inputs, cache=None, tokens: int = 12, **options
) -> torch.Tensor:
    torch.manual_seed(3)
    if cache is not None:
        options["past_key_values"] = cache
    elif "prefill_chunk_size" in options:
        options.pop("prefill_chunk_size")
    return model.generate(**inputs, max_new_tokens=tokens, pad_token_id=0, **options)


@pytest.mark.parametrize(("decoding", "rows"), [*((each, 3) for each in DECODING), ("greedy", 1)])
def test_generate_returns_the_same_tokens(
    model: PreTrainedModel, tokenizer, decoding: str, rows: int
) -> None:
    inputs = tokenizer(TEXTS[-rows:], return_tensors="pt", padding=True)
    expected = generated(model, inputs, **DECODING[decoding])
    assert torch.equal(generated(model, inputs, full(model), **DECODING[decoding]), expected)


@pytest.mark.parametrize(("beams", "healing"), [(1, True), (3, False)])
def test_stop_strings_and_token_healing_work(
    model: PreTrainedModel, tokenizer, beams: int, healing: bool
) -> None:
    """Both need a tokenizer, which `generate` passes to each forward."""
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    options = {
        "do_sample": False,
        "num_beams": beams,
        "tokenizer": tokenizer,
        "token_healing": healing,
    }
    unstopped = tokenizer.decode(
        generated(model, inputs, **options)[0, inputs.input_ids.shape[1] :]
    )
    stop = unstopped[len(unstopped) // 2 :][:4]
    expected = generated(model, inputs, stop_strings=[stop], **options)
    if beams == 1:  # the best of several beams may be one without a stop string
        assert expected.shape[1] < inputs.input_ids.shape[1] + 12
    output = generated(model, inputs, full(model), stop_strings=[stop], **options)
    assert torch.equal(output, expected)


def test_prompt_lookup_removes_rejected_tokens(model: PreTrainedModel, tokenizer) -> None:
    inputs = tokenizer("one two three one two three one two", return_tensors="pt")
    expected = generated(model, inputs, do_sample=False, tokens=40)
    cache = full(model)
    output = generated(model, inputs, cache, do_sample=False, tokens=40, prompt_lookup_num_tokens=5)
    assert torch.equal(output, expected)
    assert list(cache.tokens) == output[0, : len(cache.tokens)].tolist()


def test_an_untrained_assistant_model_changes_no_tokens(model: PreTrainedModel, tokenizer) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    assistant = LlamaForCausalLM(config).eval()
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    expected = generated(model, inputs, do_sample=False)
    output = generated(model, inputs, full(model), do_sample=False, assistant_model=assistant)
    assert torch.equal(output, expected)


def test_an_assistant_model_of_which_some_tokens_are_rejected_changes_none(
    model: PreTrainedModel, tokenizer
) -> None:
    assistant, calls = copy.deepcopy(model), list[int]()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=random))
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    expected = generated(model, inputs, do_sample=False, tokens=30)
    cache = full(model)
    handle = model.register_forward_pre_hook(lambda *_: calls.append(len(cache.tokens)))
    output = generated(model, inputs, cache, do_sample=False, tokens=30, assistant_model=assistant)
    handle.remove()
    assert torch.equal(output, expected)
    added = [after - before for before, after in itertools.pairwise(calls)]
    assert max(added) > 1
    assert 1 in added, "no step in which all that the assistant proposed was rejected"


def test_prompt_lookup_is_refused_after_evictions(model: PreTrainedModel, tokenizer) -> None:
    cache = KvkeepCache(model, 16)
    inputs = tokenizer("one two three " * 8 + "one two", return_tensors="pt")
    with pytest.raises(InvalidArgument, match="evicted"):
        generated(model, inputs, cache, do_sample=False, tokens=40, prompt_lookup_num_tokens=5)


def test_prompts_of_several_turns(model: PreTrainedModel, tokenizer) -> None:
    turns = ["A short story about a dog.", " And then?", " What did the cat say?"]

    def conversation(cache) -> list[int]:
        ids = tokenizer(turns[0], return_tensors="pt").input_ids
        for turn in [*turns[1:], None]:
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
            if turn is not None:
                more = tokenizer(turn, return_tensors="pt").input_ids
                ids = torch.cat((ids, more), 1)
        return ids[0].tolist()

    assert conversation(full(model)) == conversation(DynamicCache(config=model.config))


def test_a_prompt_six_times_as_long_as_the_cache(model: PreTrainedModel, own_fp32: Model) -> None:
    """Returns what kvkeep's own forward does, as in SinkCache's tests."""
    ids = topic_ids(own_fp32)[:1200]
    own = own_fp32.session(200, 4)
    own.feed(ids)
    expected = [own.next_token() for _ in range(12)]
    cache = KvkeepCache(model, 200, 4)
    output = model.generate(
        torch.tensor([ids]), past_key_values=cache, max_new_tokens=12, do_sample=False
    )
    assert output[0, 1200:].tolist() == expected
    assert cache.session.cache.cells == 200
    spec = own_fp32.spec
    assert cache.session.cache.nbytes < 201 * 2 * spec.layers * spec.kv_heads * 16 * 4 * 1.01


def test_prompts_of_several_turns_in_a_bounded_cache(
    model: PreTrainedModel, own_fp32: Model
) -> None:
    """SinkCache's test of iterative prompts; each turn is longer than the cache."""
    ids, cache = topic_ids(own_fp32)[:240], KvkeepCache(model, 48, 4)
    own = own_fp32.session(48, 4)
    text: list[int] = []
    for first in range(0, 240, 80):
        turn = ids[first : first + 80]
        own.feed(turn)
        expected = [own.next_token() for _ in range(10)]
        ids_so_far = torch.tensor([text + turn])
        # `generate` ends with the last sampled token and does not evaluate it.
        output = model.generate(
            ids_so_far, past_key_values=cache, max_new_tokens=10, do_sample=False
        )
        text = output[0].tolist()
        assert text[-10:] == expected


def test_each_row_of_a_batch_is_bounded_separately(model: PreTrainedModel, tokenizer) -> None:
    texts = [text * 4 for text in TEXTS]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    batch = KvkeepCache(model, 24, 2)
    output = generated(model, inputs, batch, do_sample=False, num_beams=1)
    for row, text in enumerate(texts):
        alone = tokenizer(text, return_tensors="pt")
        expected = generated(model, alone, KvkeepCache(model, 24, 2), do_sample=False)
        assert output[row, -12:].tolist() == expected[0, -12:].tolist()
    assert [session.cache.cells for session in batch.sessions] == [24, 24, 24]


def test_beams_share_segments(model: PreTrainedModel, tokenizer) -> None:
    inputs = tokenizer(TEXTS[1] * 20, return_tensors="pt")
    cache = KvkeepCache(model, 1024, policy="full")
    generated(model, inputs, cache, do_sample=False, num_beams=4, tokens=30)
    segments = [len(session.cache.segments) for session in cache.sessions]
    assert max(segments) <= 40


@torch.no_grad()
def test_scores_in_bfloat16_equal_those_of_kvkeeps_own_forward(
    bf16_model: PreTrainedModel, own_bf16: Model
) -> None:
    """The mean log probability of the default model in bfloat16, as users run it."""
    ids = topic_ids(own_bf16)[:200]
    cache = KvkeepCache(bf16_model, 96, 4)
    logits = bf16_model(torch.tensor([ids]), past_key_values=cache).logits[0]
    scores = logits.float().log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    own = own_bf16.session(96, 4).score(ids)[1:]
    assert abs(scores.mean().item() - own.mean().item()) < 0.01


def test_crop_removes_columns_of_all_rows_or_none(model: PreTrainedModel) -> None:
    """A row with fewer tokens loses padding, too."""
    cache = full(model)
    ids, mask = torch.tensor([[5, 6, 7, 8], [0, 0, 0, 9]]), torch.ones(2, 4, dtype=torch.int64)
    mask[1, :3] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(InvalidArgument, match="at most the 4 columns"):
            cache.crop(-5)
        assert [list(session.tokens) for session in cache.sessions] == [[5, 6, 7, 8], [9]]
        cache.crop(-2)
        assert [list(session.tokens) for session in cache.sessions] == [[5, 6], []]
        assert (cache.padding, cache.get_seq_length()) == ([0, 2], 2)
        model(ids[:, 2:], attention_mask=mask, past_key_values=cache)
    assert [list(session.tokens) for session in cache.sessions] == [[5, 6, 7, 8], [9]]
