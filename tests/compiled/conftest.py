"""Runs the tests of kernel results on each instruction set that this processor has."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from available_sets import sets_here
from sanitizers import SANITIZED

# Modules that test results. Others test operands or files.
ON_EACH_SET = {
    "test_byte_rows",
    "test_compressed",
    "test_decoding",
    "test_experts",
    "test_gemma4",
    "test_products",
    "test_prompt_attention",
    "test_ragged",
    "test_sizes",
    "test_states",
}


# Modules that decode whole models. Products and attention, which differ by set, have tests of their
# own. So these run whole on the best set, and one case in ONE_IN of each test on the others. Under
# sanitizers (`make sanitize`) they take minutes, and run on the best set only.
ONE_IN = 7  # no number of parameters, so that the cases have different ones
WHOLE_MODELS = {"test_decoding", "test_experts", "test_gemma4", "test_ragged", "test_states"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if module in ON_EACH_SET and not metafunc.definition.get_closest_marker("best_set"):
        only_best = SANITIZED and module in WHOLE_MODELS
        best, *others = sets_here()[: 1 if only_best else None]
        marks = pytest.mark.extended if module in WHOLE_MODELS else ()
        sets = [best, *(pytest.param(name, marks=marks) for name in others)]
        metafunc.parametrize("instruction_set", sets, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out most cases of whole models on sets that are not the best one."""
    best, cases = sets_here()[0], Counter[tuple[str, str]]()
    chosen = []
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem in WHOLE_MODELS:
            call = getattr(item, "callspec", None)
            name = best if call is None else call.params.get("instruction_set", best)
            if name != best:
                case = item.nodeid.partition("[")[0], name
                cases[case] += 1
                if cases[case] % ONE_IN != 1:
                    continue
        chosen.append(item)
    items[:] = chosen


@pytest.fixture(autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The set whose kernels `kernel_library()` returns during a test; None for the best set."""
    name: str | None = getattr(request, "param", None)
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setenv("KVKEEP_ISA", name)
        yield name
