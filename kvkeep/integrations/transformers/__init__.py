"""kvkeep inside Hugging Face transformers: its KV cache for any of their models.

`KvkeepCache` replaces a transformers cache; `from_transformers` turns a transformers model into a
kvkeep model. Both register hooks on the model, which do nothing unless kvkeep computes attention.
"""

import re

_OLDEST_VERSION, _VERSION_LIMIT = (5, 16), (6, 0)


def require_version() -> None:
    """Raise ImportError for a version of transformers that kvkeep is not tested with."""
    import transformers  # here, since transformers replaces its module in sys.modules

    installed = transformers.__version__
    version = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if not _OLDEST_VERSION <= version < _VERSION_LIMIT:
        oldest, limit = (".".join(map(str, v)) for v in (_OLDEST_VERSION, _VERSION_LIMIT))
        required = f">={oldest},<{limit}"
        raise ImportError(
            f"kvkeep needs transformers {required}; found {installed}: pip install "
            f'"transformers{required}"'
        )


require_version()

from kvkeep.integrations.transformers.cache import KvkeepCache  # noqa: E402
from kvkeep.integrations.transformers.model import (  # noqa: E402
    TransformersModel,
    from_transformers,
    unhook,
)

__all__ = ["KvkeepCache", "TransformersModel", "from_transformers", "unhook"]
