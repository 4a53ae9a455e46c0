"""The report of a command never replaces a file that the same command reads or writes."""

from pathlib import Path

import pytest
from cli.conftest import Invoke

CASES = {
    "text": ["generate", "-f", "x"],
    "cache": ["generate", "-p", "Hi", "--cache-prompt", "x"],
    "snapshot": ["generate", "--restore-prompt", "x"],
    "model": ["generate", "-p", "Hi", "-m", "x"],
    "scored text": ["perplexity", "x"],
    "requests": ["batch", "x", "-o", "out.jsonl"],
    "answers": ["batch", "in.jsonl", "-o", "x"],
    "plot": ["passkey", "--plot", "x.png"],
}


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_the_report_must_be_a_file_of_its_own(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """By a symbolic link, too. The model is not even looked up."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / next(name for name in arguments if name.startswith("x"))
    Path("in.jsonl").write_text('{"prompt": "Hi"}\n')
    file.write_text('{"prompt": "Hi"}\n')
    Path("link").symlink_to(file)
    model = () if "-m" in arguments else ("-m", "nowhere")
    for report in (file, "link", f"../{tmp_path.name}/{file.name}"):
        refused = invoke(*arguments, *model, "--report", report)
        assert refused.exit_code == 2
        assert f"--report {report} is also " in refused.stderr
    assert file.read_text() == '{"prompt": "Hi"}\n'


def test_a_report_may_go_to_a_device_that_is_also_read(
    invoke: Invoke, tiny: list[str], tmp_path: Path
) -> None:
    """A device has no content to lose."""
    text = tmp_path / "text"
    text.write_text("Once upon a time")
    arguments = ("--restore-prompt", "/dev/null", "--report", "/dev/null")
    assert "is also" not in invoke("generate", "-f", text, *arguments, *tiny).stderr
