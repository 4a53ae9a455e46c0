"""Words and sentences for made-up facts, read from the file facts.toml."""

import tomllib
from pathlib import Path
from typing import Any

FACTS_TOML: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("facts.toml").read_text(encoding="utf-8")
)
WORD_LISTS = {name: tuple(words.split()) for name, words in FACTS_TOML["words"].items()}
WORDS, NAMES, CODE_WORDS = WORD_LISTS["common"], WORD_LISTS["names"], WORD_LISTS["code"]
