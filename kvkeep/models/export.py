"""Moved to kvkeep.models.weights.export; this alias is removed in 0.3."""

import warnings

from kvkeep.models.weights.export import export as export

warnings.warn(str(__doc__), DeprecationWarning, stacklevel=2)
