"""Matrix products have one of few numbers of rows, and nobody sees the others."""

import pytest
import torch
from packed_model import packed_model, spec_of
from small_models import small_model
from torch.overrides import TorchFunctionMode

from kvkeep.model import Model
from kvkeep.models.layers.primitives import Linear, padded_row_count

PROMPT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(300)]


class Products(TorchFunctionMode):
    """Counts the rows of every product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = set[int]()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.nn.functional.linear:
            self.rows.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


MODELS = {"float32": small_model(), "bfloat16": packed_model(spec_of(), 4)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_products_of_all_prompt_lengths_have_few_row_counts(model: Model) -> None:
    session, products = model.session(64), Products()
    with products:
        for length in range(1, 200):
            session.feed(PROMPT[:length])
            session.next_token()
        session.score(PROMPT)
    assert len(products.rows) <= 29
    assert products.rows <= {padded_row_count(n) for n in range(1, 301)}


def test_row_counts_up_to_512_are_padded_to_35_sizes() -> None:
    sizes = [padded_row_count(n) for n in range(1, 513)]
    assert len(set(sizes)) == 35
    assert sizes == sorted(sizes)
    for n, size in enumerate(sizes, 1):
        assert n <= size <= n + max(3, n / 4.5)
        assert padded_row_count(size) == size
    assert [padded_row_count(n) for n in (513, 640, 641, 4232)] == [640, 640, 768, 4352]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 33, 130])
def test_a_padded_product_equals_the_plain_product(n: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(n)
    x, weight, bias = (
        torch.randn(*shape, generator=random).to(dtype) for shape in ((n, 64), (48, 64), (48,))
    )
    for each in (bias, None):
        found = Linear(weight, each)(x)
        exact = x.double() @ weight.double().T + (0 if each is None else each.double())
        assert found.shape == (n, 48)
        error = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(found.double(), exact, rtol=error, atol=10 * error)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_feeding_a_prompt_twice_gives_the_same_bits(model: Model) -> None:
    logits = []
    for _ in range(2):
        session = model.session(64)
        for length in (7, 33, 130, 1):
            session.feed(PROMPT[:length])
        logits.append(session.logits)
    assert torch.equal(logits[0], logits[1])
