"""Install the client libraries of `test_libraries.py`, each in an environment of its own.

    python tests/clients/install.py FOLDER            # all: about 3 GB, of which Open WebUI is 2.4
    python tests/clients/install.py FOLDER openai node
    KVKEEP_CLIENTS=FOLDER python -m pytest tests/clients/test_libraries.py

Environments that are complete stay as they are.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# The releases that the tests were last run with.
PYTHON = {
    "openai": ["openai==3.57.0"],
    "anthropic": ["anthropic==2.14.0"],
    "litellm": ["litellm==1.110.2"],
    "langchain": ["langchain-openai==1.7.4", "langchain-anthropic==1.7.10"],
    "pydantic-ai": ["pydantic-ai-slim[openai,anthropic]==2.68.0"],
    "openai-agents": ["openai-agents==0.24.0"],
    "instructor": ["instructor==1.17.0"],
    "llama-index": ["llama-index-llms-openai-like==0.8.1"],
    "ollama": ["ollama==0.6.3"],
    "haystack": ["haystack-ai==3.4.1"],
    # Its torch would bring gigabytes of CUDA libraries.
    "open-webui": ["open-webui==0.12.4", "torch==2.13.0"],
    "schemathesis": ["schemathesis==4.32.5"],
    "llama-cpp": ["openai~=2.14.0", "pytest~=8.3.3", "pytest-timeout", "requests", "wget"],
}
PYTHON["llama-cpp"] += ["filelock", "aiohttp", "prometheus-client"]  # of llama.cpp's own tests
NODE = {
    "node": "24",  # the SDK needs 22, and distributions have less
    "ai": "7.0.173",
    "@ai-sdk/openai": "4.0.118",
    "@ai-sdk/openai-compatible": "3.0.92",
    "@ai-sdk/anthropic": "4.0.105",
    "@anthropic-ai/sdk": "1.14.0",
    "ollama": "0.6.4",
    "openai": "7.57.0",
    "zod": "4.6.7",
}


def install_python(folder: Path, requirements: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    # uv resolves and links the larger ones in seconds, where pip takes minutes.
    subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
    links = os.environ.get("PIP_FIND_LINKS")
    where = ["--find-links", links] if links else []
    command = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python, *where]
    subprocess.run([*command, *requirements], check=True)


def install_node(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("the node clients need npm")
    folder.mkdir(parents=True, exist_ok=True)
    package = {"private": True, "type": "module", "dependencies": NODE}
    (folder / "package.json").write_text(json.dumps(package))
    subprocess.run([npm, "install", "--silent"], cwd=folder, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PYTHON)} and node; default: all")
    options = parser.parse_args()
    for name in options.names or [*PYTHON, "node"]:
        folder = options.folder / name
        done = folder / "installed"
        if done.exists():
            continue
        print(f"{name} ...", flush=True)
        if name == "node":
            install_node(folder)
        else:
            install_python(folder, PYTHON[name])
        done.touch()


if __name__ == "__main__":
    main()
