"""Real text that comes with every Python."""

from pathlib import Path
from pydoc_data import topics

from kvkeep.model import Model


def topic_text() -> str:
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


_encoded: dict[Path, list[int]] = {}


def topic_ids(model: Model) -> list[int]:
    """Of all of it: 113,108 tokens of SmolLM2, encoded once."""
    if model.folder not in _encoded:
        _encoded[model.folder] = model.text.encode(topic_text())
    return _encoded[model.folder]
