"""`kvkeep batch`: generate answers to many prompts at once, into a JSONL file."""
