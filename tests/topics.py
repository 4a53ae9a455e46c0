"""Real text from the standard library: the help topics of Python."""

from pathlib import Path
from pydoc_data import topics

from kvkeep.model import Model


def topic_text() -> str:
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


_encoded: dict[Path, list[int]] = {}


def topic_ids(model: Model) -> list[int]:
    """Return the tokens of the whole text (113,108 for SmolLM2), encoded once per model."""
    if model.folder not in _encoded:
        _encoded[model.folder] = model.text.encode(topic_text())
    return _encoded[model.folder]
