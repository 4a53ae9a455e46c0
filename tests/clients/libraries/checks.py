"""The frame of each library's script: questions, a tool, and a loop over the checks.

Runs in the library's own environment, so it uses nothing but Python's standard library.
"""

import itertools
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
MODEL = "smollm2"
SYSTEM = "Answer in one word."
QUESTION = "What is the capital of France?"
# Of a scripted model, which decides on a call by itself (`test_libraries.py`).
ANSWER = "An umbrella helps."
_numbers = itertools.count(1)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def weather_question() -> str:
    """Return a question that no prompt began with yet: the script sees only new text."""
    return f"{next(_numbers)}: What is the weather in Paris?"


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"It rains in {city}."


def run_checks(*checks: Callable[[], None]) -> None:
    """Run the checks; print the name of each that passes, and the traceback of each other."""
    failed = 0
    for check in checks:
        try:
            check()
            print(check.__name__, flush=True)
        except Exception:
            failed += 1
            print(f"--- {check.__name__}", file=sys.stderr)
            traceback.print_exc()
    sys.exit(1 if failed else 0)
