"""Files: written whole or not at all, and on disk when that is said. Imports errors alone."""
