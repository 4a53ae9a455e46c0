"""Fixtures that several packages' tests share."""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvkeep.model import Model, load_model
from kvkeep.models.known import KNOWN, fetch
from kvkeep.models.source import DEFAULT_MODEL, pull

# A shell without job control starts background jobs deaf to Ctrl-C, and so would be the processes
# that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are the same in each run: what passes on one machine passes on another. Each run of
# `--hypothesis-profile=new` draws others. How long an example takes is not looked at.
SLOW = [HealthCheck.too_slow]
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=SLOW)
settings.register_profile("new", deadline=None, print_blob=True, suppress_health_check=SLOW)
settings.load_profile("same")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The default model, in the user's own kvkeep home: fetched once, not at each run."""
    return pull(DEFAULT_MODEL, progress=True)


@pytest.fixture(scope="session")
def smollm2_gguf(request: pytest.FixtureRequest) -> Path:
    """The GGUF file that the default model is made from, kept in pytest's cache."""
    folder = Path(request.config.cache.mkdir("smollm2"))  # type: ignore[union-attr]
    kept = folder / "model.gguf"
    if not kept.exists():
        fetch(KNOWN[DEFAULT_MODEL], folder, progress=True).rename(kept)
    return kept


@pytest.fixture(scope="session")
def smollm2_fp32(smollm2_folder: Path) -> Model:
    return load_model(DEFAULT_MODEL, dtype="float32")


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Model:
    return load_model(DEFAULT_MODEL)
