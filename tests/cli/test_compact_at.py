"""`kvkeep chat --compact-at`: a chat of policy full goes on past its threshold."""

import re
from pathlib import Path

from cli.conftest import Invoke

LINE = "The harbour of the old town has seen many ships come and go in its time"


def test_a_chat_compacts_before_a_turn_that_would_exceed_the_threshold(
    invoke: Invoke, tiny: list[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    options = ["--policy", "full", "--max-kv-size", 256, "--compact-at", 0.7, "-n", 8]
    lines = "\n".join(f"{LINE} {number}" for number in range(8))
    result = invoke("chat", *tiny, *options, "--session", "long", input=lines)
    assert result.exit_code == 0, result.output
    assert result.output.count("compacted: ") >= 2
    assert "→" in result.output
    resumed = invoke("chat", *tiny, "--compact-at", 0.7, "-n", 8, "--session", "long", input=LINE)
    assert resumed.exit_code == 0, resumed.output


def test_the_threshold_needs_policy_full_and_a_local_session(
    invoke: Invoke, tiny: list[str]
) -> None:
    other = invoke("chat", *tiny, "--max-kv-size", 256, "--compact-at", 0.8, input="Hi")
    assert other.exit_code != 0
    assert "--policy full" in other.output
    remote = invoke("chat", "--server", "http://127.0.0.1:9", "--compact-at", 0.8, input="Hi")
    assert "kvkeep serve" in remote.output
    assert invoke("chat", *tiny, "--compact-at", 1.5).exit_code == 2


def test_the_command_compacts_and_says_what_it_freed(invoke: Invoke, tiny: list[str]) -> None:
    options = ["--policy", "full", "--max-kv-size", 512, "-n", 8]
    script = "\n".join([*(f"{LINE} {number}" for number in range(5)), "/compact 100", "/compact x"])
    result = invoke("chat", *tiny, *options, input=script)
    assert result.exit_code == 0, result.output
    assert re.search(r"older part compressed .* → (100|\d\d); freed [\d.]+ MB", result.output)
    assert "or a part of all such as 0.5; found 'x'" in result.output
