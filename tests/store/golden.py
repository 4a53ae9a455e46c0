"""The models of golden files, bit-identical on every machine, and how some of them were made.

`golden-v1.kvkeep` was written once, by format 1, with `PYTHONPATH=tests python -m store.golden`,
`golden-ragged.kvkeep`, by format 3, with `-c 'from store.golden import ragged; ragged()'`, and
`golden-residual.kvkeep`, by format 8, likewise with `residual()`,
`golden-rounded.kvkeep`, by format 9, and its basis, likewise with `rounded()`,
`golden-windows.kvkeep` and `golden-states.kvkeep`, by format 7, likewise with `checkpoints()`,
and `golden-prefix-checkpoint.kvcheckpoint` with `prefix_checkpoint(folder)`.
Do not write them again: they prove that later versions still read old files.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from lossy_basis import random_basis
from small_models import local_spec, small_model, small_spec, state_specs

from kvkeep import PrefixStore, Sampling
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.session.session import Session
from kvkeep.storage.lossy.basis import add_basis

PATH = Path(__file__).parent.parent / "data" / "golden-v1.kvkeep"
TEXT = list(b"This was said long ago, and is not forgotten: the file is old, the reader new.")
PREFIX_PROMPT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(300)]
CHECKPOINT_SPECS = {
    "windows": replace(local_spec(), layers=2, local_layers=(0,)),
    "states": state_specs()["delta_net"],
}


def golden_model(spec: ModelSpec | None = None) -> Model:
    """Build a model like `small_model(seed=0)` whose weights do not depend on the processor.

    The weights are integers divided by a power of two. torch's normal random numbers differ in the
    last bit from one kind of processor to another, and so would the fingerprint.
    """
    random, spec = np.random.RandomState(0), spec or small_spec()
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.from_numpy(random.randint(-511, 512, shape).astype(np.float32) / 1024)
        for name, shape in tensor_shapes(spec).items()
    }
    small = small_model()
    return Model("small", small.folder, Decoder(spec, tensors), small.text)


def main() -> None:
    session = golden_model().session(max_kv_size=40, keep=4)
    session.feed(TEXT)
    for _ in range(10):
        session.next_token()
    print(session.snapshot().save(PATH), "bytes;", session.cache.segments)
    tokens = [session.next_token() for _ in range(16)]
    print("next:", tokens)


def ragged() -> None:
    """Write a snapshot with two ragged segments: each layer and KV head has its own cell count."""
    session = golden_model().session(policy="full")
    session.feed(TEXT)
    session.pin(30, 34)
    session.compress(2.5, "knorm", recent=10, budget="heads")
    for _ in range(3):
        session.next_token()
    print(session.snapshot().save(PATH.with_name("golden-ragged.kvkeep")), "bytes")
    sampling = Sampling(0.8, seed=5)
    print("next:", [session.next_token(sampling) for _ in range(12)])


def residual() -> None:
    """Write a snapshot with residual cells, in 8 bits."""
    session = golden_model().session(policy="full", kv_bits="8")
    session.feed(TEXT)
    session.pin(30, 34)
    session.compress(2.5, "kvzip", recent=10)
    print(session.snapshot().save(PATH.with_name("golden-residual.kvkeep")), "bytes")
    sampling = Sampling(0.8, seed=5)
    print("next:", [session.next_token(sampling) for _ in range(12)])


def rounded() -> None:
    """Write a snapshot with the codec small, and its basis."""
    basis = add_basis(random_basis(golden_model()))
    session = golden_model().session(policy="full")
    session.feed(TEXT)
    print(session.snapshot().save(PATH.with_name("golden-rounded.kvkeep"), "small"), "bytes")
    shutil.copy(basis, PATH.with_name(f"golden-{basis.name}"))


def checkpoints() -> None:
    """Write snapshots with checkpoints: of local windows that have moved on, and of states."""
    for name, spec in CHECKPOINT_SPECS.items():
        session = golden_model(spec).session(512, policy="full", prefill_step=40)
        for _ in range(3):
            session.feed(TEXT)
        session.checkpoint_bytes = 10**6
        session.keep_checkpoint_at(40)
        print(session.snapshot().save(PATH.with_name(f"golden-{name}.kvkeep"), "zstd"), "bytes")
        print(session.checkpoints, "next:", next_after_rewinds(session))


def prefix_checkpoint(folder: Path) -> None:
    """Write the checkpoint after the first block of a prompt. folder: of a store, empty."""
    model, store = golden_model(CHECKPOINT_SPECS["states"]), PrefixStore(folder)
    model.session(512, policy="full", prefill_step=128, store=store).feed(PREFIX_PROMPT)
    (path,) = folder.glob("*.kvcheckpoint")
    PATH.with_name("golden-prefix-checkpoint.kvcheckpoint").write_bytes(path.read_bytes())


def next_after_rewinds(session: Session) -> list[int]:
    """Return the next tokens of a session, after rewinds to earlier and earlier tokens."""
    tokens = []
    for count in (20, 150):
        session.rewind(count)
        tokens += [session.next_token(Sampling(0.8, seed=5)) for _ in range(6)]
    return tokens


if __name__ == "__main__":
    main()
