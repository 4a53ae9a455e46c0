"""Help imports few modules, and is complete."""

import subprocess
import sys

import pytest

from kvkeep.cli import memory, model_options
from kvkeep.cli.lazy import LazyCommand, LazyGroup
from kvkeep.cli.main import COMMANDS as COMMANDS_BY_NAME
from kvkeep.model import DTYPES
from kvkeep.policies import POLICIES
from kvkeep.storage.snapshots.codec import CODECS

COMMANDS = sorted(COMMANDS_BY_NAME)
HEAVY = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf"}
HEAVY |= {"jinja2", "matplotlib", "psutil"}
GROUPS = {
    name: found.lazy_commands
    for name, each in COMMANDS_BY_NAME.items()
    if isinstance(found := each.load(), LazyGroup)
}
INNER = [f"{group} {name}" for group, lazy in GROUPS.items() for name in lazy]
EVERY: list[tuple[str, LazyCommand]] = [
    *COMMANDS_BY_NAME.items(),
    *(pair for lazy in GROUPS.values() for pair in lazy.items()),
]


def test_help_imports_no_slow_modules() -> None:
    commands = [*COMMANDS, *INNER]
    asked = [[], ["--help"], ["--version"], *([*name.split(), "--help"] for name in commands)]
    program = f"""
import sys
from kvkeep.cli.main import main
for arguments in {asked}:
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0, arguments
found = {HEAVY} & sys.modules.keys()
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_bare_command_shows_all_commands(invoke) -> None:
    result = invoke()
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command}" in result.stdout


def test_every_option_with_a_default_shows_it(invoke) -> None:
    shown = " ".join(invoke("generate", "--help").stdout.split())
    for default in ("256", "4", "sliding", "512"):
        assert f"[default: {default}]" in shown
    for default in ("0.7", "40", "0.95", "0.05", "1.1", "256"):
        assert f"[default: ({default}, or the model's)]" in shown


def test_names_listed_for_help_are_those_that_exist() -> None:
    assert sorted(memory.POLICY_NAMES) == sorted(POLICIES)
    assert sorted(model_options.DTYPE_NAMES) == sorted(DTYPES)
    assert sorted(memory.CODEC_NAMES) == sorted(CODECS)


@pytest.mark.parametrize(("name", "lazy"), EVERY)
def test_each_lazy_command_can_be_loaded(name: str, lazy: LazyCommand) -> None:
    found = lazy.load()
    assert found.name == name
    assert lazy.summary.endswith(".")
    assert len(lazy.summary) < 66, "one line of a terminal of 80 columns"


def test_unknown_commands_get_suggestions(invoke) -> None:
    for asked, meant in (("sesions", "sessions"), ("gnerate", "generate")):
        refused = invoke(asked)
        assert refused.exit_code == 2
        assert f"Did you mean {meant}?" in refused.stderr
    assert "Did you mean" not in invoke("xyzzy").stderr


def test_a_beginning_of_options_suggests_them(invoke) -> None:
    for option, meant in (
        ("--temp", ["--temperature"]),
        ("--max", ["--max-kv-size", "--max-tokens"]),
        ("--temperatur", ["--temperature"]),
    ):
        refused = invoke("generate", option, "0.5")
        assert refused.exit_code == 2
        assert f"No such option '{option}'." in refused.stderr
        assert all(f"'{flag}'" in refused.stderr for flag in meant)
    assert "Did you mean" not in invoke("generate", "--xyzzy").stderr
