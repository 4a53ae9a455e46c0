"""Real text that comes with every Python."""

from pydoc_data import topics

from kvkeep.model import Model


def topic_text() -> str:
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def topic_ids(model: Model) -> list[int]:
    return model.text.encode(topic_text())
