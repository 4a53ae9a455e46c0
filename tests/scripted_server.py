"""A server whose model writes the answers of a script, for real clients:

    python -m tests.scripted_server SCRIPT.json [--port N] [--max-kv-size N] [--log FILE]

A script is a JSON list of rules. The first rule whose `when`, a regular expression, is found in the
text of the prompt, and whose `unless` is not, gives the answer, `write`:

    [{"when": "tool_response", "write": "Done."},
     {"when": "list the files", "write": "<tool_call>...</tool_call>"}]

In `write`, `\\g<name>` stands for a named group of `when`. The model is a small random one with the
default model's tokenizer and template. Each prompt and its answer are appended to the log.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvkeep.loader import load_model
from kvkeep.server.keys import ApiKeys
from kvkeep.server.lifecycle import run_server
from tests.scripted_model import ScriptedEngine, model_with_text_of

_DEFAULT_ANSWER = "OK."


def script_writer(
    rules: Sequence[Mapping[str, str]], log: Path | None = None
) -> Callable[[str], str]:
    """Return the function that answers prompts by the rules of a script."""

    def write(prompt: str) -> str:
        answer = _answer(rules, prompt)
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
        return answer

    return write


def _answer(rules: Sequence[Mapping[str, str]], prompt: str) -> str:
    for rule in rules:
        match = re.search(rule.get("when", ""), prompt, re.DOTALL)
        unless = rule.get("unless")
        if match and not (unless and re.search(unless, prompt, re.DOTALL)):
            return match.expand(rule["write"]) if r"\g<" in rule["write"] else rule["write"]
    return _DEFAULT_ANSWER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-kv-size", type=int, default=60_000)
    parser.add_argument("--context-policy", default="refuse")
    parser.add_argument("--prompt-rules", default="default")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--allow-edit", action="store_true")
    options = parser.parse_args()
    write = script_writer(json.loads(options.script.read_text()), options.log)
    settings: dict[str, Any] = {"policy": "sliding", "max_kv_size": options.max_kv_size}
    with tempfile.TemporaryDirectory() as folder:
        model = model_with_text_of(Path(folder) / "model", load_model().folder)
        engine = ScriptedEngine(model, write, settings=settings, folder=Path(folder) / "sessions")
        server_options = {
            "host": "127.0.0.1",
            "port": options.port,
            "alias": "kvkeep-scripted",
            "allow_edit": options.allow_edit,
            "allow_host": (),
            "allow_origin": (),
            "grace": 1.0,
            "quiet": False,
            "verbose": False,
            "context_policy": options.context_policy,
            "compact_at": None,
            "prompt_rules": options.prompt_rules,
        }
        with engine:
            run_server(engine, ApiKeys(), server_options)


if __name__ == "__main__":
    main()
