"""Method `kvzip+`: what it takes to say the text again, by what it adds (arXiv:2601.07891)."""

from typing import ClassVar

from kvkeep.compression.methods.base import Repeated
from kvkeep.compression.methods.kvzip import KVzip


class KVzipPlus(KVzip):
    """As `kvzip`, but by how much a cell adds to the token that looks at it.

    The share of attention is multiplied by the norm of the cell's value, projected, and divided by
    that of the residual stream of the token that looks.
    """

    name: ClassVar[str] = "kvzip+"
    reconstructs: ClassVar[Repeated | None] = "contribution"
