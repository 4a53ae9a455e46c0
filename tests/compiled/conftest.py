"""What the kernels compute is held on each instruction set that this processor has."""

from collections.abc import Iterator

import pytest
from sanitized import SANITIZED
from sets_here import sets_here

# Modules whose tests look at what is computed. Others look at what kernels are handed, or at files.
ON_EACH_SET = {
    "test_compressed",
    "test_decoding",
    "test_experts",
    "test_gemma4",
    "test_products",
    "test_ragged",
    "test_sizes",
}


# Those that decode whole models: minutes under sanitizers (`make sanitize`), where the best set has
# to do. What sets have of their own are products and attention, which others look at.
WHOLE_MODELS = {"test_decoding", "test_experts", "test_gemma4", "test_ragged"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if module in ON_EACH_SET and not metafunc.definition.get_closest_marker("best_set"):
        enough = SANITIZED and module in WHOLE_MODELS
        best, *others = sets_here()[: 1 if enough else None]
        marks = pytest.mark.extended if module in WHOLE_MODELS else ()
        sets = [best, *(pytest.param(name, marks=marks) for name in others)]
        metafunc.parametrize("instruction_set", sets, indirect=True)


@pytest.fixture(autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The set whose kernels `library()` gives while a test runs; None for the best."""
    name: str | None = getattr(request, "param", None)
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setenv("KVKEEP_ISA", name)
        yield name
