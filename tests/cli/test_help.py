"""Help opens at once and says what there is."""

import statistics
import subprocess
import sys
import time

import pytest

from kvkeep.cli import memory, which_model
from kvkeep.cli.main import main
from kvkeep.cli.sessions import sessions
from kvkeep.model import DTYPES
from kvkeep.policies import POLICIES
from kvkeep.store.codec import CODECS

COMMANDS = sorted(main.commands)
SESSIONS = [f"sessions {name}" for name in sorted(sessions.commands)]


@pytest.mark.parametrize("command", ["", *COMMANDS, SESSIONS[0]])
def test_help_opens_in_half_a_second(command: str) -> None:
    def once() -> float:
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "kvkeep", *command.split(), "--help"],
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - begun

    assert statistics.median(once() for _ in range(3)) < 0.5


def test_help_imports_no_torch() -> None:
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
assert "torch" not in sys.modules
assert "transformers" not in sys.modules
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
