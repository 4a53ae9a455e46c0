"""Moved to kvkeep.models.hub.source; this alias is removed in 0.3."""

import warnings

from kvkeep.models.hub.source import resolve as resolve

warnings.warn(str(__doc__), DeprecationWarning, stacklevel=2)
