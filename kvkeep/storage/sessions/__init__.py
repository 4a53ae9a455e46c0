"""Sessions by name, in a folder or leased from an object store."""
