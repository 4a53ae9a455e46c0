"""Prefill and decode on a GPU, against transformers with the same weights on the same GPU.

    python -m benchmarks.cuda --out cuda.json

Two models in bfloat16: the default one, and Llama 3.2 1B's shape with random weights. Decode is
measured with a context that grows, and with a full ring, whose steps a CUDA graph replays; the
same steps without a graph show what it saves. transformers' part is the forward of the whole
prompt, and its own `generate`, greedy.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from tokenizers import Tokenizer, models

from benchmarks.command import Measurement, ResultFile, out_option
from benchmarks.gguf_shapes import SHAPES
from benchmarks.peers.unpacked import unpacked_folder
from kvkeep import Model, Session
from kvkeep.executors import new_decoder
from kvkeep.model import resolve_device
from kvkeep.models.hub.source import DEFAULT_MODEL, resolve
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.spec.config import read_spec
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.weights.checkpoint import decoder_tensors

PROMPTS = (512, 4096)
CONTEXT, RING = 128, 512
ROUNDS = 3


@dataclass(frozen=True)
class Reading:
    """Tokens per second. way: "kvkeep" (prefill in steps of 512), the same without one of its means
    or with another step, or "transformers".

    tokens: of the prompt, or sampled. context: tokens before the first sampled one; of a full ring,
    its cells.
    """

    model: str
    what: str  # "prefill", "growing context" or "full ring"
    way: str
    tokens: int
    context: int
    tokens_per_s: float


@dataclass(frozen=True)
class Pair:
    """A model in both libraries, with the same tensors on the GPU."""

    name: str
    reference: Any  # transformers' model
    model: Model

    @property
    def plain(self) -> Model:
        """The model without graphs."""
        own = self.model
        decoder = Decoder(own.spec, own.decoder.tensors)
        return Model(own.name, own.folder, decoder, own.text)


def default_pair(device: torch.device) -> Pair:
    from transformers import AutoModelForCausalLM

    folder = unpacked_folder(resolve(DEFAULT_MODEL, progress=True), progress=True)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return _pair(DEFAULT_MODEL, reference.to(device), folder)


def random_pair(name: str, device: torch.device, folder: Path) -> Pair:
    """Return a model of a known shape with random weights. folder: for its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        reference: Any = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return _pair(name, reference.to(torch.bfloat16), folder)


def _pair(name: str, reference: Any, folder: Path) -> Pair:
    spec, reference = read_spec(folder), reference.eval()
    weights = {n: x for n, x in reference.state_dict().items() if n != "lm_head.weight"}
    if not spec.tied_head:
        weights["lm_head.weight"] = reference.lm_head.weight
    decoder = new_decoder(spec, decoder_tensors(spec, weights))
    # The prompts are token ids, and nothing reads the text.
    return Pair(name, reference, Model(name, folder, decoder, TextCodec(Path(), _no_tokenizer())))


def _no_tokenizer() -> Tokenizer:
    return Tokenizer(models.BPE({}, []))


def prompt_ids(pair: Pair, count: int) -> list[int]:
    return [20 + i * i % 9973 % (pair.model.spec.vocab_size - 20) for i in range(count)]


def measure(pair: Pair, device: torch.device, new_tokens: int) -> Iterator[Reading]:
    """Yield all readings of a model: medians of `ROUNDS`, after one run that is not counted."""
    for count in PROMPTS:
        ids = prompt_ids(pair, count)
        ways = {"kvkeep": partial(_prefill, pair.model, ids, 512)}
        if count > 512:
            ways["kvkeep, one step"] = partial(_prefill, pair.model, ids, count)
        ways["transformers"] = partial(_forward, pair.reference, ids, device)
        for way, run in ways.items():
            seconds = _median_seconds(run, device)
            yield Reading(pair.name, "prefill", way, count, 0, count / seconds)
    growing = pair.model.session(policy="full")
    growing.feed(prompt_ids(pair, CONTEXT))
    sessions = [("growing context", "kvkeep", CONTEXT, growing)]
    for way, model in {"kvkeep": pair.model, "kvkeep, no graph": pair.plain}.items():
        ring = model.session(RING)
        ring.feed(prompt_ids(pair, 2 * RING))
        sessions.append(("full ring", way, RING, ring))
    for what, way, context, session in sessions:
        run = partial(_decode, session, new_tokens, what == "growing context")
        seconds = _median_seconds(run, device)
        yield Reading(pair.name, what, way, new_tokens, context, new_tokens / seconds)
    for context in (CONTEXT, RING):
        ids = prompt_ids(pair, context)
        rate = _generated_per_second(pair.reference, ids, new_tokens, device)
        what = "growing context"
        yield Reading(pair.name, what, "transformers", new_tokens, context, rate)


def _prefill(model: Model, ids: list[int], prefill_step: int) -> None:
    model.session(policy="full", prefill_step=prefill_step).feed(ids)


def _decode(session: Session, count: int, in_fork: bool) -> None:
    """Sample tokens. in_fork: the session stays as it is, so that each run begins with it."""
    if in_fork:
        session = session.fork()
    for _ in range(count):
        session.next_token()


@torch.inference_mode()
def _forward(reference: Any, ids: list[int], device: torch.device) -> None:
    tokens = torch.tensor([ids], dtype=torch.int64, device=device)
    float(reference(tokens, use_cache=True, logits_to_keep=1).logits.sum())


def _generated_per_second(
    reference: Any, ids: list[int], new_tokens: int, device: torch.device
) -> float:
    """Return the rate after the first token: the prompt's time is not counted."""
    tokens = torch.tensor([ids], dtype=torch.int64, device=device)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(tokens)

    def generate(count: int) -> None:
        reference.generate(tokens, min_new_tokens=count, max_new_tokens=count, **options)

    generate(4)
    first = median(_timed(lambda: generate(1), device) for _ in range(ROUNDS))
    whole = median(_timed(lambda: generate(new_tokens + 1), device) for _ in range(ROUNDS - 1))
    return new_tokens / (whole - first)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median of `ROUNDS` runs, after one that is not counted."""
    run()
    return median(_timed(run, device) for _ in range(ROUNDS))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    run()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--device", "device_name", default="cuda", help="Any torch device.")
@click.option("--tokens", default=64, type=click.IntRange(1), help="Tokens sampled in a row.")
@click.option("--shape", default="llama-1b", type=click.Choice(list(SHAPES)), help="With random.")
@click.option("--default-model/--no-default-model", default=True, help="Measure it, too.")
@out_option
def cuda(device_name: str, tokens: int, shape: str, default_model: bool, out: Path | None) -> None:
    """Measure prefill and decode on a GPU, by kvkeep and by transformers."""
    import transformers

    device, readings = resolve_device(device_name), list[Reading]()
    result = ResultFile(
        out,
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        transformers=transformers.__version__,
    )
    with tempfile.TemporaryDirectory() as folder:
        makers: list[Callable[[], Pair]] = [lambda: random_pair(shape, device, Path(folder))]
        if default_model:
            makers.insert(0, lambda: default_pair(device))
        for make in makers:
            pair = make()
            for reading in measure(pair, device, tokens):
                readings.append(reading)
                result.write(readings=readings)
                click.echo(
                    f"{reading.model:<22}  {reading.what:<15}  {reading.way:<16}  "
                    f"{reading.context or reading.tokens:>5,}  {reading.tokens_per_s:>9,.0f}/s"
                )
            del pair


if __name__ == "__main__":
    cuda()
