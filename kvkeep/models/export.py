"""Moved to kvkeep.models.weights.export; this alias goes with the next release."""

import warnings

from kvkeep.models.weights.export import export as export

warnings.warn(str(__doc__), DeprecationWarning, stacklevel=2)
