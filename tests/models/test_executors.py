"""Who computes is chosen once, when a model is loaded."""

import pytest
import torch
from packed_model import packed_model, spec_of
from small_models import small_model

from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.executors import new_decoder
from kvkeep.models.layers.executor import TorchExecutor


@pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")
def test_compiled_kernels_are_chosen_if_they_support_the_model() -> None:
    model = packed_model(spec_of(), 4)
    decoder = new_decoder(model.spec, model.decoder.tensors, model.decoder.packed)
    assert isinstance(decoder.executor, CompiledExecutor)
    assert decoder.packed.keys() == model.decoder.packed.keys()


def test_torch_is_chosen_otherwise_and_reads_no_packed_weights() -> None:
    model = packed_model(spec_of(), 4)
    floats = {name: tensor.float() for name, tensor in model.decoder.tensors.items()}
    small = small_model()
    for decoder in (
        new_decoder(model.spec, floats, model.decoder.packed),
        new_decoder(small.spec, small.decoder.tensors),
    ):
        assert isinstance(decoder.executor, TorchExecutor)
        assert not decoder.packed
        with torch.inference_mode():
            assert decoder.logits(torch.zeros(1, decoder.spec.hidden_size)).shape[0] == 1
