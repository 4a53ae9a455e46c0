"""`kvkeep doctor` describes this machine, and loading a model warns of a slow path."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from available_sets import sets_here
from small_models import small_spec, write_small_folder
from timeouts import PATIENCE

from kvkeep import load_model
from kvkeep.compiled import instruction_sets
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.instruction_sets import SETS, selected_set
from kvkeep.errors import SlowPathWarning
from kvkeep.runtime.cpu import num_cores

Examine = Callable[..., dict[str, Any]]
SWITCHES = (
    *("KVKEEP_ISA", "KVKEEP_COMPILED", "KVKEEP_KERNELS", "KVKEEP_PROMPT_BITS"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
)
kernels_here = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")


def run(
    *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in a subprocess, without this process's environment variables."""
    kept = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    return subprocess.run(
        [sys.executable, "-m", "kvkeep", *map(str, arguments)],
        env=kept | (environment or {}),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture
def examine() -> Examine:
    def call(*arguments: object, **environment: str) -> dict[str, Any]:
        done = run("doctor", *arguments, "--json", environment=environment)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return call


@pytest.fixture
def no_kernels(tmp_path: Path) -> Path:
    folder = tmp_path / "nothing"
    folder.mkdir()
    return folder


def test_the_best_instruction_set_and_the_machine_are_reported(
    examine: Examine, smollm2_folder
) -> None:
    found = examine()
    assert found["kernels"]["environment"] == {}
    assert found["threads"]["cores"] == num_cores()
    assert found["threads"]["used"] >= 1
    assert found["torch"]["version"] == torch.__version__
    assert found["cuda"] == {"built_for": torch.version.cuda, "devices": []}
    assert found["memory"]["read_per_s"] > 0
    model, memory = found["model"], found["memory"]
    assert model["most_tokens_per_s"] * model["bytes_per_token"] == pytest.approx(
        memory["read_per_s"]
    )
    assert model["measured_tokens_per_s"] is None
    shown = json.loads(run("models", "show", "--json").stdout)
    assert model["bytes_per_token"] == shown["bytes_per_token"] == memory["read_size"]
    assert model["decode"] == shown["decode"]


@kernels_here
@pytest.mark.parametrize("name", sets_here())
def test_a_requested_instruction_set_is_used(examine: Examine, smollm2_folder, name: str) -> None:
    found = examine(KVKEEP_ISA=name)
    better = list(SETS)[: list(SETS).index(name)]
    why = f"are excluded by KVKEEP_ISA={name}"
    assert found["kernels"] == {
        "name": name,
        "against": dict.fromkeys(better, why),
        "environment": {"KVKEEP_ISA": name},
    }
    assert found["model"]["decode"].startswith(f"compiled kernels for {name}")


SLOW_BF16 = {"KVKEEP_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@kernels_here
@pytest.mark.skipif("avx2" not in sets_here(), reason="no AVX2")
def test_the_bits_of_prompts_are_reported(examine: Examine, smollm2_folder) -> None:
    found = examine(**SLOW_BF16, KVKEEP_PROMPT_BITS="8")
    assert found["kernels"]["environment"]["KVKEEP_PROMPT_BITS"] == "8"
    assert found["torch"]["prompts"] == "float32, packed weights by rows of 8 bits"
    without = examine(KVKEEP_ISA="torch", KVKEEP_PROMPT_BITS="8")["torch"]["prompts"]
    assert without == "bfloat16 (KVKEEP_PROMPT_BITS has no effect here)"


@pytest.mark.parametrize(("switch", "value"), [("KVKEEP_ISA", "torch"), ("KVKEEP_COMPILED", "0")])
def test_disabled_kernels_are_reported(
    examine: Examine, smollm2_folder, switch: str, value: str
) -> None:
    found, why = examine(**{switch: value}), f"are disabled by {switch}={value}"
    assert found["kernels"] == {
        "name": "torch",
        "against": dict.fromkeys(SETS, why),
        "environment": {switch: value},
    }
    assert found["model"]["decode"] == f"torch: the compiled kernels {why}"
    assert found["torch"]["prompts"] == "bfloat16"


def test_missing_kernels_are_reported(examine: Examine, smollm2_folder, no_kernels: Path) -> None:
    found = examine(KVKEEP_KERNELS=str(no_kernels))
    assert found["kernels"]["name"] == "torch"
    assert all(why.startswith("were not built") for why in found["kernels"]["against"].values())
    assert found["model"]["decode"].startswith("torch: the compiled kernels were not built")


@kernels_here
def test_kernels_that_fail_to_load_are_reported(
    examine: Examine, smollm2_folder, tmp_path: Path
) -> None:
    for file in Path(instruction_sets.__file__).parent.glob("_*.so"):
        if file.name.startswith("_cpu."):
            shutil.copy(file, tmp_path)
        else:
            (tmp_path / file.name).write_bytes(b"\x7fELF and no more")
    found = examine(KVKEEP_KERNELS=str(tmp_path))
    best = next(name for name in SETS if name not in selected_set().rejected)
    assert found["kernels"]["name"] == "torch"
    assert found["kernels"]["against"][best].startswith("cannot be loaded (")
    assert "torch: the compiled kernels cannot be loaded (" in found["model"]["decode"]


def test_a_float32_model_is_reported(examine: Examine, smollm2_folder) -> None:
    model = examine("--dtype", "float32")["model"]
    assert model["decode"] == "torch: the compiled kernels support bfloat16, not float32"
    assert model["bytes_per_token"] == 4 * 134_515_008 - 4 * 61 * 576  # all but the norms


def test_unsupported_heads_are_reported(examine: Examine, tmp_path: Path) -> None:
    found = examine(write_small_folder(tmp_path / "small"))
    assert "support head_dim 32, 64, 96, 128, 256, 512, not 16" in found["model"]["decode"]


def test_environment_variables_for_threads_are_reported(examine: Examine, smollm2_folder) -> None:
    found = examine(OMP_NUM_THREADS="1")["threads"]
    assert found["used"] == 1
    assert found["environment"] == {"OMP_NUM_THREADS": "1"}


def test_a_model_that_is_not_here_is_not_fetched(examine: Examine, tmp_path: Path) -> None:
    found = examine(KVKEEP_HOME=str(tmp_path))
    assert found["model"] is None
    assert "`kvkeep pull smollm2-135m-instruct`" in found["no_model"]
    assert not list(tmp_path.iterdir())


def test_the_text_output(smollm2_folder, tmp_path: Path) -> None:
    asked = ("doctor", write_small_folder(tmp_path / "small"), "--dtype", "float32", "--measure")
    done = run(*asked)
    assert done.returncode == 0
    assert done.stderr == ""  # float32 was asked for
    assert re.search(r"^model +\S+: decode by torch: the .* not float32$", done.stdout, re.M)
    assert re.search(r"^ +[\d.]+ MB read per token: at most [\d,]+ tokens/s at ", done.stdout, re.M)
    assert re.search(r"^ +measured: [\d,]+ tokens/s$", done.stdout, re.M)
    if not torch.cuda.is_available():
        assert re.search(r"^CUDA +(none: this torch|no GPU found)", done.stdout, re.M)


@pytest.mark.parametrize(
    ("switch", "value", "message"),
    [
        ("KVKEEP_ISA", "avx3", "KVKEEP_ISA must be one of"),
        ("KVKEEP_PROMPT_BITS", "12", "KVKEEP_PROMPT_BITS must be 8 or 16; found '12'"),
    ],
)
def test_an_unknown_value_is_refused(switch: str, value: str, message: str) -> None:
    done = run("doctor", environment={switch: value})
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


SLOW = "slower than this machine allows: the compiled kernels support head_dim"


def test_commands_print_a_slow_path_unless_quiet(
    tiny_folder: Path,
) -> None:
    asked = ("generate", "-p", "Once", "-n", 2, "--seed", 1, "-m", tiny_folder)
    said = run(*asked).stderr.splitlines()
    told = [line for line in said if SLOW in line]
    assert len(told) == 1
    assert told[0].startswith("kvkeep: the model runs on torch, ")
    assert "`kvkeep doctor`" in told[0]
    assert "Warning" not in "".join(said)
    assert run(*asked, "--quiet").stderr == ""
    assert SLOW not in run(*asked, "--dtype", "float32").stderr
    assert SLOW not in run(*asked, environment={"KVKEEP_COMPILED": "0"}).stderr


def test_the_library_warns_of_a_slow_path_once(tiny_folder: Path) -> None:
    script = f"""
import warnings
import kvkeep
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    models = [kvkeep.load_model({str(tiny_folder)!r}) for _ in range(2)]
print([(each.category.__name__, each.filename) for each in said])
print(models[0].path)
"""
    kept = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    done = subprocess.run(
        [sys.executable, "-c", script], env=kept, capture_output=True, text=True, check=True
    )
    warned, path = done.stdout.splitlines()
    assert warned == "[('SlowPathWarning', '<string>')]"
    assert path.startswith("torch: the compiled kernels ")


@kernels_here
def test_a_model_names_its_executors(smollm2_folder, tiny_folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowPathWarning)
        usual = load_model().path
        asked = load_model(str(tiny_folder), dtype="float32").path
    assert usual.name == selected_set().name
    assert list(usual.rejection_reasons.values()) == list(selected_set().rejected.values())
    assert asked.name == "torch"
    assert asked.rejection_reasons == {"the compiled kernels": "support bfloat16, not float32"}
    assert small_spec().head_dim == 16
