"""A KvkeepCache kept, forked, edited and refused."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from altered_snapshots import altered
from topics import topic_ids
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.architectures import small_model
from kvkeep.errors import (
    CorruptFile,
    FingerprintMismatch,
    InvalidArgument,
    InvalidSnapshot,
    NonFiniteLogits,
    UnsupportedModel,
)
from kvkeep.integrations.transformers import KvkeepCache, from_transformers, unhook
from kvkeep.integrations.transformers.versions import require_version
from kvkeep.model import Model

HYBRIDS = ["qwen3_next", "lfm2", "bamba", "falcon_h1", "zamba2", "granitemoehybrid"]


def read(model: PreTrainedModel, cache, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), past_key_values=cache).logits[0]


def random_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def bits(model: PreTrainedModel, cache, tokens: int) -> list[torch.Tensor]:
    """Logits of tokens that are chosen one after another."""
    found, token = [], 5
    for _ in range(tokens):
        found.append(read(model, cache, [token])[0])
        token = int(found[-1].argmax())
    return found


IN_ANOTHER_PROCESS = """
import sys, torch
from transformers import AutoModelForCausalLM
from kvkeep.integrations.transformers import KvkeepCache
folder, path, out, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
cache, found, token = KvkeepCache.load(model, path), [], 5
assert cache.exactness.bit_exact, cache.exactness
for _ in range(64):
    with torch.no_grad():
        found.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, 0])
    token = int(found[-1].argmax())
torch.save(torch.stack(found), out)
"""


def test_another_process_goes_on_to_the_bit(
    rounded: PreTrainedModel, own_bf16: Model, unpacked_folder: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    cache = KvkeepCache(rounded, 128, 4)
    read(rounded, cache, topic_ids(own_bf16)[:300])
    path, out = tmp_path / "cache.kvkeep", tmp_path / "out.pt"
    cache.snapshot().save(path)
    given = [str(unpacked_folder), str(path), str(out), "1"]
    subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, *given], check=True, timeout=600)
    expected = torch.stack(bits(rounded, cache, 64))
    assert torch.equal(torch.load(out), expected)


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    one, other = small_model("llama"), small_model("qwen3")
    cache = KvkeepCache(one, 32)
    read(one, cache, random_ids(40))
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
    read(model, cache, random_ids(40))
    cache.snapshot().save(path)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptFile):
        KvkeepCache.load(model, path)


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_are_kept_forked_and_never_edited(name: str, tmp_path: Path) -> None:
    model, ids = small_model(name), random_ids(60)
    cache = KvkeepCache(model, 24, 2)
    read(model, cache, ids)
    assert cache.session.cache.recurrent
    cache.snapshot().save(tmp_path / "kept")
    fork, restored = cache.fork(), KvkeepCache.load(model, tmp_path / "kept")
    expected = bits(model, cache, 12)
    for other in (fork, restored):
        for found, wanted in zip(bits(model, other, 12), expected, strict=True):
            assert torch.equal(found, wanted)
    with pytest.raises(InvalidSnapshot, match="states"):
        KvkeepCache.restore(model, altered(cache.snapshot(), recurrent={}))
    before, full = list(cache.tokens), KvkeepCache(model, 64, policy="full")
    read(model, full, ids)
    for change in (
        lambda: cache.delete(3, 5),
        lambda: cache.insert(4, [7, 8]),
        lambda: cache.rewind(2),
        lambda: cache.crop(-2),
        lambda: full.compress(2.0, method="knorm"),
    ):
        with pytest.raises(InvalidArgument):
            change()
    assert list(cache.tokens) == before
    cache.rewind(len(before))  # all can always go
    whole = read(model, cache, ids[:20])
    assert torch.equal(whole, read(model, KvkeepCache(model, 24, 2), ids[:20]))


def test_a_hybrid_that_is_bounded_forgets_cells_and_no_states() -> None:
    """Of all tokens in the window: the same; further on its attention sees the newest alone."""
    model, ids = small_model("qwen3_next"), random_ids(60)
    bounded, full = KvkeepCache(model, 24, 0), DynamicCache(config=model.config)
    found, expected = read(model, bounded, ids), read(model, full, ids)
    assert (found[:24] - expected[:24]).abs().max() < 1e-4
    assert (found[40:] - expected[40:]).abs().max() > 1e-2
    assert bounded.session.cache.cells == 24


def test_edits_give_what_reading_the_edited_text_gives(model: PreTrainedModel, tokenizer) -> None:
    text = "The house is red. The garden is green. The sky is"
    cache = KvkeepCache(model, 256, policy="full", tokenizer=tokenizer)
    ids = tokenizer(text).input_ids
    read(model, cache, ids)
    cache.replace(3, 4, tokenizer(" blue").input_ids, recompute="suffix")
    edited = [*ids[:3], *tokenizer(" blue").input_ids, *ids[4:]]
    assert list(cache.tokens) == edited
    expected = read(model, DynamicCache(config=model.config), [*edited, 9])[-1]
    assert (read(model, cache, [9])[-1] - expected).abs().max() < 1e-3
    cache.insert(0, "Once. ")
    cache.delete(0, 2)
    assert cache.get_seq_length() == len(cache.tokens)
    more = torch.cat((cache.input_ids, torch.tensor([[9]])), 1)
    out = model.generate(more, past_key_values=cache.fork(), max_new_tokens=3, min_new_tokens=3)
    assert out.shape[1] == len(cache.tokens) + 4


def test_pins_and_names_hold(model: PreTrainedModel, own_fp32: Model) -> None:
    ids = topic_ids(own_fp32)[:300]
    cache = KvkeepCache(model, 64, 4)
    read(model, cache, ids[:40])
    cache.name("rule", 10, 20)
    cache.pin("rule")
    read(model, cache, ids[40:])
    assert cache.spans["rule"].remembered == 10
    cache.unpin("rule")
    read(model, cache, ids[:60])
    assert cache.spans["rule"].remembered == 0


@pytest.mark.parametrize("method", [None, "keydiff", "snapkv", "kvzip+"])
def test_it_compresses(model: PreTrainedModel, own_fp32: Model, tokenizer, method) -> None:
    ids = topic_ids(own_fp32)[:400]
    cache = KvkeepCache(model, 1024, policy="full", tokenizer=tokenizer)
    read(model, cache, ids)
    own = own_fp32.session(1024, policy="full")
    own.feed(ids)
    cache.compress(4.0, method=method)
    own.compress(4.0, method=method)
    assert cache.session.cache.cells == own.cache.cells < 200
    own.feed(ids[:20])
    found = read(model, cache, ids[:20])[-1]
    assert (found - own.logits).abs().max() < 1e-2


def test_quantised_cells(model: PreTrainedModel, own_fp32: Model) -> None:
    ids = topic_ids(own_fp32)[:200]
    cache, own = KvkeepCache(model, 128, 4, kv_bits="8"), own_fp32.session(128, 4, kv_bits="8")
    own.feed(ids)
    assert (read(model, cache, ids)[-1] - own.logits).abs().max() < 2e-2
    assert cache.session.cache.nbytes == own.cache.nbytes


@pytest.mark.parametrize("policy", ["shift", "self_extend", "archive"])
def test_other_policies(model: PreTrainedModel, own_fp32: Model, policy: str) -> None:
    ids = topic_ids(own_fp32)[:300]
    budget = 400 if policy == "self_extend" else 128  # which holds all
    cache, own = KvkeepCache(model, budget, policy=policy), own_fp32.session(budget, policy=policy)
    own.feed(ids)
    assert (read(model, cache, ids)[-1] - own.logits).abs().max() < 2e-2


@pytest.mark.parametrize("steps", [[1200], [600, 1, 599], [1] * 300])
def test_self_extend_beyond_its_window(steps: list[int]) -> None:
    """Whose cells leave the window in the very steps that a forward is cut into."""
    model, ids = small_model("llama"), random_ids(sum(steps))
    settings = {"policy": "self_extend", "group": 4, "window": 64}
    cache, own = KvkeepCache(model, 1300, **settings), from_transformers(model)
    session = own.session(1300, **settings)
    session.feed(ids)
    for count in steps:
        done = len(cache.tokens)
        last = read(model, cache, ids[done : done + count])[-1]
    assert cache.session.cache.cells == session.cache.cells == len(ids)
    assert (last - session.logits).abs().max() < 1e-4


@torch.no_grad()
def test_padding_is_never_taken_for_tokens() -> None:
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
    found = model.generate(short, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, model.generate(short, max_new_tokens=4, do_sample=False))


@torch.no_grad()
def test_rows_that_were_changed_apart_are_no_batch() -> None:
    cache = KvkeepCache(small_model("llama"), 64, policy="full")
    model, ids = cache.model.executor.model, torch.tensor([random_ids(9), random_ids(9)])
    model(ids, past_key_values=cache)
    cache.sessions[1].delete(2, 4)
    with pytest.raises(InvalidArgument, match="different numbers"):
        model(ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_row_of_a_hybrid_that_begins_later_begins_with_no_states() -> None:
    model = small_model("qwen3_next")
    ids = torch.tensor([random_ids(5), random_ids(5, seed=3)])
    mask = torch.tensor([[1] * 5, [0] * 4 + [1]])
    both = KvkeepCache(model, 64, policy="full")
    found = model(ids, attention_mask=mask, past_key_values=both).logits
    alone = read(model, KvkeepCache(model, 64, policy="full"), [int(ids[1, 4])])
    assert (found[1, 4] - alone[0]).abs().max() < 1e-4


def test_another_thread_waits_for_a_forward_or_gets_an_error() -> None:
    model = small_model("llama")
    cache, ids = KvkeepCache(model, 64), random_ids(20)
    inside, errors = threading.Event(), []

    def other() -> None:
        try:
            read(model, DynamicCache(config=model.config), [5])
        except RuntimeError as error:
            errors.append(str(error))
        inside.set()

    def start(*_: object) -> None:
        threading.Thread(target=other).start()
        inside.wait(60)

    handle = model.model.layers[2].register_forward_pre_hook(start)
    found = read(model, cache, ids)
    handle.remove()
    assert errors
    assert "another thread" in errors[0]
    assert torch.equal(found, read(model, KvkeepCache(model, 64), ids))


class Failed(Exception):
    pass


def test_a_forward_that_fails_leaves_all_as_it_was(model: PreTrainedModel) -> None:
    cache, ids = KvkeepCache(model, 32, 4), random_ids(50)
    read(model, cache, ids)
    expected = bits(model, cache.fork(), 8)

    def fail(*_: object) -> None:
        raise Failed

    before = cache.tokens
    for more in ([7], random_ids(90)):
        handle = model.model.layers[20].register_forward_pre_hook(fail)
        with pytest.raises(Failed):
            read(model, cache, more)
        handle.remove()
        assert cache.tokens == before
        assert model.config._attn_implementation != "kvkeep"
    assert not torch.is_inference_mode_enabled()
    for found, wanted in zip(bits(model, cache, 8), expected, strict=True):
        assert torch.equal(found, wanted)


def test_what_torch_does_not_tell_hooks_of_is_put_right_at_the_next_forward(
    model: PreTrainedModel,
) -> None:
    cache, ids = KvkeepCache(model, 32, 4), random_ids(50)
    read(model, cache, ids)
    expected = bits(model, cache.fork(), 4)

    def leave(*_: object) -> None:
        raise SystemExit

    handle = model.model.layers[20].register_forward_pre_hook(leave)
    with pytest.raises(SystemExit):
        read(model, cache, [7])
    handle.remove()
    assert list(cache.snapshot().tokens) == ids  # looking at it puts it right, too
    for found, wanted in zip(bits(model, cache, 4), expected, strict=True):
        assert torch.equal(found, wanted)
    assert list(cache.tokens)[:50] == ids
    assert len(cache.tokens) == 54
    assert model.config._attn_implementation != "kvkeep"
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_ctrl_c_comes_when_the_step_is_through(model: PreTrainedModel) -> None:
    cache, ids = KvkeepCache(model, 32, 4), random_ids(20)
    read(model, cache, ids)
    handle = model.model.layers[3].register_forward_pre_hook(
        lambda *_: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        read(model, cache, [7])
    handle.remove()
    assert list(cache.tokens) == [*ids, 7]
    read(model, cache, [8])


def test_numbers_that_are_none_are_not_kept() -> None:
    model = small_model("llama")
    cache = KvkeepCache(model, 32)
    read(model, cache, [5, 6])
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLogits):
        read(model, cache, [7])
    assert list(cache.tokens) == [5, 6]


def test_other_caches_see_nothing_of_it_and_unhook_takes_all_off() -> None:
    model, ids = small_model("gemma3_text"), random_ids(30)
    plain = read(model, DynamicCache(config=model.config), ids)
    kinds = [module for module in model.modules() if module._forward_pre_hooks]
    attributes = set(vars(model))
    cache = KvkeepCache(model, 16)
    read(model, cache, ids)
    assert torch.equal(read(model, DynamicCache(config=model.config), ids), plain)
    unhook(model)
    assert [module for module in model.modules() if module._forward_pre_hooks] == kinds == []
    assert not any(module._forward_hooks for module in model.modules())
    assert set(vars(model)) == attributes
    assert model.config._attn_implementation != "kvkeep"
    with pytest.raises(InvalidArgument, match="call the model that it was made for"):
        read(model, cache, ids)


def test_two_models_at_once_and_none_takes_the_others_cache() -> None:
    one, other = small_model("llama"), small_model("glm")
    ids = random_ids(40)
    caches = [KvkeepCache(model, 16, 2) for model in (one, other)]
    alone = [read(model, KvkeepCache(model, 16, 2), ids) for model in (one, other)]
    for first in range(0, 40, 8):
        for model, cache, expected in zip((one, other), caches, alone, strict=True):
            found = read(model, cache, ids[first : first + 8])
            assert (found - expected[first : first + 8]).abs().max() < 1e-4
    with pytest.raises(InvalidArgument, match="another model"):
        read(one, caches[1], [5])


@torch.no_grad()
def test_what_a_forward_cannot_do_is_refused_before_anything_changes() -> None:
    model = small_model("llama")
    cache, ids = KvkeepCache(model, 16), torch.tensor([[5, 6, 7]])
    model(ids, past_key_values=cache)
    embeds = torch.zeros(1, 2, 64)
    for given, why in (
        ({"inputs_embeds": embeds}, "input_ids"),
        ({"input_ids": ids, "attention_mask": torch.ones(1, 1, 3, 6)}, "another shape"),
        ({"input_ids": ids, "attention_mask": torch.ones(1, 3)}, "3 tokens in the cache"),
        ({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "expected"),
        ({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0]])}, "every token"),
        ({"input_ids": ids, "output_attentions": True}, "output_attentions"),
        ({"input_ids": ids, "output_hidden_states": True}, "output_hidden_states"),
        ({"input_ids": ids, "position_ids": torch.tensor([[9, 10, 11]])}, "position"),
        ({"input_ids": ids.expand(2, -1)}, "1 rows"),
    ):
        with pytest.raises((InvalidArgument, UnsupportedModel), match=why):
            model(**given, past_key_values=cache)
        assert list(cache.tokens) == [5, 6, 7]
    with pytest.raises(InvalidArgument, match="tokenizer"):
        cache.insert(0, "text")
    with pytest.raises(InvalidArgument, match="eval"):
        KvkeepCache(small_model("llama").train())
    with pytest.raises(InvalidArgument, match="transformers"):
        KvkeepCache("llama")


def test_models_are_refused_by_name() -> None:
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
    before = {name: vars(each).keys() for name, each in dynamic.named_modules()}
    with pytest.raises(UnsupportedModel, match="dynamic"):
        KvkeepCache(dynamic)
    assert {name: vars(each).keys() for name, each in dynamic.named_modules()} == before
    assert not any(each._forward_pre_hooks for each in dynamic.modules())
    for name, why in (
        ("deepseek_v3", "latent"),
        ("gpt2", "rotary"),
        ("llama4_text", "chunks"),
        ("hunyuan_v1_dense", "rotation"),
        ("mamba", "interface"),
        ("ministral3", "scaled by their position"),
    ):
        with pytest.raises(UnsupportedModel, match=why):
            KvkeepCache(small_model(name))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=96, d_model=32, d_ff=32, num_layers=1, num_heads=2)
    ).eval()
    with pytest.raises(UnsupportedModel, match="encoder"):
        KvkeepCache(t5)


def test_versions_outside_of_those_that_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("4.57.3", "6.0.0"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with pytest.raises(ImportError, match=r"transformers>=5\.\d+,<6"):
            require_version()


def test_a_model_of_theirs_is_one_of_ours(
    model: PreTrainedModel, own_fp32: Model, tokenizer, tmp_path: Path
) -> None:
    theirs = from_transformers(model, tokenizer)
    prompt = "Once upon a time there was a small"
    written = []
    for each in (theirs, own_fp32):
        session = each.session(64, 4)
        session.feed(prompt)
        written.append("".join(session.stream(20)))
    assert written[0] == written[1]
    session = theirs.session(64)
    session.feed(prompt)
    session.snapshot().save(tmp_path / "kept")
    again = theirs.restore(session.snapshot().load(tmp_path / "kept"))
    assert torch.equal(again.logits, session.logits)
