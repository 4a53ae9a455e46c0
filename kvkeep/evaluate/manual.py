"""A long real text that is on every machine that has Python: Python's own manual."""


def manual_text() -> str:
    """All help topics in the order of their names: 113,108 tokens of SmolLM2 in Python 3.11."""
    from pydoc_data.topics import topics  # most of a megabyte, for those who ask

    return "\n".join(topics[name] for name in sorted(topics))
