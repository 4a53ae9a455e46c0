"""Help opens at once, since it loads little, and says what there is."""

import subprocess
import sys

from kvkeep.cli import memory, which_model
from kvkeep.cli.main import main
from kvkeep.cli.sessions import sessions
from kvkeep.model import DTYPES
from kvkeep.policies import POLICIES
from kvkeep.store.codec import CODECS

COMMANDS = sorted(main.commands)
HEAVY = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf"}
HEAVY |= {"jinja2", "matplotlib", "psutil"}
SESSIONS = [f"sessions {name}" for name in sorted(sessions.commands)]


def test_help_loads_nothing_that_takes_long_to_load() -> None:
    commands = [*COMMANDS, *SESSIONS]
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
    for default in ("256", "4", "sliding", "512", "0.7", "40", "0.95", "0.05", "1.1", "64"):
        assert f"[default: {default}]" in shown


def test_names_written_out_for_help_are_those_that_exist() -> None:
    assert sorted(memory.POLICY_NAMES) == sorted(POLICIES)
    assert sorted(which_model.DTYPE_NAMES) == sorted(DTYPES)
    assert sorted(memory.CODEC_NAMES) == sorted(CODECS)
