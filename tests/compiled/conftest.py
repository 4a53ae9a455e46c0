"""Runs the tests of kernel results on each instruction set that this processor has."""

from collections.abc import Iterator

import pytest
from available_sets import sets_here
from sanitizers import SANITIZED

# Modules that test results. Others test operands or files.
ON_EACH_SET = {
    "test_compressed",
    "test_decoding",
    "test_experts",
    "test_gemma4",
    "test_products",
    "test_ragged",
    "test_sizes",
    "test_states",
}


# Modules that decode whole models: minutes under sanitizers (`make sanitize`), which therefore run
# them on the best set only. Products and attention, which differ by set, have tests of their own.
WHOLE_MODELS = {"test_decoding", "test_experts", "test_gemma4", "test_ragged", "test_states"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if module in ON_EACH_SET and not metafunc.definition.get_closest_marker("best_set"):
        only_best = SANITIZED and module in WHOLE_MODELS
        best, *others = sets_here()[: 1 if only_best else None]
        marks = pytest.mark.extended if module in WHOLE_MODELS else ()
        sets = [best, *(pytest.param(name, marks=marks) for name in others)]
        metafunc.parametrize("instruction_set", sets, indirect=True)


@pytest.fixture(autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The set whose kernels `kernel_library()` returns during a test; None for the best set."""
    name: str | None = getattr(request, "param", None)
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setenv("KVKEEP_ISA", name)
        yield name
