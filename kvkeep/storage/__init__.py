"""Everything on disk or in an object store. Imports downward only; see docs/architecture.md."""
