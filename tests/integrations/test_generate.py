"""`generate` writes with a KvkeepCache what it writes with transformers' own, in each way."""

import pytest
import torch
from topics import topic_ids
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvkeep.errors import InvalidArgument
from kvkeep.integrations.transformers import KvkeepCache
from kvkeep.model import Model

TEXTS = ["Hello there, my", "The capital of France is a city which is called", "A list: one, two,"]
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 50},
    "beam search": {"do_sample": False, "num_beams": 4},
    "beams that are sampled": {"do_sample": True, "num_beams": 3},
    "several of each": {"do_sample": True, "num_return_sequences": 2},
    "in chunks": {"do_sample": False, "prefill_chunk_size": 3},
}


def full(model: PreTrainedModel) -> KvkeepCache:
    return KvkeepCache(model, 256, policy="full")


def written(model: PreTrainedModel, inputs, cache=None, tokens: int = 24, **how) -> torch.Tensor:
    torch.manual_seed(3)
    given = {} if cache is None else {"past_key_values": cache}
    if "prefill_chunk_size" in how and cache is None:
        how.pop("prefill_chunk_size")
    return model.generate(**inputs, **given, max_new_tokens=tokens, pad_token_id=0, **how)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 3])
def test_it_writes_the_same(model: PreTrainedModel, tokenizer, way: str, rows: int) -> None:
    inputs = tokenizer(TEXTS[-rows:], return_tensors="pt", padding=True)
    expected = written(model, inputs, **WAYS[way])
    assert torch.equal(written(model, inputs, full(model), **WAYS[way]), expected)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("healing", [False, True])
def test_arguments_that_choose_tokens_by_text_work(
    model: PreTrainedModel, tokenizer, beams: int, healing: bool
) -> None:
    """Stop strings and token healing need a tokenizer, which `generate` hands to each forward."""
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    how = {"do_sample": False, "num_beams": beams, "tokenizer": tokenizer, "token_healing": healing}
    unstopped = tokenizer.decode(written(model, inputs, **how)[0, inputs.input_ids.shape[1] :])
    stop = unstopped[len(unstopped) // 2 :][:4]
    expected = written(model, inputs, stop_strings=[stop], **how)
    if beams == 1:  # the best of several beams may be one that goes on
        assert expected.shape[1] < inputs.input_ids.shape[1] + 24
    found = written(model, inputs, full(model), stop_strings=[stop], **how)
    assert torch.equal(found, expected)


def test_prompt_lookup_takes_tokens_back(model: PreTrainedModel, tokenizer) -> None:
    inputs = tokenizer("one two three one two three one two", return_tensors="pt")
    expected = written(model, inputs, do_sample=False, tokens=40)
    cache = full(model)
    found = written(model, inputs, cache, do_sample=False, tokens=40, prompt_lookup_num_tokens=5)
    assert torch.equal(found, expected)
    assert list(cache.tokens) == found[0, : len(cache.tokens)].tolist()


def test_an_assistant_that_is_wrong_costs_nothing_but_time(
    model: PreTrainedModel, tokenizer
) -> None:
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
    expected = written(model, inputs, do_sample=False)
    found = written(model, inputs, full(model), do_sample=False, assistant_model=assistant)
    assert torch.equal(found, expected)


def test_tokens_are_not_taken_back_once_others_were_forgotten_for_them(
    model: PreTrainedModel, tokenizer
) -> None:
    cache = KvkeepCache(model, 16)
    inputs = tokenizer("one two three one two three one two", return_tensors="pt")
    with pytest.raises(InvalidArgument, match="forgotten"):
        written(model, inputs, cache, do_sample=False, tokens=40, prompt_lookup_num_tokens=5)


def test_prompts_that_come_one_after_another(model: PreTrainedModel, tokenizer) -> None:
    turns = ["A short story about a dog.", " And then?", " What did the cat say?"]

    def told(cache) -> list[int]:
        ids = tokenizer(turns[0], return_tensors="pt").input_ids
        for turn in [*turns[1:], None]:
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
            if turn is not None:
                more = tokenizer(turn, return_tensors="pt").input_ids
                ids = torch.cat((ids, more), 1)
        return ids[0].tolist()

    assert told(full(model)) == told(DynamicCache(config=model.config))


def test_three_thousand_tokens_in_512_cells(model: PreTrainedModel, own_fp32: Model) -> None:
    """SinkCache's hard test, a prompt six times as long as the cache; by kvkeep's own forward."""
    ids = topic_ids(own_fp32)[:3000]
    own = own_fp32.session(512, 4)
    own.feed(ids)
    expected = [own.next_token() for _ in range(24)]
    cache = KvkeepCache(model, 512, 4)
    found = model.generate(
        torch.tensor([ids]), past_key_values=cache, max_new_tokens=24, do_sample=False
    )
    assert found[0, 3000:].tolist() == expected
    assert cache.session.cache.cells == 512
    assert cache.session.cache.nbytes < 513 * 2 * 30 * 3 * 64 * 4 * 1.01


def test_prompts_one_after_another_in_a_bounded_cache(
    model: PreTrainedModel, own_fp32: Model
) -> None:
    """SinkCache's test of iterative prompts, beyond its budget in each turn."""
    ids, cache = topic_ids(own_fp32)[:240], KvkeepCache(model, 48, 4)
    own = own_fp32.session(48, 4)
    text: list[int] = []
    for first in range(0, 240, 80):
        turn = ids[first : first + 80]
        own.feed(turn)
        expected = [own.next_token() for _ in range(10)]
        given = torch.tensor([text + turn])
        # The last token that is written is not read: `generate` ends with it.
        found = model.generate(given, past_key_values=cache, max_new_tokens=10, do_sample=False)
        text = found[0].tolist()
        assert text[-10:] == expected


def test_rows_of_a_batch_are_bounded_each_by_itself(model: PreTrainedModel, tokenizer) -> None:
    texts = [text * 4 for text in TEXTS]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    together = KvkeepCache(model, 24, 2)
    found = written(model, inputs, together, do_sample=False, num_beams=1)
    for row, text in enumerate(texts):
        alone = tokenizer(text, return_tensors="pt")
        expected = written(model, alone, KvkeepCache(model, 24, 2), do_sample=False)
        assert found[row, -24:].tolist() == expected[0, -24:].tolist()
    assert [session.cache.cells for session in together.sessions] == [24, 24, 24]


def test_beams_share_what_they_have_in_common(model: PreTrainedModel, tokenizer) -> None:
    inputs = tokenizer(TEXTS[1] * 20, return_tensors="pt")
    cache = KvkeepCache(model, 1024, policy="full")
    written(model, inputs, cache, do_sample=False, num_beams=4, tokens=60)
    segments = [len(session.cache.segments) for session in cache.sessions]
    assert max(segments) <= 40


@torch.no_grad()
def test_as_users_run_it(rounded: PreTrainedModel, own_bf16: Model) -> None:
    """The default model in bfloat16: as likely as by kvkeep's own forward."""
    ids = topic_ids(own_bf16)[:700]
    cache = KvkeepCache(rounded, 256, 4)
    logits = rounded(torch.tensor([ids]), past_key_values=cache).logits[0]
    scores = logits.float().log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    own = own_bf16.session(256, 4).score(ids)[1:]
    assert abs(scores.mean().item() - own.mean().item()) < 0.01
