"""Several servers over one store: each session is written by one at a time. See docs/fleet.md."""
