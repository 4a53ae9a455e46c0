"""Deprecated alias of `kvkeep.models.hub.source`; removed in the next release."""

import warnings

from kvkeep.models.hub.source import resolve as resolve

warnings.warn(
    "moved to kvkeep.models.hub.source; this alias goes with the next release",
    DeprecationWarning,
    stacklevel=2,
)
