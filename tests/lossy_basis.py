"""A basis for small models: random orthogonal components, as many as numbers."""

import torch

from kvkeep.loaded_model import LoadedModel
from kvkeep.storage.lossy.basis import CellBasis, GroupBasis

STEP = 0.1  # of the codec small


def random_basis(model: LoadedModel, group_layers: int = 1, seed: int = 0) -> CellBasis:
    """Return a basis of a model in which rounding to a step errs by about a third of it."""
    generator, cache = torch.Generator().manual_seed(seed), model.decoder.new_cache()
    layout = cache.layout
    frequencies = cache.rope.inverse_frequencies.expand(layout.layers, -1).clone()
    frequencies[list(cache.rope.unrotated_layers)] = 0

    def groups() -> tuple[GroupBasis, ...]:
        starts = range(0, layout.layers, group_layers)
        return tuple(_group(min(group_layers, layout.layers - start)) for start in starts)

    def _group(layers: int) -> GroupBasis:
        width = layers * layout.kv_heads * layout.head_dim
        square = torch.randn(width, width, dtype=torch.float32, device="cpu", generator=generator)
        vectors = torch.linalg.qr(square)[0]
        mean = 0.1 * torch.randn(width, dtype=torch.float32, device="cpu", generator=generator)
        return GroupBasis(mean, vectors.T.half().contiguous(), vectors.half().contiguous())

    fingerprint, steps = model.fingerprint.to_dict(), {"small": STEP, "smaller": 4 * STEP}
    return CellBasis(
        fingerprint, model.name, layout, group_layers, steps, frequencies, groups(), groups()
    )
