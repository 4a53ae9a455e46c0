"""Deprecated alias of `kvkeep.models.weights.export`; removed in the next release."""

import warnings

from kvkeep.models.weights.export import export as export

warnings.warn(
    "moved to kvkeep.models.weights.export; this alias goes with the next release",
    DeprecationWarning,
    stacklevel=2,
)
