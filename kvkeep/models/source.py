"""Moved to kvkeep.models.hub.source; this alias goes with the next release."""

import warnings

from kvkeep.models.hub.source import resolve as resolve

warnings.warn(str(__doc__), DeprecationWarning, stacklevel=2)
