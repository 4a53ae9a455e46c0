"""kvkeep inside of Hugging Face transformers: its memory for any of their models.

`KvkeepCache` goes where a cache of theirs goes; `from_transformers` makes a model of theirs one of
kvkeep's. Nothing is patched: hooks hang on the model, and do nothing unless kvkeep attends.
"""

from kvkeep.integrations.transformers.versions import require_version

require_version()

from kvkeep.integrations.transformers.cache import KvkeepCache  # noqa: E402
from kvkeep.integrations.transformers.model import (  # noqa: E402
    TransformersModel,
    from_transformers,
    unhook,
)

__all__ = ["KvkeepCache", "TransformersModel", "from_transformers", "unhook"]
