"""The model of the golden file, the same to the bit on every machine, and how the file was made.

`golden-v1.kvkeep` was written once, by format 1, with `PYTHONPATH=tests python -m store.golden`.
It is not to be written again: what it holds is that later versions still read it.
"""

from pathlib import Path

import numpy as np
import torch
from small import small_model, small_spec

from kvkeep.model import Model
from kvkeep.models.llama import Decoder
from kvkeep.models.weights import tensor_shapes

PATH = Path(__file__).parent.parent / "data" / "golden-v1.kvkeep"
TEXT = list(b"This was said long ago, and is not forgotten: the file is old, the reader new.")


def golden_model() -> Model:
    """As `small_model(seed=0)`, with weights that no processor's arithmetic has a part in.

    They are whole numbers divided by a power of two; torch's normal random numbers differ in the
    last bit from one kind of processor to another, and the fingerprint would with them.
    """
    random, spec = np.random.RandomState(0), small_spec()
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


if __name__ == "__main__":
    main()
