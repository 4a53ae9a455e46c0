"""A KvkeepCache that is saved, forked, edited, compressed, or used in a way that is refused."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from altered_snapshots import altered
from module_hooks import hooked_modules
from topics import topic_ids
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from benchmarks.architectures import small_model
from kvkeep.errors import (
    CorruptFile,
    FingerprintMismatch,
    InvalidArgument,
    InvalidSnapshot,
    NonFiniteLogits,
    UnsupportedModel,
)
from kvkeep.integrations.transformers import (
    KvkeepCache,
    from_transformers,
    require_version,
    unhook,
)
from kvkeep.model import Model

HYBRIDS = ["qwen3_next", "lfm2", "bamba", "falcon_h1", "zamba2", "granitemoehybrid"]


def logits_of(model: PreTrainedModel, cache, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), past_key_values=cache).logits[0]


def random_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy_logits(model: PreTrainedModel, cache, tokens: int) -> torch.Tensor:
    """Return the logits of greedy decoding, `[tokens, vocab]`."""
    steps, token = [], 5
    for _ in range(tokens):
        steps.append(logits_of(model, cache, [token])[0])
        token = int(steps[-1].argmax())
    return torch.stack(steps)


def require_own_attention(model: PreTrainedModel) -> None:
    """Check that the model attends by itself when it gets a cache of transformers."""
    assert model.config._attn_implementation != "kvkeep"


CONTINUE_IN_ANOTHER_PROCESS = """
import sys, torch
from transformers import AutoModelForCausalLM
from kvkeep.integrations.transformers import KvkeepCache
folder, path, out, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
cache, steps, token = KvkeepCache.load(model, path), [], 5
assert cache.exactness.bit_exact, cache.exactness
for _ in range(64):
    with torch.no_grad():
        steps.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, 0])
    token = int(steps[-1].argmax())
torch.save(torch.stack(steps), out)
"""


def test_another_process_continues_with_equal_bits(
    tiny_folder: Path, own_fp32: Model, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16).eval()
    cache = KvkeepCache(loaded, 64, 4)
    logits_of(loaded, cache, topic_ids(own_fp32)[:150])
    path, out = tmp_path / "cache.kvkeep", tmp_path / "out.pt"
    cache.snapshot().save(path)
    args = [str(tiny_folder), str(path), str(out), "1"]
    subprocess.run(
        [sys.executable, "-c", CONTINUE_IN_ANOTHER_PROCESS, *args], check=True, timeout=600
    )
    assert torch.equal(torch.load(out), greedy_logits(loaded, cache, 64))


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    one, other = small_model("llama"), small_model("qwen3")
    cache = KvkeepCache(one, 32)
    logits_of(one, cache, random_ids(40))
    cache.snapshot().save(tmp_path / "one")
    with pytest.raises(FingerprintMismatch, match="weights"):
        KvkeepCache.load(other, tmp_path / "one")
    with torch.no_grad():
        next(one.parameters())[0, 0] += 1
    with pytest.raises(FingerprintMismatch, match="weights"):
        KvkeepCache.load(one, tmp_path / "one")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    model, path = small_model("llama"), tmp_path / "one"
    cache = KvkeepCache(model, 32)
    logits_of(model, cache, random_ids(40))
    cache.snapshot().save(path)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptFile):
        KvkeepCache.load(model, path)


@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrent_states_are_saved_and_forked_but_not_edited(name: str, tmp_path: Path) -> None:
    model, ids = small_model(name), random_ids(60)
    cache = KvkeepCache(model, 24, 2)
    logits_of(model, cache, ids)
    assert cache.session.cache.recurrent_states
    cache.snapshot().save(tmp_path / "cache")
    fork, restored = cache.fork(), KvkeepCache.load(model, tmp_path / "cache")
    expected = greedy_logits(model, cache, 12)
    for other in (fork, restored):
        assert torch.equal(greedy_logits(model, other, 12), expected)
    with pytest.raises(InvalidSnapshot, match="states"):
        KvkeepCache.restore(model, altered(cache.snapshot(), recurrent_states={}))
    before = list(cache.tokens)
    for edit in (
        lambda: cache.delete(3, 5),
        lambda: cache.insert(4, [7, 8]),
        lambda: cache.rewind(2),
        lambda: cache.crop(-2),
    ):
        with pytest.raises(InvalidArgument):
            edit()
    assert list(cache.tokens) == before
    cache.rewind(len(before))  # removing all tokens is always possible
    logits = logits_of(model, cache, ids[:20])
    assert torch.equal(logits, logits_of(model, KvkeepCache(model, 24, 2), ids[:20]))


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_compressed_hybrid_keeps_its_states(name: str, tmp_path: Path) -> None:
    model, ids = small_model(name), random_ids(60)
    cache = KvkeepCache(model, 128, policy="full")
    logits_of(model, cache, ids)
    states = cache.session.cache.recurrent_states
    assert cache.compress(2.0, method="knorm", recent=10).cells_after == 30
    for key, state in cache.session.cache.recurrent_states.items():
        assert torch.equal(state, states[key])
    cache.snapshot().save(tmp_path / "cache")
    restored = KvkeepCache.load(model, tmp_path / "cache")
    assert torch.equal(greedy_logits(model, restored, 9), greedy_logits(model, cache, 9))


def test_a_bounded_hybrid_evicts_cells_and_keeps_states() -> None:
    """Logits are equal within the window; after it, attention sees the newest tokens only."""
    model, ids = small_model("qwen3_next"), random_ids(60)
    bounded, full = KvkeepCache(model, 24, 0), DynamicCache(config=model.config)
    logits, expected = logits_of(model, bounded, ids), logits_of(model, full, ids)
    assert (logits[:24] - expected[:24]).abs().max() < 1e-4
    assert (logits[40:] - expected[40:]).abs().max() > 1e-2
    assert bounded.session.cache.cells == 24


def test_edited_logits_equal_those_of_the_edited_text(model: PreTrainedModel, tokenizer) -> None:
    text = "The house is red. The garden is green. The sky is"
    cache = KvkeepCache(model, 256, policy="full", tokenizer=tokenizer)
    ids = tokenizer(text).input_ids
    logits_of(model, cache, ids)
    cache.replace(3, 4, tokenizer(" blue").input_ids, recompute="suffix")
    edited = [*ids[:3], *tokenizer(" blue").input_ids, *ids[4:]]
    assert list(cache.tokens) == edited
    expected = logits_of(model, DynamicCache(config=model.config), [*edited, 9])[-1]
    assert (logits_of(model, cache, [9])[-1] - expected).abs().max() < 1e-3
    cache.insert(0, "Once. ")
    cache.delete(0, 2)
    assert cache.get_seq_length() == len(cache.tokens)
    more = torch.cat((cache.input_ids, torch.tensor([[9]])), 1)
    output = model.generate(more, past_key_values=cache.fork(), max_new_tokens=3, min_new_tokens=3)
    assert output.shape[1] == len(cache.tokens) + 4


def test_pinned_spans_are_not_evicted(model: PreTrainedModel, own_fp32: Model) -> None:
    ids = topic_ids(own_fp32)[:300]
    cache = KvkeepCache(model, 64, 4)
    logits_of(model, cache, ids[:40])
    cache.name("rule", 10, 20)
    cache.pin("rule")
    logits_of(model, cache, ids[40:])
    assert cache.spans["rule"].remembered == 10
    cache.unpin("rule")
    logits_of(model, cache, ids[:60])
    assert cache.spans["rule"].remembered == 0


@pytest.mark.parametrize("method", [None, "keydiff", "snapkv", "kvzip+"])
def test_compressed_logits_equal_those_of_kvkeeps_own_forward(
    model: PreTrainedModel, own_fp32: Model, tokenizer, method
) -> None:
    ids = topic_ids(own_fp32)[:400]
    cache = KvkeepCache(model, 1024, policy="full", tokenizer=tokenizer)
    logits_of(model, cache, ids)
    own = own_fp32.session(1024, policy="full")
    own.feed(ids)
    cache.compress(4.0, method=method)
    own.compress(4.0, method=method)
    assert cache.session.cache.cells == own.cache.cells < 200
    own.feed(ids[:20])
    logits = logits_of(model, cache, ids[:20])[-1]
    assert (logits - own.logits).abs().max() < 1e-2


def test_quantised_logits_equal_those_of_kvkeeps_own_forward(
    model: PreTrainedModel, own_fp32: Model
) -> None:
    ids = topic_ids(own_fp32)[:200]
    cache, own = KvkeepCache(model, 128, 4, kv_bits="8"), own_fp32.session(128, 4, kv_bits="8")
    own.feed(ids)
    assert (logits_of(model, cache, ids)[-1] - own.logits).abs().max() < 2e-2
    assert cache.session.cache.nbytes == own.cache.nbytes


@pytest.mark.parametrize("policy", ["shift", "self_extend", "archive"])
def test_other_policies_equal_kvkeeps_own_forward(
    model: PreTrainedModel, own_fp32: Model, policy: str
) -> None:
    ids = topic_ids(own_fp32)[:300]
    budget = 400 if policy == "self_extend" else 128  # all tokens
    cache, own = KvkeepCache(model, budget, policy=policy), own_fp32.session(budget, policy=policy)
    own.feed(ids)
    assert (logits_of(model, cache, ids)[-1] - own.logits).abs().max() < 2e-2


@pytest.mark.parametrize("steps", [[400], [200, 1, 199], [1] * 100])
def test_self_extend_beyond_its_window(steps: list[int]) -> None:
    """Cells leave the window in the steps that a forward is split into."""
    model, ids = small_model("llama"), random_ids(sum(steps))
    settings = {"policy": "self_extend", "group": 4, "window": 64}
    cache, own = KvkeepCache(model, 500, **settings), from_transformers(model)
    session = own.session(500, **settings)
    session.feed(ids)
    for count in steps:
        done = len(cache.tokens)
        last = logits_of(model, cache, ids[done : done + count])[-1]
    assert cache.session.cache.cells == session.cache.cells == len(ids)
    assert (last - session.logits).abs().max() < 1e-4


@torch.no_grad()
def test_padding_never_becomes_tokens() -> None:
    model, mask = small_model("llama"), torch.tensor([[0] * 5 + [1] * 27])
    ids = torch.tensor([random_ids(32)])
    cache = KvkeepCache(model, 64, policy="full")
    model(ids, attention_mask=mask, past_key_values=cache)
    assert list(cache.tokens) == ids[0, 5:].tolist()
    with pytest.raises(InvalidArgument, match="drop_padding"):
        _ = cache.input_ids
    more = torch.tensor([random_ids(8, seed=4)])
    short = torch.cat((ids[:, 5:], more), 1)
    with pytest.raises(InvalidArgument, match="padding"):
        model.generate(short, past_key_values=cache, max_new_tokens=2, do_sample=False)
    cache.drop_padding()
    output = model.generate(short, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(output, model.generate(short, max_new_tokens=4, do_sample=False))


@torch.no_grad()
def test_rows_of_different_lengths_are_refused() -> None:
    cache = KvkeepCache(small_model("llama"), 64, policy="full")
    model, ids = cache.model.executor.model, torch.tensor([random_ids(9), random_ids(9)])
    model(ids, past_key_values=cache)
    cache.sessions[1].delete(2, 4)
    with pytest.raises(InvalidArgument, match="different numbers"):
        model(ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_padded_row_of_a_hybrid_begins_without_states() -> None:
    model = small_model("qwen3_next")
    ids = torch.tensor([random_ids(5), random_ids(5, seed=3)])
    mask = torch.tensor([[1] * 5, [0] * 4 + [1]])
    both = KvkeepCache(model, 64, policy="full")
    logits = model(ids, attention_mask=mask, past_key_values=both).logits
    alone = logits_of(model, KvkeepCache(model, 64, policy="full"), [int(ids[1, 4])])
    assert (logits[1, 4] - alone[0]).abs().max() < 1e-4


def test_another_thread_gets_an_error_during_a_forward() -> None:
    model = small_model("llama")
    cache, ids = KvkeepCache(model, 64), random_ids(20)
    done, errors = threading.Event(), []

    def call_model() -> None:
        try:
            logits_of(model, DynamicCache(config=model.config), [5])
        except RuntimeError as error:
            errors.append(str(error))
        done.set()

    def start_thread(*_: object) -> None:
        threading.Thread(target=call_model).start()
        done.wait(60)

    handle = model.model.layers[2].register_forward_pre_hook(start_thread)
    logits = logits_of(model, cache, ids)
    handle.remove()
    assert errors
    assert "two threads" in errors[0]
    assert torch.equal(logits, logits_of(model, KvkeepCache(model, 64), ids))


class ForwardError(Exception):
    pass


def test_a_failed_forward_is_rolled_back(model: PreTrainedModel) -> None:
    cache, ids = KvkeepCache(model, 32, 4), random_ids(50)
    logits_of(model, cache, ids)
    expected = greedy_logits(model, cache.fork(), 8)

    def fail(*_: object) -> None:
        raise ForwardError

    before = cache.tokens
    for more in ([7], random_ids(90)):
        handle = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(ForwardError):
            logits_of(model, cache, more)
        handle.remove()
        assert cache.tokens == before
        require_own_attention(model)
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(greedy_logits(model, cache, 8), expected)


def test_system_exit_in_a_forward_is_rolled_back_at_the_next_use(
    model: PreTrainedModel,
) -> None:
    cache, ids = KvkeepCache(model, 32, 4), random_ids(50)
    logits_of(model, cache, ids)
    expected = greedy_logits(model, cache.fork(), 4)

    def exit_process(*_: object) -> None:
        raise SystemExit

    handle = model.model.layers[1].register_forward_pre_hook(exit_process)
    with pytest.raises(SystemExit):
        logits_of(model, cache, [7])
    handle.remove()
    assert list(cache.snapshot().tokens) == ids  # reading it rolls back as well
    assert torch.equal(greedy_logits(model, cache, 4), expected)
    assert list(cache.tokens)[:50] == ids
    assert len(cache.tokens) == 54
    require_own_attention(model)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_ctrl_c_is_deferred_to_the_end_of_the_step(model: PreTrainedModel) -> None:
    cache, ids = KvkeepCache(model, 32, 4), random_ids(20)
    logits_of(model, cache, ids)
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda *_: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        logits_of(model, cache, [7])
    handle.remove()
    assert list(cache.tokens) == [*ids, 7]
    logits_of(model, cache, [8])


def test_a_forward_with_nan_is_rolled_back() -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 32)
    logits_of(model, cache, [5, 6])
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLogits):
        logits_of(model, cache, [7])
    assert list(cache.tokens) == [5, 6]


def test_other_caches_are_unaffected_and_unhook_removes_all_hooks() -> None:
    model, ids = small_model("gemma3_text"), random_ids(30)
    plain = logits_of(model, DynamicCache(config=model.config), ids)
    assert not hooked_modules(model)
    attributes = set(vars(model))
    cache = KvkeepCache(model, 16)
    logits_of(model, cache, ids)
    assert torch.equal(logits_of(model, DynamicCache(config=model.config), ids), plain)
    unhook(model)
    assert not hooked_modules(model)
    assert set(vars(model)) == attributes
    require_own_attention(model)
    with pytest.raises(InvalidArgument, match="call the model it was made for"):
        logits_of(model, cache, ids)


def test_two_models_alternate_and_refuse_each_others_caches() -> None:
    one, other = small_model("llama"), small_model("glm")
    ids = random_ids(40)
    caches = [KvkeepCache(model, 16, 2) for model in (one, other)]
    alone = [logits_of(model, KvkeepCache(model, 16, 2), ids) for model in (one, other)]
    for first in range(0, 40, 8):
        for model, cache, expected in zip((one, other), caches, alone, strict=True):
            logits = logits_of(model, cache, ids[first : first + 8])
            assert (logits - expected[first : first + 8]).abs().max() < 1e-4
    with pytest.raises(InvalidArgument, match="another model"):
        logits_of(one, caches[1], [5])


@torch.no_grad()
def test_unsupported_arguments_are_refused_before_any_change() -> None:
    model = small_model("llama")
    cache, ids = KvkeepCache(model, 16), torch.tensor([[5, 6, 7]])
    model(ids, past_key_values=cache)
    embeds = torch.zeros(1, 2, 64)
    for arguments, reason in (
        ({"inputs_embeds": embeds}, "input_ids"),
        ({"input_ids": ids, "attention_mask": torch.ones(1, 1, 3, 6)}, "other shapes"),
        ({"input_ids": ids, "attention_mask": torch.ones(1, 3)}, "3 tokens in the cache"),
        ({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "expected"),
        ({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0]])}, "every token"),
        ({"input_ids": ids, "output_attentions": True}, "output_attentions"),
        ({"input_ids": ids, "output_hidden_states": True}, "output_hidden_states"),
        ({"input_ids": ids, "position_ids": torch.tensor([[9, 10, 11]])}, "position"),
        ({"input_ids": ids.expand(2, -1)}, "1 rows"),
    ):
        with pytest.raises((InvalidArgument, UnsupportedModel), match=reason):
            model(**arguments, past_key_values=cache)
        assert list(cache.tokens) == [5, 6, 7]
    with pytest.raises(InvalidArgument, match="tokenizer"):
        cache.insert(0, "text")
    with pytest.raises(InvalidArgument, match="eval"):
        KvkeepCache(small_model("llama").train())
    with pytest.raises(InvalidArgument, match="transformers"):
        KvkeepCache("llama")


def test_unsupported_models_are_refused_with_the_reason() -> None:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    dynamic = LlamaForCausalLM(config).eval()
    before = {name: vars(module).keys() for name, module in dynamic.named_modules()}
    with pytest.raises(UnsupportedModel, match="dynamic"):
        KvkeepCache(dynamic)
    assert {name: vars(module).keys() for name, module in dynamic.named_modules()} == before
    assert not hooked_modules(dynamic)
    for name, reason in (
        ("deepseek_v3", "latent"),
        ("gpt2", "rotary"),
        ("llama4_text", "chunks"),
        ("hunyuan_v1_dense", "rotation"),
        ("mamba", "interface"),
        ("ministral3", "scaled by their position"),
    ):
        with pytest.raises(UnsupportedModel, match=reason):
            KvkeepCache(small_model(name))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=96, d_model=32, d_ff=32, num_layers=1, num_heads=2)
    ).eval()
    with pytest.raises(UnsupportedModel, match="encoder"):
        KvkeepCache(t5)


def test_untested_versions_of_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("4.57.3", "6.0.0"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with pytest.raises(ImportError, match=r"transformers>=5\.\d+,<6"):
            require_version()


def test_a_transformers_model_is_a_kvkeep_model(
    model: PreTrainedModel, own_fp32: Model, tokenizer, tmp_path: Path
) -> None:
    adapted = from_transformers(model, tokenizer)
    prompt = "Once upon a time there was a small"
    texts = []
    for each_model in (adapted, own_fp32):
        session = each_model.session(64, 4)
        session.feed(prompt)
        texts.append("".join(session.stream(20)))
    assert texts[0] == texts[1]
    session = adapted.session(64)
    session.feed(prompt)
    session.snapshot().save(tmp_path / "cache")
    restored = adapted.restore(session.snapshot().load(tmp_path / "cache"))
    assert torch.equal(restored.logits, session.logits)
