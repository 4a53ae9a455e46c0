"""Sessions and prompts that several machines share, in a store of objects. See docs/fleet.md."""
