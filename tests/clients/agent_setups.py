"""How each coding agent is installed, configured for a server, and run."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = "kvkeep-scripted"


@dataclass(frozen=True)
class AgentRun:
    """A prompt for an agent. home: a folder of its own, for all of its files."""

    prompt: str
    url: str
    home: Path
    resumes: bool = False  # the session before
    image: Path | None = None


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    package: of npm, with its version. shell, read: the names of its tools and their arguments, for
    a command and for reading notes.txt. command: the program's arguments. environment: beside PATH.
    """

    package: str
    program: str
    shell: tuple[str, Mapping[str, object]]
    read: tuple[str, Mapping[str, object]]
    command: Callable[[AgentRun], Sequence[str]]
    environment: Callable[[AgentRun], Mapping[str, str]]
    compacts: bool = False  # goes on with a summary when the context is full, in one run


def _codex_command(run: AgentRun) -> list[str]:
    provider = f'{{name="kvkeep",base_url="{run.url}/v1",wire_api="responses"}}'
    options = ["-c", "model_provider=kvkeep", "-c", f"model_providers.kvkeep={provider}"]
    options += ["-m", MODEL, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    image = ["-i", str(run.image)] if run.image else []
    resume = ["resume", "--last"] if run.resumes else []
    return ["exec", *options, *resume, *image, "--", run.prompt]


def _claude_command(run: AgentRun) -> list[str]:
    prompt = run.prompt + (f" It is in {run.image}." if run.image else "")
    resume = ["--continue"] if run.resumes else []
    return ["-p", prompt, "--permission-mode", "bypassPermissions", *resume]


def _claude_environment(run: AgentRun) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": run.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CONFIG_DIR": str(run.home / "claude"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",  # it refuses to run tools unasked as root otherwise
    }


def _opencode_command(run: AgentRun) -> list[str]:
    image = ["--file", str(run.image)] if run.image else []
    resume = ["--continue"] if run.resumes else []
    return ["run", run.prompt, *resume, *image]


def _opencode_environment(run: AgentRun) -> dict[str, str]:
    model = {"name": MODEL, "limit": {"context": 60_000, "output": 8_000}}
    model["modalities"] = {"input": ["text", "image"], "output": ["text"]}  # type: ignore[assignment]
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvkeep",
        "options": {"baseURL": f"{run.url}/v1", "apiKey": "none"},
        "models": {MODEL: model},
    }
    config = {"provider": {"kvkeep": provider}, "model": f"kvkeep/{MODEL}", "autoupdate": False}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def _qwen_command(run: AgentRun) -> list[str]:
    prompt = run.prompt + (f" @{run.image.name}" if run.image else "")
    resume = ["--continue"] if run.resumes else []
    return ["-p", prompt, "--yolo", *resume]


def _openai_environment(run: AgentRun) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": f"{run.url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": MODEL,
    }


def notes_path() -> str:
    return os.path.join("{project}", "notes.txt")


AGENTS = {
    "codex": Agent(
        "@openai/codex@0.171.0",
        "codex",
        ("exec_command", {"cmd": "wc -l notes.txt"}),
        ("exec_command", {"cmd": "cat notes.txt"}),
        _codex_command,
        lambda run: {"CODEX_HOME": str(run.home)},
    ),
    "claude": Agent(
        "@anthropic-ai/claude-code@2.1.197",
        "claude",
        ("Bash", {"command": "wc -l notes.txt", "description": "Count lines"}),
        ("Read", {"file_path": notes_path()}),
        _claude_command,
        _claude_environment,
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33",
        "opencode",
        ("bash", {"command": "wc -l notes.txt", "description": "Count lines"}),
        ("read", {"filePath": notes_path()}),
        _opencode_command,
        _opencode_environment,
        compacts=True,
    ),
    "qwen": Agent(
        "@qwen-code/qwen-code@0.15.10",
        "qwen",
        ("run_shell_command", {"command": "wc -l notes.txt", "is_background": False}),
        ("read_file", {"file_path": notes_path()}),
        _qwen_command,
        _openai_environment,
    ),
}
