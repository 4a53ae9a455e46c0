"""Clients that `kvkeep launch` runs: how each gets a server's address, by its own settings.

Every setting is an argument, an environment variable or a file in a folder of the launch, so that
no file of the user is changed and the user's other settings hold.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvkeep.models.hub.library import data_folder

_ONE_HOUR_MS = 3_600_000
_MAX_OUTPUT = 32_000


@dataclass(frozen=True)
class RunningServer:
    """A server to which a client connects.

    context: its tokens, if known. key: its API key. name_digest: of its model, if known.
    """

    url: str
    model: str
    context: int | None = None
    key: str = "none"
    name_digest: str | None = None

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def max_output(self) -> int | None:
        """The tokens of an answer for which a client should leave room: a quarter at most."""
        return None if self.context is None else min(_MAX_OUTPUT, self.context // 4)


@dataclass(frozen=True)
class ClientSettings:
    """The settings of a client for one run.

    arguments: before the user's. environment: None removes a variable. files: texts by name.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchedClient:
    """A client. settings: makes its settings for a server and the folder that has its files."""

    program: str
    install: str  # the command that installs it
    settings: Callable[[RunningServer, Path], ClientSettings]


def _codex(server: RunningServer, folder: Path) -> ClientSettings:
    provider = {
        "name": "kvkeep",
        "base_url": server.openai_url,
        "wire_api": "responses",
        "env_key": "KVKEEP_API_KEY",
    }
    options: dict[str, str | int] = {"model": server.model, "model_provider": "kvkeep"}
    options |= {f"model_providers.kvkeep.{name}": value for name, value in provider.items()}
    options["model_providers.kvkeep.stream_idle_timeout_ms"] = _ONE_HOUR_MS
    if server.context is not None:
        options["model_context_window"] = server.context
    flags = [word for name, value in options.items() for word in ("-c", f"{name}={_toml(value)}")]
    return ClientSettings(tuple(flags), {"KVKEEP_API_KEY": server.key})


def _toml(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False)  # a JSON string is a basic string of TOML


def _claude(server: RunningServer, folder: Path) -> ClientSettings:
    kinds = ("OPUS", "SONNET", "HAIKU", "FABLE")
    model_names = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    model_names += [f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in kinds]
    environment: dict[str, str | None] = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        # Each would be used instead of the address or the token.
        **dict.fromkeys(("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")),
        **dict.fromkeys(model_names, server.model),
        "API_TIMEOUT_MS": str(_ONE_HOUR_MS),
        # A line of the system prompt that differs in each session, so that no prefix is reused.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if server.context is not None:
        environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(server.context)
        environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(server.max_output)
    return ClientSettings(environment=environment)


def _opencode(server: RunningServer, folder: Path) -> ClientSettings:
    model: dict[str, object] = {"name": server.model}
    if server.context is not None:
        model["limit"] = {"context": server.context, "output": server.max_output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvkeep",
        "options": {"baseURL": server.openai_url, "apiKey": server.key, "timeout": False},
        "models": {server.model: model},
    }
    name = f"kvkeep/{server.model}"
    config = {"provider": {"kvkeep": provider}, "model": name, "small_model": name}
    return ClientSettings(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen(server: RunningServer, folder: Path) -> ClientSettings:
    generation: dict[str, int] = {"timeout": _ONE_HOUR_MS}
    if server.context is not None:
        generation["contextWindowSize"] = server.context
    settings = {"model": {"generationConfig": generation}}
    flags = ("--auth-type", "openai", "--openai-base-url", server.openai_url)
    environment = {
        "OPENAI_API_KEY": server.key,
        "OPENAI_BASE_URL": server.openai_url,
        "OPENAI_MODEL": server.model,
        "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(folder / "settings.json"),
    }
    files = {"settings.json": json.dumps(settings, indent=2) + "\n"}
    return ClientSettings((*flags, "--model", server.model), environment, files)


def _aider(server: RunningServer, folder: Path) -> ClientSettings:
    model = f"openai/{server.model}"
    metadata: dict[str, object] = {"litellm_provider": "openai", "mode": "chat"}
    metadata |= {"input_cost_per_token": 0, "output_cost_per_token": 0}
    if server.context is not None:
        metadata |= {"max_input_tokens": server.context, "max_output_tokens": server.max_output}
    metadata_file = folder / "metadata.json"
    flags = ["--model", model, "--openai-api-base", server.openai_url, "--timeout", "3600"]
    flags += ["--model-metadata-file", str(metadata_file), "--no-show-model-warnings"]
    files = {metadata_file.name: json.dumps({model: metadata}, indent=2) + "\n"}
    return ClientSettings(tuple(flags), {"AIDER_OPENAI_API_KEY": server.key}, files)


def _open_webui(server: RunningServer, folder: Path) -> ClientSettings:
    environment = {
        "OPENAI_API_BASE_URL": server.openai_url,
        "OPENAI_API_KEY": server.key,
        "DEFAULT_MODELS": server.model,
        "ENABLE_OLLAMA_API": "false",
        "ENABLE_PERSISTENT_CONFIG": "false",  # or the address of the first launch would stay
        "WEBUI_AUTH": "false",  # one user, on this machine
        # Accounts of other installations need a login, and the key would be written to a file here.
        "DATA_DIR": os.environ.get("DATA_DIR", str(data_folder() / "open-webui")),
        "WEBUI_SECRET_KEY": secrets.token_hex(24),
    }
    return ClientSettings(("serve", "--host", "127.0.0.1", "--port", "3000"), environment)


CLIENTS: Mapping[str, LaunchedClient] = {
    "codex": LaunchedClient("codex", "npm install -g @openai/codex", _codex),
    "claude": LaunchedClient("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "opencode": LaunchedClient("opencode", "npm install -g opencode-ai", _opencode),
    "qwen": LaunchedClient("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "aider": LaunchedClient("aider", "uv tool install aider-chat", _aider),
    "openwebui": LaunchedClient("open-webui", "uv tool install open-webui", _open_webui),
}
