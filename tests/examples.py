"""Numbers of examples that properties are tried on; `make test-new` tries ten times as many."""

import os

FACTOR = int(os.environ.get("KVKEEP_EXAMPLES", "1"))


def examples(count: int) -> int:
    """Return a number of examples: the count, times KVKEEP_EXAMPLES."""
    return count * FACTOR
